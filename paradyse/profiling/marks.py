"""Clock and memory at the edges of every block of one step, and of the head, forward and backward.

In all of this a block may be a head: ``mark_id`` says by which number it is known.

A call that is profiled runs its steps in a ``WatchedFrame``; a plain ``Frame`` knows nothing of
this. Edges in backward are identities on a block's inputs and outputs that autograd runs: the
gradient of an output comes before the block's own backward, that of an input after it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor, fx

from paradyse.distributed.device_events import event_on
from paradyse.graph.subgraph import is_weight
from paradyse.passes.split_steps import BlockStep, HeadStep, Step
from paradyse.runtime.frame import Frame
from paradyse.runtime.program import Program
from paradyse.runtime.saved_memory import Saved, storages
from paradyse.torch_private import is_allocation, profiled_events
from paradyse.weights.no_sync import GradientSync
from paradyse.weights.shard_comm import Gathers
from paradyse.weights.sharded_tensor import ShardedTensor
from paradyse.weights.unshard import Gathered, Shards, Shelf

START, LOSS, END = "start", "loss", "end"
"""Marks of a step: forward lies between the first two, backward between the last two."""

ENTER, EXIT, FREED, GRAD, DONE = "enter", "exit", "freed", "grad", "done"
"""Marks of a block: its forward lies between ENTER and EXIT, its backward between the first GRAD
and the last DONE; at FREED the values that no later step reads are gone."""

FETCH, FETCHED, TAKEN = "fetch", "fetched", "taken"
"""Marks of sharded weights: between FETCHED and TAKEN the next block's are on their way, in memory
that the present block does not keep. What ``weights.vectors`` brings before the first block counts
for none."""

SEND, SENT = "send", "sent"
"""Marks of their gradients: from SENT to the next SEND those of one block are on their way."""


def mark_id(step: Step) -> int | None:
    """The number that marks of ``step`` have: a block's id; of a head one below -1; None: there are
    no marks of it."""
    if isinstance(step, HeadStep):
        return -2 - step.position
    return step.block_id if isinstance(step, BlockStep) else None


def mark_ids(program: Program) -> list[list[int]]:
    """Per block of ``program``, and last of its heads together, the numbers that marks have."""
    heads = [s for s in program.steps if isinstance(s, HeadStep)]
    of: list[Sequence[Step]] = [*([s] for s in program.block_steps), *([heads] if heads else [])]
    return [[i for s in steps if (i := mark_id(s)) is not None] for steps in of]


class Probe(ABC):
    """What is read at every mark; entered as a context for as long as it reads."""

    context: AbstractContextManager[Any] = nullcontext()
    """What must be entered."""

    @abstractmethod
    def note(self) -> None:
        """Read the value of this moment."""

    def __enter__(self) -> Self:
        self.context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)


@dataclass
class Watch:
    """The marks of one step, in the order of time."""

    probe: Probe
    marks: list[tuple[str, int]] = field(default_factory=list)
    """The kind of each mark, and the block id; -1 where it belongs to no block."""
    gradient_bytes: Counter[int] = field(default_factory=Counter)
    """Per block id, of the gradients of its outputs."""

    def mark(self, at: str, block: int = -1) -> None:
        """Add a mark of kind ``at`` for ``block``."""
        self.marks.append((at, block))
        self.probe.note()


class Clock(Probe):
    """Seconds at every mark; on CUDA by events of the device, for which the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._points: list[Any] = []

    def note(self) -> None:
        if self._cuda:
            self._points.append(event_on(self._device, timed=True))
        else:
            self._points.append(time.perf_counter())

    def read(self) -> list[float]:
        """Seconds from the first mark to each."""
        first = self._points[0]
        if self._cuda:
            self._points[-1].synchronize()
            return [first.elapsed_time(p) / 1e3 for p in self._points]
        return [p - first for p in self._points]


@dataclass(frozen=True)
class Level:
    """Memory at one mark, against the first one."""

    held_bytes: int
    peak_bytes: int
    """Most bytes held at any moment since the mark before."""


class DeviceMemory(Probe):
    """The CUDA allocator's own statistics of ``device``.

    Args:
        reset: start the peak anew at every mark. False leaves the statistics to others: the peak
            between two marks is then known if it is the highest so far; else the bytes held at the
            two marks stand for it, a lower bound.
    """

    def __init__(self, device: torch.device, reset: bool = True) -> None:
        self.device, self.reset = device, reset
        self._points: list[tuple[int, int]] = []

    def note(self) -> None:
        found = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]
        self._points.append((found["current"], found["peak"]))
        if self.reset:
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def first_bytes(self) -> int:
        """Bytes held at the first mark."""
        return self._points[0][0]

    def read(self) -> list[Level]:
        first, levels = self.first_bytes, self._points[:1]
        for (before, highest), (held, peak) in pairwise(self._points):
            known = self.reset or peak > highest
            levels.append((held, peak if known else max(before, held)))
        return [Level(held - first, peak - first) for held, peak in levels]


