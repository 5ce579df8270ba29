"""Measures a model's blocks under each strategy, on the ranks at hand, into a file of JSON lines.

Whole training steps of the user's own model run under one strategy after the other. What is
measured of a block is what it takes inside such a step (``marks``): its collectives wait
for the ranks as they do in training, and what lies between blocks is apart, as ``rest``. Times are
medians over repeats and over blocks of equal structure; of ranks the slowest counts, and the one
that holds most. Where weights are sharded, blocks wait for each other's: their sum is what was
measured, and what each causes of it is told with the prior's help (``attribution``).

Given a time, only what decides is measured, what gains most first (``contest``); of the rest
predictions are corrected by what was measured.

Points with levers are measured where it is asked for: a step under a strategy in which every block,
and the head, has the levers that it can have of those. Other points are predicted from shapes.

Memory is watched in a step of its own, with gradients in place as from a step before. Such a step
needs static + the most its blocks hold at any moment (``costs.peak_bytes``), or static + floor if
that is more: where weights are replicated their gradients are summed at the end of backward, when
nothing is saved any more. The time of that is part of ``rest``.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from paradyse.config import check_count, check_levers, parse_options, with_environment
from paradyse.distributed.axis import resolve_axis
from paradyse.distributed.failures import is_out_of_memory
from paradyse.distributed.together import Together
from paradyse.passes.pipeline import OPTIONAL
from paradyse.planning.attribution import caused_s
from paradyse.planning.costs import BlockCost, Machine, peak_bytes
from paradyse.planning.machine import describe_device, measure_machine
from paradyse.planning.measured import CostModel
from paradyse.planning.prior import prior_cost
from paradyse.planning.profile_file import (
    OVER_LIMIT,
    Header,
    Measurement,
    Profile,
    own_lines,
    present_versions,
    read_profile,
)
from paradyse.planning.units import dtype_name
from paradyse.profiling.book import Book
from paradyse.profiling.contest import Contest, Turn
from paradyse.profiling.marks import StepMemory
from paradyse.profiling.steps import REST_PART, MakeBatch, PartKey, Steps, static_bytes
from paradyse.types import HEAD, REPLICATED, BlockSpec, HeadSpec, Point
from paradyse.weights.shard import Model, check_module

T = TypeVar("T")

log = logging.getLogger(__name__)

PREPARING = 3
"""Steps that it takes to watch the memory of one, that which compiles not counted."""

LEAST_S, MOST_REPEATS = 1.0, 5
"""Steps of less than LEAST_S / repeats seconds are timed more often, up to MOST_REPEATS times as
often: the median of a few short ones would be noise."""


@dataclass(frozen=True)
class Progress:
    """How far a profile is."""

    done: int
    total: int
    """Pairs of a length and a strategy, or seconds where these are given."""
    text: str
    """What is measured next."""

    def __str__(self) -> str:
        return f"{self.done}/{self.total}  {self.text or 'measured'}"

    def show(self) -> None:
        """Writes it to standard error, in the place of the one before."""
        sys.stderr.write(f"\r\x1b[K{self}" + "\n" * (self.done == self.total))
        sys.stderr.flush()


def profile(
    model: Model,
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
    overwrite: bool = False,
    levers: str | Sequence[str] = (),
    seconds: int | None = None,
) -> Profile:
    """Measure the blocks and the head of ``model`` under every strategy at every length.

    Call it on every rank, with equal arguments. Rank 0 writes: each measurement is in the file as
    soon as it is made, and those that are there already are not made again. A strategy that passes
    the limit at a length, or is about to by its growth so far, is written down as ``OVER_LIMIT``
    there, and longer lengths are left out for it. Gradients, the mode of each module and the random
    state are as before when it returns.

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
        progress: called on rank 0 before each strategy at each length, and at the end; None: a line
            on standard error, where that is a terminal.
        options: of the backend, other than ``plan``, ``strategies`` and ``memory_limit``.
        make_batch: ``(batch, seq_len)`` to the keyword arguments of one call, equal on all ranks;
            None: random ``input_ids``, with themselves as ``labels``. Of several sequences, such as
            an encoder's and a decoder's, all are to have ``seq_len`` tokens.
        overwrite: begin the file anew, once the model is known to have blocks to measure.
        levers: measured besides, each with every strategy: one, or some; several at once are joined
            by "+".
        seconds: of measuring, once the model is captured: what decides comes first, and no more
            than decides (``contest``). None: every strategy at every length.
    Returns:
        The whole file, what was there before included.
    Raises:
        ValueError: an argument is wrong, the file is no profile or was measured under another
            header, the model has no block to switch or returns no loss. The file stays.

    Example:

        paradyse.profile(model, "h100.jsonl", lengths=[2048, 16384], memory_limit="80GiB")
        model = torch.compile(model, backend="paradyse", options={"cost_model": "h100.jsonl"})
    """
    module = check_module(model)
    _check(module, lengths, batch, repeats, seconds, options)
    levers = (levers,) if isinstance(levers, str) else levers
    sets = [check_levers(text.split("+"), "levers") for text in levers]
    asked = parse_options({"strategies": strategies, "memory_limit": memory_limit})
    limit = asked.memory_limit
    steps = Steps(module, options or {}, batch, training, make_batch)
    together = Together(resolve_axis(), "measuring a profile")
    wanted = () if strategies is None else asked.strategies
    strategies = asked.splitting if steps.axis.size > 1 else (REPLICATED,)
    if left := [s for s in wanted if s not in strategies]:
        told = ", ".join(left), steps.axis.size, ", ".join(strategies)
        log.warning("strategies %s are not measured on %d rank(s), but %s", *told)
    names = [str(Point(s, of)) for of in ((), *sets) for s in strategies]

    def begin() -> tuple[Machine, Book]:
        """Once blocks are known, as these may compute in another dtype: autocast in the model."""
        machine = measure_machine(steps.axis, steps.dtype, steps.device)
        header = Header(
            versions=present_versions(),
            device=describe_device(steps.device),
            num_ranks=steps.axis.size,
            dtype=dtype_name(steps.dtype),
            sharded=steps.sharded,
            inner=parse_options(with_environment(options), OPTIONAL).inner,
            machine=asdict(machine),
            memory_limit=limit,
        )
        return machine, Book(together, Path(path), header, batch, training, overwrite)

    together.first(lambda: own_lines(path))  # no profile? Then nothing is run
    lengths = sorted(set(lengths))
    if progress is None and sys.stderr.isatty():
        progress = Progress.show

    def tell(now: Progress) -> None:
        together.first(lambda: None if progress is None else progress(now))

    schedule = _Schedule(lengths, names, tell)
    with steps.prepared():
        steps.find_blocks(lengths[0])
        machine, book = begin()
        book.begin(steps.blocks)
        most = limit or machine.capacity_bytes or math.inf
        if seconds is not None:
            contest = Contest(steps, lengths, names, partial(_timing_s, repeats))
            schedule = _OfWhatDecides(contest, book, seconds, tell, together)
        for seq_len, in_turn in schedule.turns():
            row = _Row(steps, book, in_turn, most, seq_len, machine, together)
            for name in in_turn:
                with schedule.preparing(seq_len, name):
                    row.prepare(name)
            row.time(repeats)
            row.close()
    tell(schedule.end())
    return together.first(lambda: read_profile(path))


def _check(
    model: torch.nn.Module,
    lengths: Any,
    batch: Any,
    repeats: Any,
    seconds: Any,
    options: Mapping[str, Any] | None,
) -> None:
    if next(model.parameters(), None) is None:
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to measure")
    if not isinstance(lengths, Collection) or isinstance(lengths, str) or len(lengths) == 0:
        raise ValueError(f"lengths {lengths!r}: give a list of at least one, in tokens")
    named = [("a length", n) for n in lengths] + [("batch", batch), ("repeats", repeats)]
    named += [("seconds", seconds)] * (seconds is not None)
    for name, value in named:
        check_count(name, value)
    parse_options(options, OPTIONAL)
    taken = sorted({"plan", "strategies", "memory_limit"} & set(options or ()))
    if taken:
        raise ValueError(
            f"options {taken}: each strategy is measured as the plan; leave them out, and say what "
            "to measure by the arguments strategies= and memory_limit="
        )


class _Schedule:
    """What is measured in which order: every point of ``names`` at every length.

    Args:
        tell: told how far it is.
    """

    def __init__(
        self, lengths: Sequence[int], names: Sequence[str], tell: Callable[[Progress], object]
    ) -> None:
        self._lengths, self._names, self._tell = lengths, names, tell
        self._done, self._total = 0, len(lengths) * len(names)

    def turns(self) -> Iterator[tuple[int, Sequence[str]]]:
        """Lengths, each with the points that take turns at it."""
        for seq_len in self._lengths:
            yield seq_len, self._names

    @contextmanager
    def preparing(self, seq_len: int, name: str) -> Iterator[None]:
        """Inside, a step under the point ``name`` runs for the first time at ``seq_len``."""
        self._tell(Progress(self._done, self._total, f"{seq_len} tokens, {name}"))
        yield
        self._done += 1

    def end(self) -> Progress:
        """All is measured."""
        return Progress(self._total, self._total, "")


class _OfWhatDecides(_Schedule):
    """The same of what decides, while there are ``seconds``; ranks follow the first one."""

    def __init__(
        self,
        contest: Contest,
        book: Book,
        seconds: int,
        tell: Callable[[Progress], object],
        together: Together,
    ) -> None:
        self._together = together
        self._contest, self._book, self._tell = contest, book, tell
        self._end_s, self._total = time.perf_counter() + seconds, seconds

    def turns(self) -> Iterator[tuple[int, Sequence[str]]]:
        while (turn := self._together.first(self._next)) is not None:
            log.info("measured next: %s", turn)
            yield turn.seq_len, turn.names

    def _next(self) -> Turn | None:
        known = self._book.known
        profile = Profile(self._book.header, tuple(known.values()), str(self._book.path), 0)
        return self._contest.next(known, CostModel(profile), self._left_s())

    def _left_s(self) -> float:
        return self._end_s - time.perf_counter()

    @contextmanager
    def preparing(self, seq_len: int, name: str) -> Iterator[None]:
        done = min(self._total - 1, int(self._total - self._left_s()))
        self._tell(Progress(done, self._total, f"{seq_len} tokens, {name}"))
        start_s = time.perf_counter()
        yield
        self._contest.note_first(name, time.perf_counter() - start_s)


def _timing_s(repeats: int, step_s: float) -> float:
    """Seconds that it takes to measure a point whose steps take ``step_s``."""
    timed_s = max(repeats * step_s, min(LEAST_S, MOST_REPEATS * repeats * step_s))
    return PREPARING * step_s + timed_s


SUMMARIES: Mapping[str, Callable[[list[Any]], Any]] = {
    "forward_s": statistics.median,
    "backward_s": statistics.median,
    "saved_bytes": lambda values: max(0, math.ceil(statistics.fmean(values))),
    "workspace_bytes": max,
    "ahead_bytes": max,
    "floor_bytes": max,
}
"""What a field of a measurement is of a rank's samples; the mean of what adds up over blocks."""

