"""The axes of a mesh: sequences are split over the last, batches over the one before it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from paradyse.distributed.session import Session

Runs = tuple[tuple[int, int], ...]
"""Contiguous stretches of positions, (start, length) each, in the order in which a tensor holds
them.
"""


MOST_IN_ONE_CHUNK = 8
"""Tokens of a rank up to which none is added to make their number even: padding then is a ninth of
them at most, and in attention over so few balance is worth less."""


@dataclass(frozen=True)
class TokenLayout:
    """Which global positions each rank holds: the order that balances causal attention.

    The sequence is padded at its end to 2p chunks of ``chunk`` tokens; rank r holds chunk r and
    then chunk 2p-1-r, so every rank sees the same amount of causal work. A sequence of few tokens,
    or the sequences of a batch, are padded to p chunks where these are fewer, and rank r holds
    chunk r: an odd number of tokens is one chunk. One rank holds everything, unpadded.
    """

    num_ranks: int
    seq_len: int

    @property
    def chunk(self) -> int:
        """Tokens in one chunk."""
        return self.local_len if self._is_one_chunk else self.local_len // 2

    @property
    def local_len(self) -> int:
        """Tokens a rank holds, padding included."""
        least = -(-self.seq_len // self.num_ranks)
        if self.num_ranks == 1 or least <= MOST_IN_ONE_CHUNK:
            return least
        return 2 * -(-self.seq_len // (2 * self.num_ranks))

    @property
    def _is_one_chunk(self) -> bool:
        return self.num_ranks == 1 or self.local_len % 2 == 1

    def runs(self, rank: int) -> Runs:
        """Global positions of ``rank``'s tokens. Positions >= seq_len are padding."""
        c, last = self.chunk, 2 * self.num_ranks - 1
        first = (rank * c, c)
        return (first,) if self._is_one_chunk else (first, ((last - rank) * c, c))


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh as one rank sees it: the process group and the rank's place in it."""

    name: str
    """Key under which operators find the axis again (``axis_named``): equal on all ranks, and in
    the next run of the same program, so that compiled code with it is found in caches on disk."""
    size: int
    rank: int
    group: Any = None
    """The process group; None when the axis has one rank."""
    session: Session = field(default_factory=Session, compare=False, repr=False)
    """What this process keeps for the axis."""
    lane: str = ""
    """What the messages of ``group`` are for, where it carries those of one purpose alone
    (``distributed/lanes.py``); "": all others."""

    @cached_property
    def backend(self) -> str:
        """What carries its messages, as ``backend_of`` the process group."""
        return backend_of(self.group)

    def layout(self, seq_len: int) -> TokenLayout:
        """Where the tokens of a sequence of ``seq_len`` lie."""
        return TokenLayout(self.size, seq_len)


SINGLE = Axis("single", 1, 0)
"""The axis of one rank; it lasts as long as the process."""

_AXES: dict[str, Axis] = {SINGLE.name: SINGLE}
"""Name -> axis: the registry of those whose process group lives."""


def axis_named(name: str) -> Axis:
    """The axis that is registered under ``name``."""
    return _AXES[name]


def live_axes() -> list[Axis]:
    """The axes whose process groups have not been destroyed."""
    for name, axis in list(_AXES.items()):
        if axis.group is not None and not is_alive(axis.group):
            del _AXES[name]
            axis.session.end()
    return list(_AXES.values())


def register_axis(axis: Axis) -> Axis:
    """Have ``axis_named`` find ``axis``, in place of one of that name."""
    _AXES[axis.name] = axis
    return axis


@dataclass(frozen=True)
class GroupMesh:
    """Some ranks of ``everyone`` as the option ``mesh``: they compute together what is theirs, with
    weights that lie spread over ``everyone``, beside other groups that do the same at that time.
    """

    axis: Axis
    """The ranks of the group: a sequence axis, which may have one rank."""
    everyone: Axis
    """All ranks, each of which is in one group."""


def everyone_of(axis: Axis, mesh: Any = None) -> Axis:
    """The ranks over which weights lie, and which compare their calls, where ``axis`` is the
    sequence axis of the option ``mesh``."""
    return mesh.everyone if isinstance(mesh, GroupMesh) else axis


def ranks_of(axis: Axis) -> tuple[int, ...]:
    """The ranks of ``axis``, in the world."""
    if axis.group is None:
        return (dist.get_rank() if dist.is_initialized() else 0,)
    return tuple(dist.get_process_group_ranks(axis.group))


def unregister_axis(axis: Axis) -> None:
    """Have ``axis_named`` find ``axis`` no longer."""
    if _AXES.get(axis.name) is axis:
        del _AXES[axis.name]


def resolve_axis(mesh: Any = None) -> Axis:
    """The sequence axis: of ``mesh`` (its last axis), or one axis over the world.

    Args:
        mesh: a 1-D or 2-D ``DeviceMesh``; 2-D is (data parallel, sequence parallel). Or a
            ``GroupMesh``.
    Raises:
        ValueError: the mesh is none, has more than two axes, or more ranks than the world, or does
            not contain this rank, or there is no process group for it.
    """
    if isinstance(mesh, GroupMesh):
        return mesh.axis
    if mesh is not None:
        _check(mesh)
        return axis_of(mesh.get_group(mesh.ndim - 1))
    if not (dist.is_available() and dist.is_initialized()):
        return SINGLE
    return axis_of(dist.group.WORLD)


