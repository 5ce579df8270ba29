"""Groups of different degree on a machine on paper: what each way costs there.

Sharded weights are 1/N over the whole axis of N ranks at rest, whatever group a rank is in: a
block's are gathered over all of them, so that nothing moves when groups change. So a group may take
those strategies that compute with whole weights. Where every rank has whole weights it may take
all, and gradients are summed over the group for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from paradyse.config import Options
from paradyse.mixed.estimate import ways_of
from paradyse.mixed.step_plan import plan_step, static_steps
from paradyse.mixed.ways import StepPlan, Way
from paradyse.offline.devices import Cluster, machine_of
from paradyse.offline.dry_run import DryRun
from paradyse.offline.outlook import LONGEST, RESIDENT, PaperCosts
from paradyse.planning.costs import BlockCost, Machine
from paradyse.planning.planner import Planner
from paradyse.planning.prior import gradient_sum_s, head_sum_s, left_bytes, seconds
from paradyse.strategies.work import Work
from paradyse.types import GROUP_LEVERS, LEVERS, WHOLE_WEIGHTS, BlockSpec, HeadSpec, Workload


class GroupCosts(PaperCosts):
    """Costs of a group, whose weights are gathered over the whole axis, and their gradients
    scattered over it.

    Args:
        run: of as many ranks as the group has.
        machine: of as many.
        axis: rates of messages over the whole axis.
        num_ranks: of the axis.
    """

    def __init__(self, run: DryRun, machine: Machine, axis: Machine, num_ranks: int):
        super().__init__(run, machine, sharded=False)
        self.axis, self.num_ranks = axis, num_ranks

    def cost(self, block: BlockSpec, point: str, workload: Workload) -> BlockCost:
        """Of ``block`` under ``point`` for ``workload``."""
        alone = super().cost(block, point, workload)
        own_s = gradient_sum_s(block, point, workload, self.machine)
        weights = block.num_weight_elements * workload.dtype.itemsize
        seen = 1 - self.axis.overlap  # of messages while neighbouring blocks compute
        return replace(
            alone,
            time_s=alone.time_s - own_s + seen * self._fetch_s(block, workload),
            workspace_bytes=alone.workspace_bytes + RESIDENT[True] * weights,
            left_bytes=left_bytes(block, workload, sharded=True),
            ahead_bytes=weights,
        )

    def head(self, head: HeadSpec, levers: str, workload: Workload) -> BlockCost:
        """Of ``head`` with ``levers`` for ``workload``, without its weights' messages: ``rest`` has
        those of all tables."""
        alone = super().head(head, levers, workload)
        weights = head.hidden * head.vocabulary * workload.dtype.itemsize
        return replace(
            alone,
            time_s=max(0.0, alone.time_s - head_sum_s(head, levers, workload, self.machine)),
            workspace_bytes=alone.workspace_bytes + RESIDENT[True] * weights,
            left_bytes=left_bytes(head, workload, sharded=True),
            ahead_bytes=weights,
        )

    def rest(
        self,
        workload: Workload,
        blocks: Sequence[BlockSpec] = (),
        head: HeadSpec | None = None,
    ) -> BlockCost:
        """Of what is no block of ``workload`` and not the head; and the messages of the weights
        that are in no block, whatever the ``blocks`` and the ``head``."""
        rest = super().rest(workload, blocks, head)
        return replace(rest, time_s=rest.time_s + self._fetch_s(self._tables_block, workload))

    def messages_s(self, workload: Workload) -> float:
        """Seconds in which all weights come from all ranks, and their gradients go back, in a step
        of ``workload``, whatever there is to compute."""
        blocks = (*self.run.blocks, self._tables_block)
        return sum(self._fetch_s(block, workload) for block in blocks)

    @property
    def _tables_block(self) -> BlockSpec:
        """The weights that are in no block."""
        others = self.run.num_parameters - sum(b.num_weight_elements for b in self.run.blocks)
        return BlockSpec("tables", "mlp", 0, "", num_weight_elements=max(0, others))

    def _fetch_s(self, block: BlockSpec, workload: Workload) -> float:
        """Seconds in which the weights of ``block`` come from all ranks, and go back."""
        work = Work(block, replace(workload, num_ranks=self.num_ranks))
        work.fetch_weights("whole", sharded=True)
        return seconds(work, self.axis)


def degrees_of(num_ranks: int) -> list[int]:
    """Degrees of groups that are looked at on ``num_ranks`` ranks: powers of two, and all ranks."""
    powers = [1 << k for k in range(num_ranks.bit_length()) if 1 << k <= num_ranks]
    return powers if powers[-1] == num_ranks else [*powers, num_ranks]


def ways_on_paper(
    run_of: Callable[[int], DryRun],
    cluster: Cluster,
    num_ranks: int,
    dtype: torch.dtype,
    memory_limit: int | None = None,
    levers: Sequence[str] = LEVERS,
    sharded: bool = True,
) -> list[Way]:
    """What groups can do on ``num_ranks`` of ``cluster``.

    Args:
        run_of: the dry run of a model on so many ranks.
        dtype: that blocks compute in: of weights, too, but under autocast.
        memory_limit: bytes a rank may use; None: what it has.
        levers: that plans may use.
        sharded: weights at rest are 1/N on each rank; as the dry runs were made.
    Raises:
        ValueError: nothing fits.
    """
    static = run_of(num_ranks).static_bytes
    axis = machine_of(cluster, num_ranks, dtype)
    room = axis.capacity_bytes if memory_limit is None else memory_limit
    allowed = tuple(v for v in levers if v in GROUP_LEVERS)
    ways: list[Way] = []
    for degree in degrees_of(num_ranks):
        run, machine = run_of(degree), machine_of(cluster, degree, dtype)
        # ranks of a group share their nodes with ranks of others, and all are in two communicators
        machine = replace(
            machine,
            capacity_bytes=room,
            communicator_bytes=axis.communicator_bytes + machine.communicator_bytes,
            host_capacity_bytes=axis.host_capacity_bytes,
        )
        wide = run.weight_dtype
        workload, least_s = Workload(1, 1, dtype, True, degree, weight_dtype=wide), 0.0
        costs: PaperCosts = PaperCosts(run, machine, sharded=False)
        options = Options(smoothing=0.0, levers=allowed)
        if sharded:
            costs = of_group = GroupCosts(run, machine, axis, num_ranks)
            least_s = of_group.messages_s(workload)
            options = replace(options, strategies=WHOLE_WEIGHTS)
        planner = Planner(
            options,
            run.blocks,
            degree,
            partial(_same, machine),
            static_bytes=static,
            sharded=sharded,
            cost_model=cast(Any, costs),
            head=run.head,
        )
        ways += ways_of(planner, workload, LONGEST, least_s)
    if not ways:
        raise ValueError(
            f"not one token fits: weights, gradients and optimizer states alone take {static} "
            f"bytes of a rank's {room}; use more ranks or a smaller model"
        )
    return ways


def _same(machine: Machine, dtype: torch.dtype) -> Machine:
    """``machine``, whose rates are of ``dtype`` already."""
    return machine


@dataclass(frozen=True)
class Comparison:
    """Steps of some batches by one static degree, by the best static degree of each batch, and in
    groups of different degrees."""

    static_of_each: dict[int, tuple[float, ...]]
    """Degree -> seconds of each step; degrees that have no room for some sequence are left out."""
    best_static_s: float
    """Seconds with, for each batch, its best degree."""
    groups_s: float
    """Seconds with groups."""
    plans: tuple[StepPlan, ...]
    """With groups, one for each batch."""

    @property
    def static_s(self) -> dict[int, float]:
        """Degree -> seconds of all steps."""
        return {degree: sum(of) for degree, of in self.static_of_each.items()}

    @property
    def best_s(self) -> float:
        """Seconds with the best degree for all batches."""
        return min(self.static_s.values())


def compare(
    batches: Sequence[Sequence[int]], ways: Sequence[Way], num_ranks: int, limit_s: float = 5.0
) -> Comparison:
    """Plans of ``batches``, each the lengths of its sequences in tokens.

    Args:
        ways: of groups.
        num_ranks: of the axis.
        limit_s: seconds for the solver, for each batch.
    Raises:
        ValueError: a sequence fits no group.
    """
    statics = [static_steps(lengths, ways, num_ranks) for lengths in batches]
    plans = tuple(plan_step(lengths, ways, num_ranks, limit_s) for lengths in batches)
    everywhere = set.intersection(*(set(steps) for steps in statics))
    return Comparison(
        {d: tuple(steps[d].time_s for steps in statics) for d in sorted(everywhere)},
        sum(min(s.time_s for s in steps.values()) for steps in statics),
        sum(plan.time_s for plan in plans),
        plans,
    )