ADDED_UP = ("forward_s", "backward_s", "saved_bytes")
"""Fields that add up over the heads of a step; of the others the most of any head counts."""


class _Row:
    """The measurements at one length, of steps under the points ``names`` up to ``limit`` bytes,
    on the ranks ``together``; ``machine`` is that of the header."""

    def __init__(
        self,
        steps: Steps,
        book: Book,
        names: Sequence[str],
        limit: float,
        seq_len: int,
        machine: Machine,
        together: Together,
    ) -> None:
        self._together = together
        self.steps, self.book, self.seq_len = steps, book, seq_len
        self.names, self.limit, self.machine = names, limit, machine
        self.timed: list[str] = []
        """Those of ``names`` that are to be timed."""
        self.samples: dict[PartKey, dict[str, list[Any]]] = {}
        """What this rank saw of the blocks of each part, by field of a measurement."""
        self.over = {
            name for name in names if any(book.was_over(p, seq_len + 1) for p in self._parts(name))
        }

    def _parts(self, name: str) -> list[PartKey]:
        """What a step under the point is made of, beside the rest; each once, the head last."""
        return list(dict.fromkeys(self.steps.part(of, name) for of in self.steps.parts))

    def _missing(self, parts: Iterable[PartKey]) -> list[PartKey]:
        return [p for p in parts if (p, self.seq_len) not in self.book.known]

    def prepare(self, name: str) -> None:
        """Watch the memory of a step under the point, unless all of it is in the book."""
        if self._missing(self._parts(name)):
            self._prepare(name)

    def time(self, least: int) -> None:
        """Time what was prepared ``least`` times or more, and write it down.

        Points take turns, so what disturbs the machine for a while disturbs them alike.
        """
        if not self.timed and self._missing([REST_PART]):  # all that a kill left out
            for name in self.names:
                if not self.timed:
                    self._prepare(name)
        repeats = dict.fromkeys(self.timed, least)
        for name in repeats:
            often = math.ceil(LEAST_S / max(self._of_ranks(self._time(name))))
            repeats[name] = max(least, min(often, MOST_REPEATS * least))
        for i in range(1, max(repeats.values(), default=0)):
            for name in [name for name, n in repeats.items() if i < n]:
                self._time(name)
        missing = self._missing(self.samples)
        mine = [
            {field: SUMMARIES[field](values) for field, values in self.samples[p].items()}
            for p in missing
        ]
        ranks = zip(*self._of_ranks(mine), strict=True)
        fields = [{name: max(r[name] for r in of) for name in of[0]} for of in ranks]
        self.book.add(self.seq_len, dict(zip(missing, fields, strict=True)))

    def close(self) -> None:
        """Write down which blocks were over the limit; the head may have other levers."""
        parts = [p for s in self.names if s in self.over for p in self._parts(s) if p[1] != HEAD]
        lost = [p for p in self._missing(parts) if not self.book.was_over(p, self.seq_len)]
        self.book.add(self.seq_len, {p: {"outcome": OVER_LIMIT} for p in lost})

    def _prepare(self, name: str) -> None:
        if name in self.over:
            return
        over = any(self._of_ranks(self._predicted_peak(name) > self.limit))
        memory = None if over else self._memory(name)
        if memory is None:
            self.over.add(name)
            log.info("%s at %d tokens: %s", name, self.seq_len, OVER_LIMIT)
            return
        self.timed.append(name)
        self._note(name, "saved_bytes", memory.saved_bytes)
        self._note(name, "workspace_bytes", memory.workspace_bytes)
        self._note(name, "ahead_bytes", memory.ahead_bytes)
        heads = (i for i, of in self.steps.part_of.items() if isinstance(of, HeadSpec))
        self._note(name, "floor_bytes", {next(heads, -1): memory.floor_bytes})

    def _of_ranks(self, mine: T) -> list[T]:
        """What every rank gives as ``mine``, in the order of ranks."""
        return self._together.each(lambda: mine)

    def _time(self, name: str) -> float:
        """Seconds of one step, in which it notes what the parts took."""
        times = self.steps.times(self.seq_len, name)
        backward_s = dict.fromkeys(times.forward_s, 0.0) | times.backward_s
        self._note(name, "forward_s", self._caused(name, times.forward_s))
        self._note(name, "backward_s", self._caused(name, backward_s))
        return times.step_s

    def _caused(self, name: str, seconds: Mapping[int, float]) -> Mapping[int, float]:
        """``seconds`` by number of marks, of blocks what each causes (``attribution``)."""
        of = {i: b for i in seconds if isinstance(b := self.steps.part_of.get(i), BlockSpec)}
        if not self.steps.sharded or not of:
            return seconds
        workload = self.steps.workload(self.seq_len)
        costs = [
            prior_cost(b, self.steps.part(b, name)[2], workload.of(b), self.machine, sharded=True)
            for b in of.values()
        ]
        return {**seconds, **dict(zip(of, caused_s([seconds[i] for i in of], costs), strict=True))}

    def _note(self, name: str, field: str, seen: Mapping[int, float]) -> None:
        """Add what was ``seen`` of ``field`` in a step under the point, by number of marks. All
        heads are one part."""
        heads = [i for i in seen if isinstance(self.steps.part_of.get(i), HeadSpec)]
        values = {i: value for i, value in seen.items() if i not in heads}
        if heads:
            together = sum if field in ADDED_UP else max
            values[heads[0]] = together(seen[i] for i in heads)
        for number, value in values.items():
            samples = self.samples.setdefault(
                self.steps.part(self.steps.part_of.get(number), name), {}
            )
            samples.setdefault(field, []).append(value)

    def _memory(self, name: str) -> StepMemory | None:
        """Memory of a step; None where it is over the limit on any rank."""
        memory, over = None, False
        try:
            self.steps.run(self.seq_len, name)
            memory = self.steps.memory(self.seq_len, name)
            static = static_bytes(self.steps.model, self.steps.training)
            over = static + memory.peak_bytes > self.limit
        except (MemoryError, RuntimeError) as e:
            if not is_out_of_memory(e):
                raise
            over = True
        if over:
            self.steps.free()
        return None if any(self._of_ranks(over)) else memory

    def _predicted_peak(self, name: str) -> float:
        """By growth between the two lengths before; in proportion to the length after one."""
        lengths = sorted({n for _, n in self.book.known if n < self.seq_len})
        points = [(n, held) for n in lengths if (held := self._beyond_static(name, n))]
        if not points:
            return 0.0
        (n, held), power = points[-1], 1.0
        if len(points) > 1:
            m, less = points[-2]
            power = min(2.0, max(1.0, math.log(held / less) / math.log(n / m)))
        static = static_bytes(self.steps.model, self.steps.training)
        return static + held * (self.seq_len / n) ** power

    def _beyond_static(self, name: str, seq_len: int) -> int:
        """What a step needs, by what was measured; 0 where something is missing."""
        rest = self.book.get(REST_PART, seq_len)
        steps = self.steps
        found = [self.book.get(self.steps.part(of, name), seq_len) for of in steps.parts]
        rows = [m for m in found if m is not None]
        if rest is None or len(rows) < len(found):
            return 0
        left = [steps.left_bytes(of, seq_len) for of in steps.parts]
        costs = [_held(m, num_bytes) for m, num_bytes in zip(rows, left)]
        return max(peak_bytes(costs, _held(rest)), *(m.floor_bytes for m in (rest, *rows)))


def _held(m: Measurement, left_bytes: int = 0) -> BlockCost:
    """The memory of a measurement."""
    held = m.saved_bytes, m.workspace_bytes
    return BlockCost(0.0, *held, 0, left_bytes, ahead_bytes=m.ahead_bytes)
