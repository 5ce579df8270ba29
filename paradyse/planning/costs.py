"""What a block costs, and the most memory that blocks hold at any moment.

Peak memory of a plan (DESIGN 6) is static + communicators + what blocks save and need while they
run, at the moment when that is most: ``peak_bytes``.

Throughout, ``block`` has the widths and numbers of elements, ``workload`` batch, length, dtype and
number of ranks; ``sharded``: 1/p of the weights on each rank at rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paradyse.types import BlockSpec, Point, Workload

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ring_exchange")
"""Names that ``distributed.collectives`` books bytes under, and ``Machine.links`` is keyed by."""


@dataclass(frozen=True)
class Link:
    """How long one collective takes: ``latency_s + sent / bandwidth_bytes``."""

    latency_s: float
    """Seconds for an empty message."""
    bandwidth_bytes: float
    """Bytes per second that a rank sends."""

    def time_s(self, num_bytes: float, messages: float) -> float:
        """Seconds of so many ``messages`` of ``num_bytes`` in all."""
        return messages * self.latency_s + num_bytes / self.bandwidth_bytes


@dataclass(frozen=True)
class Machine:
    """Rates of one rank while all ranks work. ``measure_machine`` fills it; equal on all ranks."""

    matmul_flops: float
    """Floating-point operations per second of a large matmul in the workload's dtype."""
    memory_bandwidth: float
    """Bytes per second read plus written by an elementwise operator."""
    latency_s: float
    """Seconds of a small collective; for those that ``links`` does not list."""
    bandwidth_bytes: float
    """Bytes per second a rank sends; for those collectives that ``links`` does not list."""
    attention_flops: float | None = None
    """Operations per second of the attention kernel, forward; None: as a matmul."""
    op_overhead_s: float = 5e-6
    """Seconds to launch one operator."""
    overlap: float = 0.0
    """Of messages under way while a rank computes, the share of their time, or of computing if that
    takes less, that is not added: 0 to 1."""
    links: Mapping[str, Link] = field(default_factory=dict)
    """Per collective (``COLLECTIVES``), where measured."""
    capacity_bytes: int | None = None
    """Memory of a rank less a reserve; None: unknown."""
    communicator_bytes: int = 0
    """Memory a process group takes on its device."""
    host_bandwidth: float | None = None
    """Bytes per second between the device's memory and the host's, one direction; None: they are
    the same memory."""
    host_capacity_bytes: int | None = None
    """Memory of the host that a rank may use, less a reserve; None: unknown."""
    repeatable: bool = False
    """Whether ranks that compute the same get the same bits: gradients of weights that every rank
    computes whole are compared then, and not sent."""
    source: str = ""
    """Where the numbers come from."""

    def link(self, collective: str) -> Link:
        """How long ``collective`` takes: as measured, else as any message."""
        return self.links.get(collective) or Link(self.latency_s, self.bandwidth_bytes)


class TimeParts(NamedTuple):
    """What the time of a block is made of, by the prior: seconds, those that hide behind others
    included."""

    compute_s: float = 0.0
    """Linears, what surrounds them, launches."""
    attention_s: float = 0.0
    ring_s: float = 0.0
    """Messages that attention hides: a ring's, and of heads in turns."""
    exchange_s: float = 0.0
    """Messages that are waited for, without what the block hides of them itself."""
    weights_s: float = 0.0
    """Messages of weights and of their gradients that neighbouring blocks hide."""


@dataclass(frozen=True)
class BlockCost:
    """Predicted for one block on one rank, forward and, when training, backward."""

    time_s: float
    saved_bytes: int
    """Held from the block's forward to its backward; 0 when not training."""
    workspace_bytes: int
    """Held only while the block runs."""
    comm_bytes: int
    """Sent by this rank."""
    left_bytes: int = 0
    """Held from the block's backward to the end of the step: gradients of whole weights, which are
    summed over ranks when all are there, and what the caller has of a head (``left_bytes``)."""
    source: str = "prior"
    """What the time comes from: "prior", "forest" or "polynomial" (``curves``), "online"."""
    memory_source: str = ""
    """"online" where the bytes were corrected by this run; empty where they are as predicted."""
    host_bytes: int = 0
    """Held on the host from the block's forward to its backward."""
    ahead_bytes: int = 0
    """Whole weights of the block that are on their way while the one before it runs, or in
    backward the one behind."""
    parts: TimeParts = TimeParts()
    """Of the prior's time."""


NOTHING = BlockCost(0.0, 0, 0, 0)
"""Of what was not measured."""


class Beside(NamedTuple):
    """What a step needs beside its blocks and its head."""

    rest: BlockCost
    """Of what is in none of them."""
    floor_bytes: int
    """What every plan needs beyond static at some moment."""
    margin: float
    """Share by which blocks may need more than predicted."""


