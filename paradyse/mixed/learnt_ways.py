"""Ways of groups, held to what their groups took: the plans of later batches go by both.

A file of ways says what groups were expected to take, on paper or by a measurement before training.
While the model trains every group's time is known. What counts is the median of its logarithm over
the predicted one: steps that compile, or are disturbed, are far off and few.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median

from paradyse.mixed.step_reports import MixedReport
from paradyse.mixed.ways import Way

FEWEST, LATEST = 8, 32
"""Groups of a way that are seen before it is corrected, and of which the median counts."""

CHANGED = 0.05
"""Corrections that change by less are no reason to plan by others."""


class LearntWays:
    """What groups can do, by what they took so far. Equal on all ranks, as reports are.

    Args:
        ways: as they were given.
    Raises:
        ValueError: two of one degree have the same name, by which they are told apart.
    """

    def __init__(self, ways: Sequence[Way]) -> None:
        self.given = tuple(ways)
        for (degree, name), times in Counter((w.degree, w.name) for w in ways).items():
            if times > 1:
                raise ValueError(
                    f"{times} ways of {degree} ranks with the name {name!r}: give each its own"
                )
        self.ways = self.given
        """The same, corrected: times of a way are multiplied by ``factors``."""
        self.factors: dict[tuple[int, str], float] = {}
        """(degree, name) of a way -> seconds taken over those that were given."""
        self._off: dict[tuple[int, str], deque[float]] = {}

    def add(self, report: MixedReport) -> bool:
        """Learn from the ``report`` of a step that is over; whether the ways are others now."""
        given = {(w.degree, w.name): w for w in self.given}
        for group in report.groups:
            way = given.get((group.degree, group.way))
            if way is None or not group.taken_s:
                continue
            if expected_s := way.group_s(group.lengths):
                off = self._off.setdefault((group.degree, group.way), deque(maxlen=LATEST))
                off.append(math.log(group.taken_s / expected_s))
        seen = {key: math.exp(median(of)) for key, of in self._off.items() if len(of) >= FEWEST}
        if not any(abs(f / self.factors.get(key, 1.0) - 1) > CHANGED for key, f in seen.items()):
            return False
        self.factors = seen
        others = math.exp(fmean(map(math.log, seen.values())))
        self.ways = tuple(_times(w, seen.get((w.degree, w.name), others)) for w in self.given)
        return True


def _times(way: Way, factor: float) -> Way:
    return replace(
        way,
        fixed_s=way.fixed_s * factor,
        least_s=way.least_s * factor,
        times_s=tuple(t * factor for t in way.times_s),
    )
