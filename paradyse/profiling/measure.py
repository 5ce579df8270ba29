"""Measures a model's blocks under each strategy, on the ranks at hand, into a file of JSON lines.

Whole training steps of the user's own model run under one strategy after the other. What is
measured of a block is what it takes inside such a step (``marks``): its collectives wait
for the ranks as they do in training, and what lies between blocks is apart, as ``rest``. Times are
medians over repeats and over blocks of equal structure; of ranks the slowest counts, and the one
that holds or sends most.

Memory is watched in a step of its own, with gradients in place as from a step before. Such a step
needs static + the most its blocks hold at any moment (``costs.peak_bytes``), or static + floor if
that is more: where weights are replicated their gradients are summed at the end of backward, when
nothing is saved any more. The time of that is part of ``rest``, while its bytes are booked to the
blocks that own the weights, as ``paradyse.stats`` books them.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paradyse.config import check_strategy, parse_bytes
from paradyse.planning.costs import BlockCost, Machine, gradient_bytes, peak_bytes
from paradyse.planning.machine import describe_device, measure_machine
from paradyse.planning.profile_file import (
    MEASURED,
    OVER_LIMIT,
    Header,
    Measurement,
    Profile,
    append,
    present_versions,
    read_profile,
)
from paradyse.profiling.marks import StepMemory
from paradyse.profiling.steps import MakeBatch, Steps
from paradyse.strategies import canonical_strategy
from paradyse.types import ATTENTION_STRATEGIES, REPLICATED, BlockSpec
from paradyse.weights.sharded_tensor import ShardedTensor

log = logging.getLogger(__name__)

T = TypeVar("T")

Part = tuple[str, str, str]
"""Structure, kind and variant: what is measured at each length."""

REST: Part = ("", "rest", "")
"""All that is in no block."""

LEAST_S, MOST_REPEATS = 1.0, 5
"""Steps of less than LEAST_S / repeats seconds are timed more often, up to MOST_REPEATS times as
often: the median of a few short ones would be noise."""


@dataclass(frozen=True)
class Progress:
    """How far a profile is."""

    done: int
    total: int
    """Pairs of a length and a strategy."""
    text: str
    """What is measured next."""


def profile(
    model: torch.nn.Module,
    path: str | Path,
    lengths: Sequence[int],
    batch: int = 1,
    strategies: Sequence[str] | None = None,
    training: bool = True,
    memory_limit: int | str | None = None,
    repeats: int = 5,
    progress: Callable[[Progress], None] | None = None,
    options: Mapping[str, Any] | None = None,
    make_batch: MakeBatch | None = None,
) -> Profile:
    """Measure every block structure of ``model`` under every strategy at every length.

    Call it on every rank, with equal arguments. Rank 0 writes: each measurement is in the file as
    soon as it is made, and those that are there already are not made again. A strategy that passes
    the limit at a length, or is about to by its growth so far, is written down as ``OVER_LIMIT``
    there, and longer lengths are left out for it. Gradients, the training flag and the random state
    are as before when it returns.

    Args:
        model: compiled or not, its weights sharded or not, on the device to be measured.
        path: of the file, which is made, or gone on with.
        lengths: of sequences, in tokens.
        batch: sequences of a batch.
        strategies: which to measure; None: all.
        training: forward and backward, in training mode; False: forward alone, without gradients.
        memory_limit: bytes a rank may hold, weights and gradients included, or text such as
            "80GiB"; None: the device's capacity less a reserve.
        repeats: timed steps for each strategy and length; more where steps are short (``LEAST_S``).
        progress: called on rank 0 before each strategy at each length, and at the end.
        options: of the backend, other than ``plan``, ``strategies`` and ``memory_limit``.
        make_batch: ``(batch, seq_len)`` to the keyword arguments of one call, equal on all ranks;
            None: random ``input_ids``, with themselves as ``labels``.
    Returns:
        The whole file, what was there before included.
    Raises:
        ValueError: an argument is wrong, the file was measured under another header, the model has
            no block to switch or returns no loss.
    """
    _check(lengths, batch, repeats, strategies, options)
    limit = None if memory_limit is None else parse_bytes(memory_limit, "memory_limit")
    steps = Steps(model, options or {}, batch, training, make_batch)
    names = [s for s in ATTENTION_STRATEGIES if s in (strategies or ATTENTION_STRATEGIES)]
    names = names if steps.axis.size > 1 else [REPLICATED]
    machine = measure_machine(steps.axis, steps.parameters[0].dtype, steps.device)
    header = Header(
        versions=present_versions(),
        device=describe_device(steps.device),
        num_ranks=steps.axis.size,
        dtype=str(steps.parameters[0].dtype).removeprefix("torch."),
        sharded=any(isinstance(p, ShardedTensor) for p in steps.parameters),
        inner=(options or {}).get("inner") or "inductor",
        machine=asdict(machine),
        memory_limit=limit,
    )
    book = _Book(Path(path), header, machine, batch, training)
    ask = _Asked(tuple(names), repeats, limit or machine.capacity_bytes or math.inf)
    lengths = sorted(set(lengths))
    done, total = 0, len(lengths) * len(names)
    with steps.prepared():
        steps.find_blocks(lengths[0])
        for seq_len in lengths:
            row = _Row(steps, book, ask, seq_len)
            for name in names:
                if progress is not None and _is_first():
                    progress(Progress(done, total, f"{seq_len} tokens, {name}"))
                row.prepare(name)
                done += 1
            row.time()
            row.close()
    if progress is not None and _is_first():
        progress(Progress(done, total, ""))
    return book.read()


def _check(
    lengths: Sequence[int],
    batch: int,
    repeats: int,
    strategies: Sequence[str] | None,
    options: Mapping[str, Any] | None,
) -> None:
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths {list(lengths)!r}: give at least one, each at least 1 token")
    for name, value in (("batch", batch), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} {value}: give at least 1")
    if strategies is not None and not strategies:
        raise ValueError("strategies: the list is empty; leave it out to measure all")
    for s in strategies or ():
        check_strategy(s, "strategies", auto=False)
    taken = sorted({"plan", "strategies", "memory_limit"} & set(options or ()))
    if taken:
        raise ValueError(f"options {taken}: each strategy is measured as the plan; leave them out")


def _is_first() -> bool:
    """Whether this process writes the file and reports."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _everyone(mine: T) -> list[T]:
    """The value of every rank, on all of them."""
    if not dist.is_initialized():
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _from_first(make: Callable[[], T]) -> T:
    """``make()`` of the rank that writes; what it raises is raised by all."""
    given: list[Any] = [None, None]
    if _is_first():
        try:
            given[0] = make()
        except (ValueError, OSError) as e:
            given[1] = e
    if dist.is_initialized():
        dist.broadcast_object_list(given, 0)
    if given[1] is not None:
        raise given[1]
    out: T = given[0]
    return out


