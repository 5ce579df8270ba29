"""What whole steps took under plans that a run has tried side by side.

A prediction adds up what blocks take. What a step takes besides, and what blocks of several
strategies do to each other, shows in its whole time alone, and where only one plan runs at a scale
of lengths nothing tells its own error from that of all. So where others are predicted to be nearly
as fast they are run there, in turns (``profiling/trials.py``), and predictions of these plans at
that scale are multiplied from then on by what they were off.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping

from paradyse.planning.corrections import scale_of
from paradyse.planning.splits import Splits
from paradyse.types import Plan, Workload

FASTER = 0.03
"""A plan that was tried is taken where it is faster than the chosen one by more than this share:
noise of a few steps is no reason to leave a plan."""


class Tried:
    """Plans that were tried, by scale of lengths; equal on all ranks.

    Args:
        splits: predicts what they take.
    """

    def __init__(self, splits: Splits) -> None:
        self._splits = splits
        self._off: dict[int, dict[Plan, float]] = {}
        """Scale -> plan -> seconds of a step over those that were predicted."""

    def add(self, scale: int, off: Mapping[Plan, float]) -> None:
        """Plans took ``off`` times what was predicted at ``scale``, measured in turns. They compare
        with those from before by what both have; where there is nothing these are forgotten."""
        known = self._off.get(scale, {})
        links = [known[plan] / off[plan] for plan in off if plan in known]
        link = statistics.median(links) if links else 1.0
        kept = known if links else {}
        self._off[scale] = kept | {plan: link * ratio for plan, ratio in off.items()}

    def at(self, workload: Workload) -> Collection[Plan]:
        """The plans that were tried at the scale of ``workload``."""
        return self._off.get(scale_of(workload), {}).keys()

    def expected_s(self, workload: Workload) -> dict[Plan, float]:
        """Seconds of a step at ``workload`` that are expected of the plans tried at its scale which
        fit; of no worth but beside each other."""
        tried = self._off.get(scale_of(workload), {}) if workload.training else {}
        limit, seconds = self._splits.planner.memory_limit(workload.dtype), dict[Plan, float]()
        for plan, off in tried.items():
            time_s, peak = self._splits.predict(plan, workload)
            if peak <= limit:
                seconds[plan] = off * time_s
        return seconds

    def best(self, chosen: Plan, workload: Workload) -> Plan:
        """The fastest for ``workload`` of ``chosen`` and those tried beside it that fit."""
        seconds = self.expected_s(workload) if chosen in self.at(workload) else {}
        if chosen not in seconds:
            return chosen
        best = min(seconds, key=seconds.__getitem__)
        return best if seconds[best] * (1 + FASTER) < seconds[chosen] else chosen
