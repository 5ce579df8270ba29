"""Ranks compare what they are about to do, and with what, before any message depends on it.

A rank that skips a batch, reads logits alone or holds other weights sends other messages than the
rest: then they hang, abort, or train on a mixture of two batches. So before every forward, every
backward and every read of an output that is gathered late, ranks exchange one small message of
fixed size over a group of their own, a digest of a few facts. Where digests differ all ranks
exchange the facts themselves and raise the same error, and are in step again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis, resolve_axis

DOING = "what they do"
WEIGHTS = "the weights (checksum)"
PROFILE = "the profile (checksum)"
BATCH = "the batch (checksum)"
EARLIER_BATCH = "the batch of the call before (checksum)"
RANDOM_STATE = "the random state"
GRADIENTS = "whether gradients are enabled"
PLAN = "the plan"
INPUTS = "the inputs given"
PROGRAM = "the program (checksum)"
"""What errors call the facts."""

WAYS_OUT = {
    DOING: "every rank must run the same lines: call the model, run backward and read its outputs "
    "on all ranks or on none, and skip a batch on all ranks or on none",
    GRADIENTS: "enter torch.no_grad() and model.eval() on every rank alike",
    RANDOM_STATE: "call torch.manual_seed with the same seed on every rank of the group "
    "(dropout draws from it)",
    WEIGHTS: "call torch.manual_seed with the same seed on every rank before the "
    "model is built, or load the same checkpoint on all",
    PROFILE: "give option 'cost_model' a copy of one file on every rank",
    PROGRAM: "the model must be in the same state on every rank: training or evaluation, autocast, "
    "gradient checkpointing, what is trained",
    PLAN: "a function given as option 'plan' must give equal answers on all ranks",
}
SAME_BATCH = (
    "every rank of a sequence-parallel group must be given the same global batch; split data only "
    "across data-parallel replicas"
)


class Agreement:
    """What the ranks of one sequence axis compare.

    Args:
        axis: the sequence axis.
        everyone: all ranks of the mesh, its replicas included, which train together; None: those of
            ``axis``.
    """

    def __init__(self, axis: Axis, everyone: Sequence[int] | None = None) -> None:
        ranks = dist.get_process_group_ranks(axis.group)
        self._num_calls = {True: 0, False: 0}
        """Of calls that train, and of others."""
        self._latest = axis.session.of(_Agreements)
        self._leader = ranks[0]
        self._of_axis = self._everyone = _control(tuple(ranks))
        if everyone is not None and len(everyone) > len(ranks):
            self._everyone = _control(tuple(everyone))

    def begin(self, trains: bool, facts: Mapping[str, Any]) -> Call:
        """A call of the model, compared with the other ranks'.

        Args:
            trains: gradients will be averaged over all ranks of the mesh.
            facts: what errors call it -> a number or text that the ranks of the axis must share.
        Raises:
            ValueError: on every rank, naming what differs, which rank holds what, and the way out.
        """
        self._num_calls[trains] += 1
        kind = "training call" if trains else "call without gradients"
        call = self._latest.call = Call(self, f"{kind} {self._num_calls[trains]}", trains)
        self.compare(f"calls the model ({call.name})", facts, trains)
        return call

    def compare(
        self,
        doing: str,
        facts: Mapping[str, Any],
        together: bool = False,
        common: Mapping[str, Any] | None = None,
    ) -> None:
        """Compare what this rank is ``doing`` and ``facts`` with the other ranks'.

        Args:
            doing: shared by all ranks of the mesh if ``together``, else by those of the axis.
            facts: shared by the ranks of the axis.
            common: shared as ``doing`` is.
        Raises:
            ValueError: as ``begin``.
        """
        shared = {DOING: doing, **(common or {})}
        control = self._everyone if together else self._of_axis
        collectives.traffic(control, collectives.AGREEMENT).name = f"agreement: {doing}"
        digests = _digest(shared), _digest(facts)
        mine = torch.tensor([self._leader, *digests], device="cpu")  # whatever the default device
        table = collectives.all_gather(mine, control, collectives.AGREEMENT)
        rows = {tuple(row) for row in table.tolist()}
        if len({what for _, what, _ in rows}) == 1 and len(rows) == len({at for at, _, _ in rows}):
            return
        told: list[Any] = [None] * control.size
        mine_told = self._leader, shared, {**shared, **facts}, self._num_calls
        dist.all_gather_object(told, mine_told, group=control.group)
        for trains in self._num_calls:  # whoever goes on after this error is in step
            self._num_calls[trains] = max(numbers[trains] for *_, numbers in told)
        raise ValueError(_difference(told, dist.get_process_group_ranks(control.group)))

    def first_says(self, numbers: Sequence[int]) -> list[int]:
        """What the first rank of the axis gives as ``numbers``, as many on every rank."""
        mine = torch.tensor(numbers, device="cpu")
        told: list[int] = collectives.all_gather(
            mine, self._of_axis, collectives.AGREEMENT
        ).tolist()[0]
        return told


@dataclass(frozen=True)
class Call:
    """One call of a model, of which backward and reads of outputs are compared too."""

    agreement: Agreement
    name: str
    trains: bool

    def backward(self, output: str) -> None:
        """Gradients reach ``output``.

        Raises:
            ValueError: on every rank, where another one does something else.
        """
        doing = f"runs backward of {self.name} from {output}"
        self.agreement.compare(doing, {}, self.trains)

    def read(self, output: str) -> None:
        """``output`` is about to be gathered.

        Raises:
            ValueError: on every rank, where another one does something else.
        """
        self.agreement.compare(f"reads the output {output} of {self.name}", {})


class _Agreements(dict[tuple[int, ...], Agreement]):
    """Those of one axis, by the ranks that train together."""

    call: Call | None = None
    """The latest of any of them."""


def current_call(axis: Axis) -> Call | None:
    """The latest call of a model over ``axis``; None where ranks are not compared."""
    return axis.session.of(_Agreements).call


def agreement_of(axis: Axis, mesh: Any = None) -> Agreement | None:
    """The agreement of ``axis``, of the option ``mesh``; None where there is one rank. All ranks of
    the mesh ask for it."""
    if axis.size == 1:
        return None
    everyone = tuple(mesh.mesh.flatten().tolist()) if mesh is not None else ()
    known = axis.session.of(_Agreements)
    if everyone not in known:
        known[everyone] = Agreement(axis, everyone or None)
    return known[everyone]


def compare(axis: Axis, doing: str) -> None:
    """Compare what this rank is ``doing`` with the other ranks of ``axis``.

    Raises:
        ValueError: as ``Agreement.begin``.
    """
    agreement = agreement_of(axis)
    if agreement is not None:
        agreement.compare(doing, {})


def _difference(told: Sequence[tuple[int, Any, Mapping[str, Any], Any]], ranks: list[int]) -> str:
    """The first fact that differs, over all ranks or within the ranks of one axis."""
    everyone = range(len(told))
    axes = [[i for i in everyone if told[i][0] == a] for a in sorted({t[0] for t in told})]
    for of, names in ((everyone, told[0][1]), *((axis, told[axis[0]][2]) for axis in axes)):
        for name in names:
            held = [told[i][2].get(name, "nothing") for i in of]
            if len(set(held)) > 1:
                who = ", ".join(f"rank {ranks[i]}: {v}" for i, v in zip(of, held, strict=True))
                way_out = WAYS_OUT.get(
                    WEIGHTS if name.startswith("the weight ") else name, SAME_BATCH
                )
                return f"ranks of one group disagree on {name}: {who}. {way_out}."
    return f"ranks of one group disagree: {told}"


def _control(ranks: tuple[int, ...]) -> Axis:
    """An axis over ``ranks`` for small messages between hosts, apart from all others: one for the
    life of the world."""
    controls = resolve_axis().session.of(_Controls)
    if ranks not in controls:
        group = dist.new_group(
            list(ranks),
            timeout=collectives.timeout(),
            backend="gloo",
            use_local_synchronization=True,
        )
        name = f"control:{'-'.join(map(str, ranks))}"
        controls[ranks] = Axis(name, len(ranks), ranks.index(dist.get_rank()), group)
    return controls[ranks]


class _Controls(dict[tuple[int, ...], Axis]):
    """Axes for comparing, by their ranks."""


def _digest(x: Any) -> int:
    digest = hashlib.blake2b(repr(x).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class BatchChecksum:
    """The fact that batches are equal. Of a batch on a GPU it is known one call later: the host
    does not wait for the device."""

    def __init__(self) -> None:
        self._earlier: tuple[Tensor, Any] | None = None

    def fact(self, tensors: Sequence[Tensor]) -> dict[str, int]:
        """The checksum of ``tensors``, or of those of the call before where these are on a GPU."""
        if not any(t.is_cuda for t in tensors):
            return {BATCH: checksum(tensors)}
        known = 0
        if self._earlier is not None:
            copy, event = self._earlier
            event.synchronize()
            known = int(copy)
        copy = _checksum(tensors).to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._earlier = copy, event
        return {EARLIER_BATCH: known}


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLE = 1 << 16
"""Elements of a tensor whose places count in its checksum; of larger ones, spread evenly."""


def checksum(tensors: Sequence[Tensor]) -> int:
    """A number that equal ``tensors`` share and different ones, in practice, do not."""
    return int(_checksum(tensors)) if tensors else 0


@torch.no_grad()
def _checksum(tensors: Sequence[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for i, t in enumerate(tensors):
        real = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
        bits = real.reshape(-1).contiguous().view(_INTEGERS[real.element_size()])
        sample = bits[:: max(1, bits.numel() // _SAMPLE)].to(torch.int64)
        placed = sample * torch.arange(1, sample.numel() + 1, device=sample.device)
        here = bits.sum(dtype=torch.int64) + placed.sum() * (2 * i + 1) + bits.numel()
        total = total * 31 + here.to(total.device)
    return total