class _Book:
    """The file: what is known, on all ranks alike, and what is written by the first."""

    def __init__(
        self, path: Path, header: Header, machine: Machine, batch: int, training: bool
    ) -> None:
        self.path, self.header, self.machine = path, header, machine
        self.batch, self.training = batch, training
        self.known: dict[tuple[Part, int], Measurement] = {}
        for m in _from_first(self._open):
            if m.batch == batch and m.training == training:
                self.known[(m.structure, m.kind, m.strategy), m.seq_len] = m

    def _open(self) -> tuple[Measurement, ...]:
        append(self.path, self.header)
        found = read_profile(self.path)
        ours, theirs = self.header.memory_limit, found.header.memory_limit
        if ours != theirs:
            raise ValueError(
                f"{self.path}: measured with memory_limit {theirs!r}, this would add measurements "
                f"with {ours!r}; give another file, or remove this one"
            )
        return found.measurements

    def get(self, part: Part, seq_len: int, outcome: str = MEASURED) -> Measurement | None:
        found = self.known.get((part, seq_len))
        return found if found is not None and found.outcome == outcome else None

    def lengths(self) -> list[int]:
        """Those with any measurement."""
        return sorted({seq_len for _, seq_len in self.known})

    def add(self, seq_len: int, rows: Mapping[Part, Mapping[str, Any]]) -> None:
        """Write down ``rows``: the fields of each part."""
        made = [
            Measurement(*part, self.batch, seq_len, self.training, **fields)
            for part, fields in rows.items()
        ]
        for part, m in zip(rows, made, strict=True):
            self.known[part, seq_len] = m
        _from_first(lambda: append(self.path, self.header, made))

    def read(self) -> Profile:
        return _from_first(lambda: read_profile(self.path))