class SavedMemory(Probe):
    """What autograd keeps for backward, on a device whose allocator keeps no statistics.

    Entered as a context, it sees all that is saved. It does not see workspace, so a peak is what is
    held.

    Args:
        given: tensors that are there anyway, such as weights.
    """

    def __init__(self, given: Iterable[Any]) -> None:
        self._given = frozenset(storages(given))
        self._saved = Saved()
        self.context = self._saved.watch()
        self._held: list[int] = []

    def note(self) -> None:
        self._held.append(self._saved.alive_bytes(self._given))

    def read(self) -> list[Level]:
        pairs = zip(self._held, [0, *self._held])
        return [Level(held, max(held, before)) for held, before in pairs]


class HostAllocations(Probe):
    """The CPU allocator keeps no statistics, but tells the profiler of every piece of memory."""

    NAME = "paradyse mark"

    def __init__(self) -> None:
        cpu = torch.profiler.ProfilerActivity.CPU
        self.context = self._profile = torch.profiler.profile(
            activities=[cpu], profile_memory=True, acc_events=True
        )

    def note(self) -> None:
        with torch.profiler.record_function(self.NAME):
            pass

    def read(self) -> list[Level]:
        """The levels. The profiler does not report memory that a thread of gloo frees: a piece that
        is never freed within the step, or is taken anew before, counts until the next mark."""
        events = sorted(self._events())
        marks = [i for i, (_, num_bytes, _) in enumerate(events) if num_bytes is None]
        changes = [num_bytes or 0 for _, num_bytes, _ in events]
        taken: dict[int, int] = {}
        lost: list[int] = []
        for i, (_, num_bytes, address) in enumerate(events):
            if num_bytes is None:
                continue
            before = taken.pop(address, None)
            if num_bytes > 0:
                lost += [before] if before is not None else []
                taken[address] = i
        for i in (*lost, *taken.values()):
            at = bisect_right(marks, i)
            if at < len(marks):
                changes[marks[at]] -= changes[i]
        held = list(accumulate(changes))
        first = held[marks[0]]
        return [  # what counts until a mark is still held just before it
            Level(held[i] - first, max(held[since:i] or held[i : i + 1]) - first)
            for since, i in pairwise((marks[0], *marks))
        ]

    def _events(self) -> Iterator[tuple[int, int | None, int]]:
        """(Nanoseconds, bytes, address) of all memory taken or given back; no bytes for a mark."""
        stack = profiled_events(self._profile)
        while stack:
            event = stack.pop()
            stack += event.children
            if is_allocation(event):
                memory = event.extra_fields
                if memory.device.type == "cpu":
                    yield event.start_time_ns, memory.alloc_size, memory.ptr
            elif event.name == self.NAME:
                yield event.start_time_ns, None, 0


class WatchedFrame(Frame):
    """A frame that marks the edges of its blocks."""

    fuses = False

    def __init__(self, watch: Watch, *args: Any) -> None:
        super().__init__(*args)
        self.watch = watch
        gathering = self.gathering
        gathering.shelf = _WatchedShelf(watch, gathering.shelf.ahead, self.sync)
        if not isinstance(watch.probe, Clock):
            # the first group's weights would count for the block before; the prior counts them
            gathering.streams.ahead = False
        self._ran: int | None = None

    def run_step(self, step: Step, strategy: str) -> None:
        """Run ``step`` under ``strategy``; mark its edges."""
        watch, block = self.watch, mark_id(step)
        if block is None:
            return super().run_step(step, strategy)
        given = {n: self.env[n] for n in step.piece.inputs if self._ends_backward(n)}
        for n, x in given.items():
            self.env[n] = _MarkGradient.apply(watch, DONE, block, x)
        watch.mark(ENTER, block)
        super().run_step(step, strategy)
        watch.mark(EXIT, block)
        self.env.update(given)  # others may read it too, and are not part of this block
        for n in step.gives(strategy).outputs:
            if isinstance(self.env[n], Tensor) and self.env[n].requires_grad:
                self.env[n] = _MarkGradient.apply(watch, GRAD, block, self.env[n])
        self._ran = block

    def free(self, nodes: Sequence[fx.Node]) -> None:
        """Let go of the values of ``nodes``; right after a block, mark it."""
        super().free(nodes)
        if self._ran is not None:
            self.watch.mark(FREED, self._ran)
            self._ran = None

    def _ends_backward(self, node: fx.Node) -> bool:
        """Whether the block reads ``node`` as it is stored, so that the mark belongs to this block;
        a value in another layout is converted once for all its readers."""
        value = self.env.get(node)
        if is_weight(node) or not isinstance(value, Tensor) or isinstance(value, ShardedTensor):
            return False
        as_stored = self.axis.size == 1 or (node in self.ctx.split and node.op != "placeholder")
        return as_stored and value.requires_grad