def without(whole: BlockCost, part: BlockCost) -> BlockCost:
    """``whole``, in which ``part`` was measured or predicted too, less that part; what the part
    saves is gone when blocks' backward begins, and so was workspace of the whole."""
    held = part.saved_bytes + part.workspace_bytes
    return replace(
        whole,
        time_s=max(0.0, whole.time_s - part.time_s),
        workspace_bytes=max(0, whole.workspace_bytes - held),
    )


def behind(
    before: Mapping[str, BlockCost], first: str, cost: BlockCost, point: str, input_bytes: int
) -> BlockCost:
    """``cost`` of a block under ``point``, right behind a block under ``first``.

    If that makes the input again, the input is not kept; what the block before keeps where it
    does not run again is there while this one runs backward.

    Args:
        before: costs of the block before, by point.
        first: the point of the block before.
        cost: of the block, were it behind anything else.
        point: of the block.
        input_bytes: of the input.
    """
    if not Point.parse(first).makes_input_of(Point.parse(point)):
        return cost
    again = before[Point.parse(first).variant].saved_bytes
    return replace(
        cost,
        saved_bytes=max(0, cost.saved_bytes - input_bytes),
        workspace_bytes=cost.workspace_bytes + again,
    )


def join(first: BlockCost, second: BlockCost) -> BlockCost:
    """The cost of two blocks, ``second`` right after ``first``, as of one block."""
    late = second.left_bytes + first.workspace_bytes - second.saved_bytes
    return BlockCost(
        first.time_s + second.time_s,
        first.saved_bytes + second.saved_bytes,
        max(second.workspace_bytes, late),
        first.comm_bytes + second.comm_bytes,
        first.left_bytes + second.left_bytes,
        host_bytes=first.host_bytes + second.host_bytes,
        ahead_bytes=max(first.ahead_bytes, second.ahead_bytes),
    )


def gradient_bytes(block: BlockSpec, workload: Workload, sharded: bool) -> int:
    """Bytes of a block's gradients of whole weights, held until the ranks' are summed after
    backward; 0 for sharded weights, whose gradients are scattered at once, and on one rank, where
    they are added to those in ``.grad`` at once.
    """
    if sharded or not workload.training or workload.num_ranks == 1:
        return 0
    return block.num_weight_elements * workload.weight_itemsize


def peak_bytes(costs: Sequence[BlockCost], rest: BlockCost = NOTHING) -> int:
    """The most held at any moment of a step, beyond static and communicators.

    While a block runs, that is what it and the blocks before it save, what the blocks after it left
    behind when their backward was done, and its workspace: so no more than the sum of all that is
    saved + the largest workspace (DESIGN 6), by much in a model of few layers. Meanwhile weights of
    a neighbouring block are on their way.

    Args:
        costs: of the blocks, in the order of computation.
        rest: of what is in no block: saved all the time; its workspace is needed when all blocks
            have saved.
    """
    return rest.saved_bytes + max(m.held_bytes for m in moments(costs, rest))


class Moment(NamedTuple):
    """What is held beyond static, communicators and what the rest saves, while a block runs or,
    last, while none does."""

    held_bytes: int
    at: int
    """Index of the block."""
    left_bytes: int
    """Of these, what later blocks left."""
    ahead_bytes: int
    """What is on its way for a neighbouring block."""
    workspace_bytes: int


def moments(costs: Sequence[BlockCost], rest: BlockCost = NOTHING) -> list[Moment]:
    """The moments of a step at which most is held; ``costs`` and ``rest`` as of ``peak_bytes``."""
    saved, left, found = 0, sum(c.left_bytes for c in costs), []
    ahead = [0, *(c.ahead_bytes for c in costs), 0]
    for i, c in enumerate(costs):
        saved, left = saved + c.saved_bytes, left - c.left_bytes
        coming = max(ahead[i], ahead[i + 2])
        held = saved + left + coming + c.workspace_bytes
        found.append(Moment(held, i, left, coming, c.workspace_bytes))
    held = saved + ahead[-2] + rest.workspace_bytes
    return [*found, Moment(held, len(costs), 0, ahead[-2], rest.workspace_bytes)]


class CostTable(dict[str, BlockCost]):
    """Point -> what ``cost`` says of it."""

    def __init__(self, cost: Callable[[str], BlockCost]) -> None:
        super().__init__()
        self._cost = cost

    def __missing__(self, point: str) -> BlockCost:
        found = self[point] = self._cost(point)
        return found


def longest_length(need: Callable[[int], float], limit: float, most: int) -> int:
    """The longest length, in tokens, that needs at most ``limit`` bytes, to a thousandth; 0: none.

    Args:
        need: of a length, growing with it.
        most: at least 1; the search ends here.
    """
    if need(1) > limit:
        return 0
    low, high = 1, 2
    while high < most and need(high) <= limit:
        low, high = high, high * 2
    if high >= most:
        if need(most) <= limit:
            return most
        high = most
    while high - low > max(1, low >> 10):
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle) <= limit else (low, middle)
    return low
