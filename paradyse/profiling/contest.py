"""What of a profile decides, and so is measured first, while there is time.

A choice between strategies is settled where one is surely the fastest: no measurement of the others
is of use there. What a measurement is worth is the time that is lost, in expectation, by choosing
without it (expected improvement: Jones, Schonlau and Welch 1998, "Efficient Global Optimization of
Expensive Black-Box Functions", eq. 15): of a strategy that may be the fastest, and of the one that
is taken for it. It is most where two are about as fast, near the lengths at which they cross, and
for those of which least is known (``time_ratios``). Each measurement tells of others: of the same
strategy at other lengths, and of those that are made of the same parts.

Lengths count alike, each by the share of its step's time that is at stake. What gains most in a
second of measuring comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import NormalDist, median
from typing import NamedTuple

import numpy as np

from paradyse.planning.corrections import along
from paradyse.planning.measured import CostModel
from paradyse.planning.profile_file import MEASURED, OVER_LIMIT, REST, Measurement
from paradyse.profiling.steps import REST_PART, PartKey, Steps
from paradyse.types import HEAD, BlockSpec

SETTLED = 0.003
"""Share of the blocks' time that may be lost, in expectation, by not knowing a time."""

REACH = 4
"""No length that is more than so many times the longest that was measured, unless it is the next:
what a step needs is known only from shapes there."""

Known = Mapping[tuple[PartKey, int], Measurement]
"""What was measured, of a part at a length."""


class Turn(NamedTuple):
    """What is to be measured next: strategies that take turns at one length."""

    seq_len: int
    names: tuple[str, ...]
    worth: float
    """Share of the blocks' time at that length that is expected to be lost without."""


def lost_s(times: Mapping[str, float], deviation: np.ndarray) -> tuple[str, dict[str, float]]:
    """Seconds that are lost, in expectation, by taking what seems fastest and not another.

    Args:
        times: expected seconds of each variant.
        deviation: [number of variants, the same]: standard deviations of the logarithm of one's
            time over another's.
    Returns:
        The variant that seems fastest, and the seconds of every other.
    """
    names, unit = list(times), NormalDist()
    best = min(names, key=times.__getitem__)
    lost: dict[str, float] = {}
    for name, sigma in zip(names, deviation[names.index(best)].tolist(), strict=True):
        if name == best:
            continue
        mean = math.log(times[name] / times[best])
        if sigma <= 0.0:  # the best is no slower
            lost[name] = 0.0
            continue
        z = -mean / sigma
        share = unit.cdf(z) - math.exp(mean + sigma**2 / 2) * unit.cdf(z - sigma)
        lost[name] = times[best] * max(0.0, share)
    return best, lost