class _MarkGradient(torch.autograd.Function):
    """A value unchanged; backward marks the moment of its gradient."""

    @staticmethod
    def forward(ctx: Any, watch: Watch, at: str, block: int, x: Tensor) -> Tensor:
        ctx.args = (watch, at, block)
        return x.detach()  # no view: the user may write into what the graph returns

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        watch, at, block = ctx.args
        watch.mark(at, block)
        watch.gradient_bytes[block] += grad.nbytes * (at == GRAD)
        return None, None, None, grad


class _WatchedShelf(Shelf):
    """A shelf that marks when weights are fetched ahead, when they are taken, and when gradients
    are sent."""

    def __init__(self, watch: Watch, ahead: bool, sync: GradientSync) -> None:
        super().__init__(ahead, sync)
        self.holds &= isinstance(watch.probe, Clock)  # else memory is taken at its marks
        self._watch = watch

    def fetch(self, shards: Shards, block_id: int, held: bool = False) -> None:
        self._watch.mark(FETCH)
        super().fetch(shards, block_id, held)
        self._watch.mark(FETCHED)

    def take(self, shards: Shards) -> Gathers | None:
        self._watch.mark(TAKEN)
        return super().take(shards)

    def send(self) -> None:
        super().send()
        self._watch.mark(SEND)

    def sent(self, gathered: Gathered) -> None:
        self._watch.mark(SENT)
        super().sent(gathered)


@dataclass(frozen=True)
class Span:
    """Marks that belong to one block."""

    block: int
    backward: bool
    first: int
    exit: int
    """When the work of the block is done."""
    last: int
    """When the values that only this block read are gone too."""


def find_spans(marks: Sequence[tuple[str, int]]) -> list[Span]:
    """Forward and, where there is one, backward of every block in ``marks``."""
    at: dict[tuple[str, int], list[int]] = {}
    for i, mark in enumerate(marks):
        at.setdefault(mark, []).append(i)
    edges = [i for i, (what, _) in enumerate(marks) if what in (GRAD, END)]
    spans = []
    for block in [b for what, b in marks if what == ENTER]:
        enter, left, freed = (at[what, block][0] for what in (ENTER, EXIT, FREED))
        spans.append(Span(block, False, enter, left, freed))
        if grads := at.get((GRAD, block)):
            # An input without a gradient: backward ends where the next block's begins.
            until = next(i for i in edges if i > grads[0] and marks[i] != (GRAD, block))
            done = at.get((DONE, block), [until])[-1]
            spans.append(Span(block, True, grads[0], done, done))
    return spans


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step on this rank."""

    forward_s: dict[int, float]
    """Seconds per block id; -1 is all that is in no block."""
    backward_s: dict[int, float]

    @property
    def step_s(self) -> float:
        return sum(self.forward_s.values()) + sum(self.backward_s.values())


def times_of(watch: Watch, seconds: Sequence[float]) -> StepTimes:
    """What each block took by the ``seconds`` at the marks of ``watch``; the parts add up to the
    whole step."""
    ends = {what: seconds[i] for i, (what, block) in enumerate(watch.marks) if block == -1}
    parts: tuple[dict[int, float], dict[int, float]] = ({}, {})
    for s in find_spans(watch.marks):
        parts[s.backward][s.block] = seconds[s.exit] - seconds[s.first]
    for part, (begin, end) in zip(parts, pairwise((START, LOSS, END)), strict=True):
        part[-1] = max(0.0, ends[end] - ends[begin] - sum(part.values())) if part else 0.0
    return StepTimes(*parts)


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one step on this rank, beyond those held when it began."""

    saved_bytes: dict[int, int]
    """Bytes per block id that are held after the block's forward and not before; -1 is what is held
    beyond their sum when the first block's backward begins."""
    workspace_bytes: dict[int, int]
    """Per block id, the most held while it ran: in forward beyond what was held after it, in
    backward beyond what it and the blocks before it save and those behind it left; gradients that
    blocks hand on are part of it. -1: the most held beyond all that is saved, such as logits, until
    the last block's backward."""
    ahead_bytes: dict[int, int]
    """Per block id, of its weights, what was on its way while another block ran, whose workspace
    does not have it."""
    floor_bytes: int
    """The most held after the last block's backward, when nothing is saved any more."""
    peak_bytes: int


