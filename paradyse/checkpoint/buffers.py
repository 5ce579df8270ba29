"""Where a model holds its tensors, and how tensors that no checkpoint has get their values.

A model made on the meta device has no values. Parameters and persistent buffers come from a
checkpoint. The others (frequencies of rotary embeddings, positions, masks) are made by the model's
own code: the module's ``reset_parameters``, or the ``_init_weights`` of the HuggingFace model that
it is part of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paradyse.torch_private import buffers_of, parameters_of, unsaved_buffers_of
from paradyse.weights.sharded_tensor import ShardedTensor, rows_here

Place = tuple[nn.Module, dict[str, Any], str]
"""The module that holds a tensor, the one of its dicts that has it, and its key there."""


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor of a model, once however often the model holds it."""

    tensor: Tensor
    names: tuple[str, ...]
    """More than one where it is tied; those of a state dict if there are any."""
    places: tuple[Place, ...]
    stored: bool
    """A parameter or persistent buffer: what a checkpoint has."""

    @property
    def on_meta(self) -> bool:
        return rows_here(self.tensor).is_meta

    def replace(self, new: Tensor) -> None:
        """Put ``new`` in its place, everywhere.

        The object stays the same, for an optimizer that has it; not so where something holds a
        weak reference (a failed trace that is still shown), which forbids that.
        """
        try:
            torch.utils.swap_tensors(self.tensor, new)
        except RuntimeError:
            for _, holder, key in self.places:
                holder[key] = new

    def with_memory(self, device: torch.device) -> Any:
        """A tensor of its kind on ``device``, without values; of a sharded one the rank's rows."""
        x = self.tensor
        new: Any = torch.empty_like(rows_here(x).detach(), device=device)
        if isinstance(x, ShardedTensor):
            new = x.with_rows(new)
        if isinstance(x, nn.Parameter):
            new = nn.Parameter(new, requires_grad=x.requires_grad)
        for name, value in vars(x).items():  # marks of the model's own
            if name not in vars(new):
                setattr(new, name, value)
        return new


def held_tensors(model: nn.Module) -> list[Held]:
    """Parameters, buffers and plain tensor attributes of all modules of ``model``."""
    found: dict[int, list[tuple[str, Place, bool, Tensor]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        volatile = unsaved_buffers_of(module)
        buffers = buffers_of(module)
        for holder in (parameters_of(module), buffers, vars(module)):
            for key, x in holder.items():
                if isinstance(x, Tensor):
                    stored = holder is not vars(module)
                    stored &= holder is not buffers or key not in volatile
                    name = f"{path}.{key}" if path else key
                    found.setdefault(id(x), []).append((name, (module, holder, key), stored, x))
    out = []
    for entries in found.values():
        stored = any(s for _, _, s, _ in entries)
        names = tuple(n for n, _, s, _ in entries if s or not stored)
        out.append(Held(entries[0][3], names, tuple(p for _, p, _, _ in entries), stored))
    return out


def remake(
    model: nn.Module, lost: Sequence[Held], device: torch.device
) -> list[tuple[Held, Tensor]]:
    """Each of ``lost`` with values as the model's own code makes them.

    The model is left as it is, whether this raises or not.

    Args:
        model: that holds the tensors.
        lost: tensors on the meta device that no checkpoint has.
        device: of the values.
    Raises:
        ValueError: the code fails, or leaves elements unwritten.
    """
    by_owner: dict[nn.Module, list[Held]] = {}
    for held in lost:
        by_owner.setdefault(held.places[0][0], []).append(held)
    out = []
    for owner, group in by_owner.items():
        makers = list(_makers(model, group[0].names[0], owner))
        # What is written does not depend on what was there before.
        zeros, ones = (_made(owner, makers, group, device, fill) for fill in (0, 1))
        for held, a, b in zip(group, zeros, ones, strict=True):
            if ((a == 0) & (b == 1)).any():
                raise ValueError(_text(held.names[0], owner, "nothing makes its values"))
            out.append((held, b))
    return out


def _text(name: str, owner: nn.Module, what: str) -> str:
    return (
        f"'{name}' is on the meta device, not persistent, so in no checkpoint, and {what}. "
        f"Give {type(owner).__name__} a reset_parameters() that fills it, or assign it before you "
        "load. Nothing was changed"
    )


def _makers(model: nn.Module, name: str, owner: nn.Module) -> Iterator[Callable[[], Any]]:
    """What may write the buffer ``name`` of ``owner``."""
    if callable(getattr(owner, "reset_parameters", None)):
        yield owner.reset_parameters
    path = name.split(".")[:-1]
    for end in range(len(path), -1, -1):  # the innermost model that it is part of
        init: Any = getattr(model.get_submodule(".".join(path[:end])), "_init_weights", None)
        if callable(init):
            yield partial(init, owner)
            return


def _made(
    owner: nn.Module,
    makers: Iterable[Callable[[], Any]],
    group: Sequence[Held],
    device: torch.device,
    fill: int,
) -> list[Tensor]:
    """The tensors of ``group`` after ``makers``, which find them full of ``fill``."""
    out = [held.with_memory(device).fill_(fill) for held in group]
    with torch.no_grad(), _without_values(owner):
        for held, x in zip(group, out, strict=True):
            held.places[0][1][held.places[0][2]] = x
        try:
            for make in makers:
                make()
            for held, x in zip(group, out, strict=True):
                now = held.places[0][1].get(held.places[0][2])
                if isinstance(now, Tensor) and now is not x and not now.is_meta:
                    x.copy_(now)
        except Exception as e:
            what = f"the model's own code to make it fails ({type(e).__name__}: {e})"
            raise ValueError(_text(group[0].names[0], owner, what)) from e
    return out


@contextmanager
def _without_values(owner: nn.Module) -> Iterator[None]:
    """Inside, parameters and buffers below ``owner`` have no memory that could be written."""
    holders = [h for m in owner.modules() for h in (parameters_of(m), buffers_of(m))]
    saved = [dict(h) for h in holders]
    attributes = {k: v for k, v in vars(owner).items() if isinstance(v, Tensor)}
    try:
        for holder in holders:
            for key, x in holder.items():
                if x is not None:
                    holder[key] = _stand_in(x)
        yield
    finally:
        for holder, before in zip(holders, saved, strict=True):
            holder.clear()
            holder.update(before)
        vars(owner).update(attributes)


def _stand_in(x: Tensor) -> Tensor:
    new = torch.empty(x.shape, dtype=x.dtype, device="meta")
    if isinstance(x, nn.Parameter):
        new = nn.Parameter(new, requires_grad=False)
    new._is_hf_initialized = True  # transformers' initializers pass such a tensor over
    return new