class Contest:
    """Tells what is to be measured next.

    Args:
        steps: of the model, whose blocks are known.
        lengths: that may be measured.
        names: of the points that may be.
        timing_s: seconds that are needed to time a point whose steps take so many.
    """

    def __init__(
        self,
        steps: Steps,
        lengths: Collection[int],
        names: Sequence[str],
        timing_s: Callable[[float], float],
    ) -> None:
        self._steps, self._lengths, self._names = steps, sorted(lengths), names
        self._timing_s = timing_s
        self._firsts: dict[str, float] = {}
        """Of the points that have run."""
        alike: dict[tuple[str, str], list[BlockSpec]] = {}
        for b in steps.blocks:
            alike.setdefault((b.kind, b.structure), []).append(b)
        self._blocks = [(first, 1 + len(others)) for first, *others in alike.values()]
        """One of each that cost the same, and how many there are."""

    def note_first(self, name: str, seconds: float) -> None:
        """The first step under the point ``name``, which compiles, took so many ``seconds``."""
        self._firsts.setdefault(name, seconds)

    def next(self, known: Known, model: CostModel, left_s: float) -> Turn | None:
        """What is to be measured next, by a ``model`` of what is ``known``; None: all is settled,
        or nothing that is not can be measured in ``left_s`` seconds."""
        view, shortest = _View(known, model, self._steps), self._lengths[0]
        if not self._measured(view) and self._open(shortest, view):
            return Turn(shortest, (self._best(shortest, view),), 1.0)  # and what compiling takes

        def seconds(turn: Turn) -> float:
            return sum(self._seconds(name, turn.seq_len, view) for name in turn.names)

        found = [self._turn(n, view, left_s) for n in self._lengths]
        turns = [t for t in found if t is not None]
        for turn in sorted(turns, key=lambda t: -t.worth / seconds(t)):
            if turn.seq_len > (reach := self._reach(view)):
                turn = Turn(reach, (self._best(reach, view),), turn.worth)
            if seconds(turn) <= left_s:
                return turn
        if turns:
            return None
        for n in self._for_a_curve():
            n = min(n, self._reach(view))
            if self._open(n, view) and not view.has(REST_PART, n):
                turn = Turn(n, (self._best(n, view),), 0.0)
                if seconds(turn) <= left_s:
                    return turn
        return None

    def _for_a_curve(self) -> list[int]:
        """Lengths that what is in no block is known by, as many as a curve needs."""
        last = len(self._lengths) - 1
        return [self._lengths[i] for i in dict.fromkeys((0, last, last // 2))]

    def _measured(self, view: _View) -> list[int]:
        return [n for n in self._lengths if view.has(REST_PART, n)]

    def _reach(self, view: _View) -> int:
        """The longest length that may be measured."""
        longest = max(self._measured(view), default=self._lengths[0])
        further = [n for n in self._lengths if n > longest]
        return max([longest, *further[:1], *(n for n in further if n <= REACH * longest)])

    def _open(self, n: int, view: _View) -> list[str]:
        """Points that were not over the limit at length ``n`` or below."""
        return [s for s in self._names if not view.was_over(s, n)]

    def _best(self, n: int, view: _View) -> str:
        """The point that seems fastest for all blocks at length ``n``."""
        return min(self._open(n, view), key=lambda name: self._step_s(name, n, view))

    def _step_s(self, name: str, n: int, view: _View) -> float:
        """Expected seconds of a step under the point."""
        return view.apart_s(n) + sum(
            count * view.times(b, [name], n)[0][view.variant(b, name)] for b, count in self._blocks
        )

    def _seconds(self, name: str, n: int, view: _View) -> float:
        """Of measuring the point at length ``n``."""
        timing_s = self._timing_s(self._step_s(name, n, view))
        if name in self._firsts:
            return timing_s
        return timing_s + median(self._firsts.values() or [0.0])

    def _turn(self, n: int, view: _View, left_s: float) -> Turn | None:
        """The points that are worth measuring at length ``n``, as many as there is time for."""
        names = self._open(n, view)
        total_s, gains = 0.0, dict[PartKey, float]()
        for block, count in self._blocks if names else ():
            times, deviation = view.times(block, names, n)
            best, lost = lost_s(times, deviation)
            total_s += count * times[best]
            for variant, seconds in lost.items():
                for v in (variant, best):
                    part = block.structure, block.kind, v
                    if not view.has(part, n):
                        gains[part] = max(gains.get(part, 0.0), count * seconds)
        turn, worth = list[str](), 0.0
        while names:
            gain = {s: sum(gains.get(p, 0.0) for p in view.parts(s)) for s in names}
            name = max(names, key=gain.__getitem__)
            if gain[name] <= SETTLED * total_s:
                break
            names.remove(name)
            if (seconds := self._seconds(name, n, view)) <= left_s:
                left_s -= seconds
                worth += gain[name] / total_s
                turn.append(name)
                for part in view.parts(name):
                    gains.pop(part, None)
        return Turn(n, tuple(turn), worth) if turn else None


class _View:
    """What is ``known``, and expected by a ``model`` of it."""

    def __init__(self, known: Known, model: CostModel, steps: Steps) -> None:
        self._known, self._model, self._steps = known, model, steps

    def has(self, part: PartKey, n: int) -> bool:
        return (part, n) in self._known

    def parts(self, name: str) -> list[PartKey]:
        """Of the blocks in a step under the point."""
        return list(dict.fromkeys(self._steps.part(b, name) for b in self._steps.blocks))

    def variant(self, block: BlockSpec, name: str) -> str:
        return self._steps.part(block, name)[2]

    def was_over(self, name: str, n: int) -> bool:
        """Whether a step under the point was over the limit at length ``n`` or below."""
        over = {p for (p, at), m in self._known.items() if m.outcome == OVER_LIMIT and at <= n}
        return any(p in over for p in self.parts(name))

    def times(
        self, block: BlockSpec, names: Sequence[str], n: int
    ) -> tuple[dict[str, float], np.ndarray]:
        """As ``CostModel.estimate``, of the variants that the points mean for ``block``."""
        variants = list(dict.fromkeys(self.variant(block, name) for name in names))
        return self._model.estimate(block, variants, self._steps.workload(n).of(block))

    def apart_s(self, n: int) -> float:
        """Seconds of the head and of what is in no block, as far as they were measured."""
        found: dict[str, dict[int, float]] = {}
        for ((_, kind, _), at), m in self._known.items():
            if kind in (HEAD, REST) and m.outcome == MEASURED:
                found.setdefault(kind, {})[at] = m.forward_s + m.backward_s
        return sum(along(row, n) for row in found.values())