def memory_of(
    watch: Watch, levels: Sequence[Level], left: Mapping[int, int], new_bytes: int = 0
) -> StepMemory:
    """What each block held by the ``levels`` at the marks of ``watch``.

    Weights that are on their way count for their own block, once it has taken them, and for no
    other (``BlockCost.ahead_bytes``). With these ``planning.costs.peak_bytes`` of the parts is what
    was held at most, or more.

    Args:
        left: per block id what the block leaves until the end of the step (``prior.left_bytes``),
            if anything.
        new_bytes: of gradients that this step's backward made: static, no part of rest or floor.
    """
    held, peaks, taken = _without_others(watch.marks, levels)
    spans = sorted(find_spans(watch.marks), key=lambda s: s.first)
    saved = {s.block: held[s.last] - held[s.first] for s in spans if not s.backward}
    backward = [s for s in spans if s.backward]
    turn = backward[0].first if backward else watch.marks.index((LOSS, -1))
    end = max((s.last for s in backward), default=len(levels))
    workspace, ahead = dict.fromkeys(saved, 0), dict.fromkeys(saved, 0)
    rest = max(0, held[turn] - sum(saved.values()))
    last_first = list(reversed(saved))
    behind = dict(zip(last_first, accumulate((left.get(b, 0) for b in last_first), initial=0)))
    handed = watch.gradient_bytes
    own = {s.block: held[s.first] - behind[s.block] - handed[s.block] for s in backward}
    due = _due_in_backward(saved, rest, own)
    saved[-1] = rest
    outside = set(range(1, len(levels)))
    for s in spans:
        inside = range(s.first + 1, s.last + 1)
        outside.difference_update(inside)
        begun = max(due[s.block], min(held[s.first], due[s.block] + behind[s.block] + new_bytes))
        beyond = max(peaks[i] for i in inside) - (begun if s.backward else held[s.last])
        workspace[s.block] = max(workspace[s.block], beyond)
        ahead[s.block] = max(ahead[s.block], *(taken.get(i, 0) for i in inside))
    between = (peaks[i] - new_bytes * (i > turn) for i in outside if i <= end)
    workspace[-1] = max(0, max(between, default=0) - sum(saved.values()))
    floor = max(0, max((peaks[i] for i in outside if i > end), default=0) - new_bytes)
    peak = max(level.peak_bytes for level in levels[1:])
    return StepMemory(saved, workspace, ahead, floor, peak)


def _without_others(
    marks: Sequence[tuple[str, int]], levels: Sequence[Level]
) -> tuple[list[int], list[int], dict[int, int]]:
    """Bytes held at ``marks`` without weights and gradients that are on their way; the most since
    the mark before, without such weights; index of a mark TAKEN -> bytes of these."""
    coming, going, held, peaks, taken = 0, 0, [], [], dict[int, int]()
    for i, (what, _) in enumerate(marks):
        if what == FETCHED:
            coming += levels[i].held_bytes - levels[i - 1].held_bytes
        peaks.append(levels[i].peak_bytes - coming)
        if what == TAKEN:
            taken[i], coming = coming, 0
        elif what == SEND:
            going = 0
        elif what == SENT:
            going = max(0, levels[i].held_bytes - levels[i - 1].held_bytes)
        held.append(levels[i].held_bytes - coming - going)
    return held, peaks, taken


def _due_in_backward(
    saved: Mapping[int, int], rest: int, begun: Mapping[int, int]
) -> dict[int, int]:
    """Per block id the bytes that are held anyway while its backward runs: what it and the blocks
    before it save, and what the caller has of a head, such as logits.

    Args:
        saved: per block, in the order of forward.
        rest: what is saved of what is in no block.
        begun: bytes held when each block's backward began, in that order, but for those that
            blocks behind it left and gradients of its outputs.
    """
    due = {block: rest + n for block, n in zip(saved, accumulate(saved.values()))}
    if any(block < 0 for block in due):
        first = next((block for block in begun if block >= 0), None)
        by_caller = 0 if first is None else max(0, begun[first] - due[first])
        due |= {block: n + by_caller for block, n in due.items() if block >= 0}
    return due
