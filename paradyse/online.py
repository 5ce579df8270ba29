"""Plans that follow the run: what blocks really take is fed back to the planner.

One training call in ``SAMPLE_EVERY`` is watched: clocks at the edges of every block, read only when
they are long past. Every ``REFRESH_EVERY`` calls the ranks agree, in one small message, on a factor
for each kind of block and variant, measured over predicted seconds on the slowest rank; plans are
chosen anew where a factor has changed. A variant that has not run yet is trusted as far as the best
one of its block: so the planner tries it once what it runs has become slow, and then knows.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch

from paradyse import comm
from paradyse.cost import canonical_strategy
from paradyse.frame import Frame
from paradyse.planner import Planner
from paradyse.profiler_marks import END, Clock, Watch, WatchedFrame, find_spans
from paradyse.program import Program, StepConstants
from paradyse.types import Workload

log = logging.getLogger(__name__)

ONLINE = comm.register_block("online costs")
"""Block id of the messages by which ranks agree."""

SAMPLE_EVERY = 4
"""Training calls of which one is watched."""

REFRESH_EVERY = 16
"""Training calls between two agreements."""

WARM_UP = 2
"""Calls of a plan before it is watched: the first ones compile."""

CHANGE = 0.2
"""Plans are chosen anew where a factor has changed by more than this share since they were."""

Key = tuple[Hashable, str]
"""What a factor is of: a kind of block (``Planner.kinds``), and a variant of it."""


class Feedback:
    """Watches one program, and corrects the costs of its planner.

    Args:
        forget: called where plans are to be chosen anew, on all ranks at the same call.
    """

    def __init__(self, program: Program, planner: Planner, forget: Callable[[], None]) -> None:
        self.program, self.planner, self.forget = program, planner, forget
        variants = [
            dict.fromkeys(canonical_strategy(b.kind, s) for s in b.feasible())
            for b in planner.blocks
        ]
        pairs = zip(planner.kinds, variants, strict=True)
        self.keys: list[Key] = list(dict.fromkeys((k, v) for k, names in pairs for v in names))
        self.factors: dict[Key, float] = {}
        """Of those that ran, as agreed."""
        self._best: dict[Hashable, float] = {}
        """Kind of block -> the lowest factor it ever had."""
        self._used: dict[Key, float] = {}
        """The factors of the present plans."""
        self._calls = 0
        self._runs: Counter[tuple[str, ...]] = Counter()
        self._open: Watch | None = None
        """The last one watched, until the next call."""
        self._watched: list[tuple[Watch, Clock, Workload, tuple[str, ...]]] = []

    def run(self, args: Sequence[Any], constants: StepConstants, workload: Workload) -> Any:
        """The program's call, watched if it is its turn."""
        self._calls += 1
        if self._open is not None:
            self._open.mark(END)
            self._open = None
        if self._calls % REFRESH_EVERY == 0:
            self._refresh()
        self._runs[constants.strategies] += 1
        if self._calls % SAMPLE_EVERY or self._runs[constants.strategies] <= WARM_UP:
            return self.program(args, constants)
        clock = Clock(self.program.device)
        watch = Watch(clock)
        self._open = watch
        self._watched.append((watch, clock, workload, constants.strategies))
        self.program.make_frame = partial(WatchedFrame, watch)
        try:
            return self.program(args, constants)
        finally:
            self.program.make_frame = Frame

    def _refresh(self) -> None:
        """Agree on factors; every rank is here at the same call."""
        measured = self._measured()
        mine = torch.tensor([measured.get(k, 0.0) for k in self.keys], dtype=torch.float64)
        self._watched.clear()
        axis = self.program.axis
        everyone = comm.all_gather(mine.to(self.program.device), axis, ONLINE).cpu()
        for key, latest in zip(self.keys, everyone.amax(0).tolist(), strict=True):
            if latest > 0:
                before = self.factors.get(key, latest)
                self.factors[key] = math.sqrt(before * latest)
                best = self._best.get(key[0], math.inf)
                self._best[key[0]] = min(best, self.factors[key])
        now = {k: self.factors.get(k, self._best.get(k[0], 1.0)) for k in self.keys}
        changes = (abs(math.log(now[k] / self._used.get(k, 1.0))) for k in self.keys)
        if max(changes, default=0.0) > math.log1p(CHANGE):
            self._used = now
            self.planner.correct(now, frozenset(self.factors))
            self.forget()
            log.info("plans are chosen anew after call %d: measured costs changed", self._calls)

    def _measured(self) -> dict[Key, float]:
        """Measured over predicted seconds of what was watched since the last agreement: medians."""
        ratios: dict[Key, list[float]] = {}
        at = {step.block_id: i for i, step in enumerate(self.program.block_steps)}
        for watch, clock, workload, strategies in self._watched:
            seconds, parts = clock.read(), dict[int, list[float]]()
            for span in find_spans(watch.marks):
                if watch.marks[span.last][0] != END:  # else its end was not seen
                    took = seconds[span.exit] - seconds[span.first]
                    parts.setdefault(at[span.block], []).append(took)
            costs = self.planner.predicted_costs(workload)
            whole = {i: sum(took) for i, took in parts.items() if len(took) == 2}
            for i, took_s in whole.items():
                block, strategy = self.planner.blocks[i], strategies[i]
                key = self.planner.kinds[i], canonical_strategy(block.kind, strategy)
                ratios.setdefault(key, []).append(took_s / costs[i][strategy].time_s)
        return {k: statistics.median(v) for k, v in ratios.items()}
