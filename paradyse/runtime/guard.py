"""The guard at the entry of a program: which plan runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from paradyse.distributed.session import Recent
from paradyse.types import Plan, Workload

_numbers = itertools.count()
"""Of the calls of all guards, in their order."""


class Guard:
    """Maps a workload to its plan: a dictionary look-up for one seen before.

    Args:
        plan: chooses a plan.
        fixed: it gives equal workloads equal plans, until ``forget``; else it is asked every time.
    """

    def __init__(self, plan: Callable[[Workload], Plan], fixed: bool):
        self._plan, self._fixed = plan, fixed
        self._known: Recent[Workload, Plan] = Recent()
        self.num_switches = 0
        self.used: Recent[int, tuple[int, Plan]] = Recent()
        """Length -> the plan of its latest call, whatever the batch, behind the call's number among
        those of all guards."""
        self._last: Plan | None = None
        self.planned: Callable[[Workload, Plan], None] | None = None
        """Told of every plan that was asked for."""
        self.instead: Callable[[Plan, Workload], Plan] | None = None
        """What runs in place of the plan for a workload, asked every time."""

    @property
    def plan_of(self) -> dict[int, str]:
        """Length -> key of the plan of its latest call."""
        return {n: plan.key for n, (_, plan) in self.used.items()}

    def forget(self) -> None:
        """Ask for every plan anew."""
        self._known.clear()

    def __call__(self, workload: Workload) -> Plan:
        """The plan of a call, asked for anew only if it may change."""
        plan = self._known.get(workload) if self._fixed else None
        if plan is None:
            plan = self._plan(workload)
            if self._fixed:
                self._known[workload] = plan
            if self.planned is not None:
                self.planned(workload, plan)
        if self.instead is not None:
            plan = self.instead(plan, workload)
        if plan is not self._last:
            if self._last is not None and plan != self._last:
                self.num_switches += 1
            self._last = plan
        self.used[workload.seq_len] = next(_numbers), plan
        return plan