def resolve_replicas(mesh: Any = None) -> Axis:
    """The data-parallel axis: the first of a 2-D ``mesh``; one rank where there is none.

    Raises:
        ValueError: as ``resolve_axis``.
    """
    if mesh is None or isinstance(mesh, GroupMesh):
        return SINGLE
    _check(mesh)
    return axis_of(mesh.get_group(0)) if mesh.ndim == 2 else SINGLE


def lacks_group() -> int:
    """How many ranks were started together, by torchrun or its like, where no process group joins
    them yet; else 0."""
    num_ranks = os.environ.get("WORLD_SIZE", "")
    joined = dist.is_available() and dist.is_initialized()
    return int(num_ranks) if num_ranks.isdigit() and int(num_ranks) > 1 and not joined else 0


def check_group(doing: str) -> None:
    """Raise where ``doing`` would take this rank for the only one, before ranks are joined.

    Raises:
        ValueError: several ranks were started and there is no process group.
    """
    if num_ranks := lacks_group():
        raise ValueError(
            f"{doing}: {num_ranks} ranks were started (WORLD_SIZE) and no process group joins them "
            "yet; call torch.distributed.init_process_group before, or make the "
            "TrainingArguments or the Accelerator before, which do"
        )


def _check(mesh: Any) -> None:
    if not (isinstance(getattr(mesh, "ndim", None), int) and hasattr(mesh, "get_group")):
        raise ValueError(
            f"mesh: give a torch DeviceMesh or None, not {type(mesh).__name__} {mesh!r}"
        )
    if not dist.is_initialized():
        raise ValueError(
            "mesh was given but no process group exists; call "
            "torch.distributed.init_process_group first"
        )
    if mesh.ndim > 2:
        raise ValueError(f"mesh has {mesh.ndim} axes; give 1 (sequence) or 2 (data, sequence)")
    if mesh.size() > dist.get_world_size():
        raise ValueError(
            f"the mesh has {mesh.size()} ranks and the world has {dist.get_world_size()}: start as "
            "many ranks, or give a smaller mesh"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of the mesh {mesh}")


def backend_of(group: Any) -> str:
    """What carries messages of ``group`` between the devices that ranks compute on: ``gloo``,
    ``nccl`` or another. A group that was made without naming one has one for each kind of device.
    """
    pairs = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    of = {device: name for device, _, name in pairs}
    return of.get("cuda" if torch.cuda.is_available() else "cpu") or next(iter(of.values()))


def device_of(group: Any) -> torch.device:
    """The device that ranks of ``group`` compute on: that which it was made for (``device_id``), or
    the current one; None stands for one rank."""
    if torch.cuda.is_available() and (group is None or backend_of(group) == "nccl"):
        made_for: torch.device | None = getattr(group, "bound_device_id", None)
        if made_for is not None and made_for.index is not None:
            return made_for
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def check_device(device: torch.device, axes: Iterable[Axis]) -> None:
    """See that a model on ``device`` lies where NCCL carries its messages from, over each of
    ``axes``.

    Raises:
        ValueError: it lies on another device.
    """
    for axis in axes:
        if axis.size == 1 or axis.backend != "nccl":
            continue
        carried = device_of(axis.group)
        if device.type != carried.type or device.index not in (None, carried.index):
            raise ValueError(
                f"the model is on {device}, but NCCL carries messages of rank {dist.get_rank()} "
                f"from {carried}: call torch.cuda.set_device(local_rank) before the model is made "
                "(or give init_process_group the device_id), and put the model there: model.to("
                'torch.device("cuda", local_rank)). To compute on CPUs call '
                'torch.distributed.init_process_group("gloo")'
            )


def axis_of(group: Any) -> Axis:
    """The axis of the ranks of the process ``group``."""
    if dist.get_world_size(group) == 1:
        return SINGLE
    ranks = dist.get_process_group_ranks(group)
    # Two groups that live have two names. One made anew may have the name of one that is gone.
    name = f"{dist.get_backend(group)}:{group.group_name}:{'-'.join(map(str, ranks))}"
    found = _AXES.get(name)
    if found is None or found.group is not group:
        live_axes()
        made = Axis(name, dist.get_world_size(group), dist.get_rank(group), group)
        found = register_axis(made)
    return found


def is_alive(group: Any) -> bool:
    """Whether the process ``group`` has not been destroyed."""
    try:
        dist.get_backend(group)
    except ValueError:  # it has been destroyed
        return False
    return True


def local_positions(
    layout: TokenLayout, rank: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Global positions [local_len] int64 of ``rank``'s tokens under ``layout``, on ``device``."""
    return torch.cat([torch.arange(a, a + n, device=device) for a, n in layout.runs(rank)])
