"""The guard at the entry of a program: which plan runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paradyse.distributed.session import Recent
from paradyse.types import Plan, Workload

_numbers = itertools.count()
"""Of the calls of all guards, in their order."""


class Guard:
    """Maps a workload to its plan: a dictionary look-up for one seen before.

    Args:
        plan: chooses a plan.
        fixed: it gives equal workloads equal plans, until ``forget``; else it is asked every time.
        like: a workload with the dtype, ranks and mask that all workloads share.
    """

    def __init__(self, plan: Callable[[Workload], Plan], fixed: bool, like: Workload):
        self._plan, self._fixed, self._like = plan, fixed, like
        self._known: Recent[tuple[Any, ...], Plan] = Recent()
        self.num_switches = 0
        self.used: Recent[int, tuple[int, Plan]] = Recent()
        """Length -> the plan of its latest call, whatever the batch, behind the call's number among
        those of all guards."""
        self._last: Plan | None = None
        self.planned: Callable[[Workload, Plan], None] | None = None
        """Told of every plan that was asked for."""
        self.instead: Callable[[Plan, Workload], Plan] | None = None
        """What runs in place of the plan for a workload, asked every time."""

    def workload(
        self,
        batch: int,
        seq_len: int,
        training: bool,
        keeps_gradients: bool = False,
        others: tuple[tuple[int, int], ...] = (),
    ) -> Workload:
        """``batch`` sequences of ``seq_len`` tokens, beside ``others``; ``training``: with
        gradients, which are as ``keeps_gradients`` says."""
        return replace(
            self._like,
            batch=batch,
            seq_len=seq_len,
            training=training,
            keeps_gradients=keeps_gradients,
            others=others,
        )

    @property
    def plan_of(self) -> dict[int, str]:
        """Length -> key of the plan of its latest call."""
        return {n: plan.key for n, (_, plan) in self.used.items()}

    def forget(self) -> None:
        """Ask for every plan anew."""
        self._known.clear()

    def __call__(
        self,
        batch: int,
        seq_len: int,
        training: bool,
        keeps_gradients: bool = False,
        others: tuple[tuple[int, int], ...] = (),
    ) -> Plan:
        """The plan of the ``workload`` of these, asked for anew only if it may change."""
        key = (batch, seq_len, training, keeps_gradients, others)
        plan = self._known.get(key) if self._fixed else None
        if plan is None:
            like = self.workload(batch, seq_len, training, keeps_gradients, others)
            plan = self._plan(like)
            if self._fixed:
                self._known[key] = plan
            if self.planned is not None:
                self.planned(like, plan)
        if self.instead is not None:
            like = self.workload(batch, seq_len, training, keeps_gradients, others)
            plan = self.instead(plan, like)
        if plan is not self._last:
            if self._last is not None and plan != self._last:
                self.num_switches += 1
            self._last = plan
        self.used[seq_len] = next(_numbers), plan
        return plan
