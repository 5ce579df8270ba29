"""Steps under a memory limit: what the planner says of them, what they hold, and real caps."""

from __future__ import annotations

import math
import resource
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from paradyse.config import PlanOption
from paradyse.profiling.steps import Steps
from paradyse.runtime.registry import captures_of

CLOSE = 1 / 256
"""Step of the search by measurement, as a share of the predicted length."""

MOST = 1 << 24
"""Tokens up to which the planner looks for the longest length."""


class Bounded(Steps):
    """Steps of one model, maybe under a memory limit, and the planner that plans them."""

    def __init__(self, model: Any, options: Mapping[str, Any], shortest: int):
        super().__init__(model, options, 1, True, None)
        self.find_blocks(shortest)
        mine = [c for c in captures_of(model) if c.options.plan is self._present]
        self.planner = [g.choice.planner for c in mine for g in c.graphs.values() if g.blocks][-1]

    def held(self, plan: PlanOption, seq_len: int) -> float:
        """Bytes measured, of the rank that holds most; infinitely many where no plan is given."""
        if not seq_len:
            return 0
        try:
            self.run(seq_len, plan)
        except ValueError:  # refused on every rank alike
            return math.inf
        peak = self.memory(seq_len, plan).peak_bytes
        return largest(self.planner.static_bytes + peak)

    def longest(self, strategy: str, limit: float, said: int) -> int:
        """The longest length whose step is measured to fit, ``said`` to be predicted; or 0."""
        start = max(1, said)
        lengths = range(0, 2 * start + 1, math.ceil(CLOSE * start))
        return lengths[bisect_right(lengths, limit, key=lambda n: self.held(strategy, n)) - 1]

    def refusal(self, seq_len: int, plan: PlanOption) -> str:
        """What is said of ``seq_len`` tokens before the step; "" where they are trained."""
        try:
            self.run(seq_len, plan)
        except ValueError as e:
            return str(e)
        return ""


def largest(value: int) -> int:
    """Of all ranks."""
    told = torch.tensor(value)
    if dist.is_initialized():
        dist.all_reduce(told, dist.ReduceOp.MAX)
    return int(told)


@contextmanager
def capped(num_bytes: int) -> Iterator[None]:
    """Inside, this process maps at most ``num_bytes`` more of memory than it does now (Linux)."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