@dataclass
class _Samples:
    """What this rank saw of the blocks of one part."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    saved_bytes: list[int] = field(default_factory=list)
    workspace_bytes: list[int] = field(default_factory=list)
    floor_bytes: int = 0
    sent_bytes: list[Counter[str]] = field(default_factory=list)
    messages: list[Counter[str]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Fields of a measurement: of what adds up over blocks the mean."""
        return {
            "forward_s": statistics.median(self.forward_s),
            "backward_s": statistics.median(self.backward_s),
            "saved_bytes": max(0, math.ceil(statistics.fmean(self.saved_bytes))),
            "workspace_bytes": max(self.workspace_bytes),
            "floor_bytes": self.floor_bytes,
            "sent_bytes": _mean(self.sent_bytes),
            "messages": _mean(self.messages),
        }


def _mean(counts: Sequence[Counter[str]]) -> dict[str, int]:
    total: Counter[str] = sum(counts, Counter())
    return {name: math.ceil(n / len(counts)) for name, n in sorted(total.items())}


def _worst(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The largest of every field, over ranks."""
    out: dict[str, Any] = {}
    for name in ranks[0]:
        values = [r[name] for r in ranks]
        if isinstance(values[0], Mapping):
            keys = sorted({k for v in values for k in v})
            out[name] = {k: max(v.get(k, 0) for v in values) for k in keys}
        else:
            out[name] = max(values)
    return out


@dataclass(frozen=True)
class _Asked:
    names: tuple[str, ...]
    repeats: int
    limit: float
    """Bytes."""


class _Row:
    """The measurements at one length."""

    def __init__(self, steps: Steps, book: _Book, ask: _Asked, seq_len: int) -> None:
        self.steps, self.book, self.ask, self.seq_len = steps, book, ask, seq_len
        self.memory: dict[str, StepMemory] = {}
        """Of the strategies that are to be timed."""
        self.samples: dict[Part, _Samples] = {}
        self.over = {
            name
            for name in ask.names
            for n in book.lengths()
            if n <= seq_len and any(book.get(p, n, OVER_LIMIT) for p in self._parts(name))
        }

    def _part(self, block: BlockSpec, name: str) -> Part:
        taken = name if name in (*block.feasible(), REPLICATED) else block.feasible()[0]
        return block.structure, block.kind, canonical_strategy(block.kind, taken)

    def _parts(self, name: str) -> Counter[Part]:
        """What a step under the strategy is made of, and how many of each."""
        return Counter(self._part(b, name) for b in self.steps.blocks)

    def _missing(self, parts: Iterable[Part]) -> list[Part]:
        return [p for p in parts if (p, self.seq_len) not in self.book.known]

    def prepare(self, name: str) -> None:
        """Watch the memory of a step under the strategy, unless all of it is in the book."""
        if name not in self.over and self._missing(self._parts(name)):
            self._prepare(name)

    def time(self) -> None:
        """Time what was prepared, and write it down.

        Strategies take turns, so what disturbs the machine for a while disturbs them alike.
        """
        if not self.memory and self._missing([REST]):  # all that a kill left out
            for name in self.ask.names:
                if not self.memory and name not in self.over:
                    self._prepare(name)
        repeats, i = dict.fromkeys(self.memory, self.ask.repeats), 0
        while left := [name for name, n in repeats.items() if i < n]:
            for name in left:
                step_s = self._time(name, first=i == 0)
                if i == 0:
                    often = math.ceil(LEAST_S / max(_everyone(step_s)))
                    repeats[name] = max(repeats[name], min(often, MOST_REPEATS * repeats[name]))
            i += 1
        missing = self._missing(self.samples)
        self._write({p: self.samples[p] for p in missing})

    def close(self) -> None:
        """Write down what was over the limit."""
        lost = [p for s in self.ask.names if s in self.over for p in self._missing(self._parts(s))]
        earlier = [n for n in self.book.lengths() if n < self.seq_len]
        lost = [p for p in lost if not any(self.book.get(p, n, OVER_LIMIT) for n in earlier)]
        self.book.add(self.seq_len, {p: {"outcome": OVER_LIMIT} for p in lost})

    def _prepare(self, name: str) -> None:
        memory = None if self._predicted_peak(name) > self.ask.limit else self._memory(name)
        if memory is None:
            self.over.add(name)
            log.info("%s at %d tokens: %s", name, self.seq_len, OVER_LIMIT)
        else:
            self.memory[name] = memory

    def _time(self, name: str, first: bool) -> float:
        """Seconds of one step, and what its parts took; the first one tells of bytes as well."""
        steps, memory = self.steps, self.memory[name]
        before = steps.traffic() if first else {}
        times = steps.times(self.seq_len, name)
        sent = steps.traffic() if first else {}
        for block, forward_s in times.forward_s.items():
            part = REST if block == -1 else self._part(steps.block_of[block], name)
            of = self.samples.setdefault(part, _Samples())
            of.forward_s.append(forward_s)
            of.backward_s.append(times.backward_s.get(block, 0.0))
            if first:
                of.saved_bytes.append(memory.saved_bytes[block])
                of.workspace_bytes.append(memory.workspace_bytes[block])
                of.sent_bytes.append(sent[block][0] - before[block][0])
                of.messages.append(sent[block][1] - before[block][1])
        rest = self.samples[REST]
        rest.floor_bytes = max(rest.floor_bytes, memory.floor_bytes)
        return times.step_s

    def _write(self, samples: Mapping[Part, _Samples]) -> None:
        ranks = _everyone([s.summary() for s in samples.values()])
        worst = [_worst(of) for of in zip(*ranks, strict=True)]
        self.book.add(self.seq_len, dict(zip(samples, worst, strict=True)))

    def _memory(self, name: str) -> StepMemory | None:
        """Memory of a step; None where it is over the limit on any rank."""
        memory, over = None, False
        try:
            self.steps.run(self.seq_len, name)
            memory = self.steps.memory(self.seq_len, name)
            over = self.steps.static_bytes() + memory.peak_bytes > self.ask.limit
        except (MemoryError, RuntimeError) as e:
            if not _is_out_of_memory(e):
                raise
            over = True
        if over:
            self.steps.free()
        return None if any(_everyone(over)) else memory

    def _predicted_peak(self, name: str) -> float:
        """By growth between the two lengths before; in proportion to the length after one."""
        points = [(n, self._beyond_static(name, n)) for n in self.book.lengths()]
        points = [(n, num_bytes) for n, num_bytes in points if num_bytes and n < self.seq_len]
        if not points:
            return 0.0
        (n, held), power = points[-1], 1.0
        if len(points) > 1:
            m, less = points[-2]
            power = min(2.0, max(1.0, math.log(held / less) / math.log(n / m)))
        return self.steps.static_bytes() + held * (self.seq_len / n) ** power

    def _beyond_static(self, name: str, seq_len: int) -> int:
        """What a step needs, by what was measured; 0 where something is missing."""
        rest = self.book.get(REST, seq_len)
        found = [self.book.get(self._part(b, name), seq_len) for b in self.steps.blocks]
        rows = [m for m in found if m is not None]
        if rest is None or len(rows) < len(found):
            return 0
        w = self.steps.workload(seq_len)
        left = [gradient_bytes(b, w, self.book.header.sharded) for b in self.steps.blocks]
        costs = [_held(m, num_bytes) for m, num_bytes in zip(rows, left)]
        alone = replace(self.book.machine, communicator_bytes=0)
        return max(peak_bytes(costs, 0, alone, [_held(rest)]), rest.floor_bytes)


def _held(m: Measurement, left_bytes: int = 0) -> BlockCost:
    """The memory of a measurement."""
    return BlockCost(0.0, m.saved_bytes, m.workspace_bytes, 0, left_bytes)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(t in str(error) for t in ("can't allocate memory", "not enough memory"))
