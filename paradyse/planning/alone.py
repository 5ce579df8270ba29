"""Every rank computes the whole: for sequences so short that messages cost more than they save.

Splitting a short sequence divides microseconds of arithmetic and adds messages to every block.
Under such a plan all ranks compute the same, and the gradients of weights are brought together
once, if at all (``weights/same_gradients.py``), so that all go on from the same bits. It is a plan
for all blocks and the head or for none, as nothing lies split between them; weights have to be
whole on every rank.
"""

from __future__ import annotations

from dataclasses import replace

from paradyse.config import AUTO
from paradyse.distributed.session import Recent
from paradyse.planning.forms import SHARES
from paradyse.planning.splits import Splits
from paradyse.planning.tried import Tried
from paradyse.planning.units import describe_workload
from paradyse.types import REPLICATED, Plan, Point, Workload

WHY_SHARDED = "weights are sharded over the ranks, and none has all of them"
OTHER_BLOCKS = "the graph has other blocks on one rank than on several"
WHY_REPLICAS = "ranks are arranged in replicas, of which each averages gradients with the others"


class Alone:
    """Weighs computing the whole on every rank against the plans of several.

    Args:
        splits: has the plans of several ranks.
        refused: why its program cannot be computed so; "": it can.
    """

    def __init__(self, splits: Splits, refused: str = "") -> None:
        self.splits, self.planner, self.refused = splits, splits.planner, refused
        self._ran_out: Recent[Workload, None] = Recent()
        self.tried = Tried(splits)

    def plan(self, workload: Workload) -> Plan:
        """The plan of all blocks under which every rank computes all of ``workload``."""
        plain = Point(REPLICATED)
        again = plain.on_demand() if workload.training else plain
        blocks = self.planner.blocks
        return Plan(tuple(str(again if b.recompute else plain) for b in blocks), REPLICATED)

    @property
    def offered(self) -> bool:
        """Whether ``settle`` may choose it: the plan is left open, and nothing is in the way."""
        options = self.planner.options
        is_open = options.plan == AUTO and REPLICATED in options.strategies
        return is_open and not self.refused and bool(self.planner.blocks)

    def settle(self, plan: Plan, workload: Workload) -> Plan:
        """The planner's ``plan`` for ``workload``, or the one of ``plan`` where it is asked for, or
        predicted to be faster by more than the planner's smoothing and to fit; or what was faster
        than that where they were tried side by side.

        Raises:
            ValueError: some blocks of ``plan``, not all, are to be computed whole on every rank, or
                they cannot.
        """
        asked = [Point.parse(s).strategy == REPLICATED for s in plan.strategies]
        if self.planner.num_ranks == 1 or not asked:
            return plan
        if any(asked):
            problem = "" if all(asked) else SHARES
            if problem := problem or self.refused:
                raise ValueError(
                    f"option 'plan': {REPLICATED!r} is no plan for {describe_workload(workload)}: "
                    f"{problem}; give other strategies, or 'auto'"
                )
            return replace(plan, head=REPLICATED)
        chosen = self.plan(workload) if self._is_faster(plan, workload) else plan
        return chosen if workload in self._ran_out else self.tried.best(chosen, workload)

    def ran_out(self, workload: Workload) -> None:
        """Memory did not do for ``workload``."""
        self._ran_out[workload] = None

    def _is_faster(self, plan: Plan, workload: Workload) -> bool:
        if not self.offered or workload in self._ran_out:
            return False
        planner, alone = self.planner, self.plan(workload)
        if any("+" in s for s in plan.strategies) and not any("+" in s for s in alone.strategies):
            return False  # memory is short as it is
        (time_s, _), (alone_s, peak) = (self.splits.predict(p, workload) for p in (plan, alone))
        fits = peak <= planner.memory_limit(workload.dtype)
        return fits and alone_s * (1 + planner.options.smoothing) < time_s
