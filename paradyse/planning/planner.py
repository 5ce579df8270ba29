"""From a workload to a plan: a point, which is a strategy and its levers, for every block and for
the head.

``Planner.plan`` is a pure function of the workload and of state that all ranks share (options,
blocks, agreed machine rates, the workloads before), so ranks agree without a word; a ``workload``
seen before is one look-up.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import TypeVar

import torch

from paradyse.config import AUTO, Options, PlanOption, parse_plan
from paradyse.distributed.lanes import num_groups
from paradyse.distributed.session import Recent
from paradyse.planning.breakdown import Part, break_down
from paradyse.planning.corrections import FLOOR, STATIC, Corrections
from paradyse.planning.costs import NOTHING, Beside, BlockCost, CostTable, Machine, longest_length
from paradyse.planning.forms import asked_plan, check_feasible, check_head, leaves_open
from paradyse.planning.measured import CostModel
from paradyse.planning.nothing_fits import smallest_within_host, why_nothing_fits
from paradyse.planning.prior import head_cost, made_again, prior_cost
from paradyse.planning.solver import Choices, Points
from paradyse.planning.steady import is_mixed, of_one_strategy, steady, with_levers_of_one_strategy
from paradyse.planning.time_ratios import MIXED, Key
from paradyse.planning.units import describe_workload, format_bytes
from paradyse.strategies import variant_of
from paradyse.types import (
    HEAD,
    NO_BACKWARD,
    ON_HOST,
    REPLICATED,
    BlockSpec,
    HeadSpec,
    Plan,
    Point,
    Workload,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
Variant = Callable[[str], str]
_Table = Mapping[str, BlockCost]

Costs = tuple[_Table, ...]
"""Per block the cost of every point that can compute it; each is computed when it is asked for."""

MOST_PLANS, MOST_PREDICTED = 4096, 128
"""Workloads whose plans are kept, few megabytes, and whose costs as predicted, not corrected."""


@dataclass(eq=False)
class Planner:
    """Chooses plans for the blocks of one captured graph."""

    options: Options
    """Of these ``plan``, ``strategies``, ``levers``, both limits of memory and ``smoothing``."""
    blocks: Sequence[BlockSpec]
    """In the order of computation."""
    num_ranks: int
    """Size p of the sequence axis. With one rank every block is ``replicated``."""
    machine: Callable[[torch.dtype], Machine]
    """Gives the rates of a rank for a dtype, equal on all ranks; called when a choice is to be made
    or explained, on every rank, so it may issue collectives."""
    static_bytes: int = 0
    """Weights, gradients and optimizer state of a rank: what every plan needs. More, where the run
    was seen to hold more."""
    sharded: bool = False
    """Weights at rest are 1/p on each rank."""
    cost_model: CostModel | None = None
    """Predicts from measurements; None: the analytic prior."""
    head: HeadSpec | None = None
    """None: the graph has none that could be computed otherwise."""
    kept_bytes: int = 0
    """What workloads that keep gradients need besides ``static_bytes``."""
    measured_beside: Callable[[Workload], Beside] | None = None
    """Gives what a step needs beside blocks and head; None: ``cost_model`` does."""
    idle_bytes: int = 0
    """Of ``static_bytes``, what is there only once a model is trained, and no optimizer stepped."""
    as_given: Callable[[Workload], Workload] = field(default=lambda own: own)
    """A workload of ``blocks`` -> the model's own, whose sequence is the tokens' dim."""

    def __post_init__(self) -> None:
        by_function = callable(self.options.plan)
        self.where = f"{'the function given as ' if by_function else ''}option 'plan'"
        self.kinds = tuple(self._kind(b) for b in self.blocks)
        """Blocks of one kind cost the same and have the same choices."""
        first = dict(zip(reversed(self.kinds), reversed(self.blocks)))
        self._of_kind = [(kind, first[kind]) for kind in dict.fromkeys(self.kinds)]
        """Each kind once, with the first block of it."""
        number = {kind: i for i, (kind, _) in enumerate(self._of_kind)}
        self._number = tuple(number[kind] for kind in self.kinds)
        """Per block the place of its kind in ``_of_kind``."""
        self._free = cache(self._find_free)
        self.mixes = lru_cache(MOST_PLANS)(lambda plan: is_mixed(self.blocks, plan.strategies))
        """Whether a plan is of several strategies."""
        self._corrections = Corrections()
        self._predicted = lru_cache(MOST_PREDICTED)(self._predict)
        self._predicted_head = lru_cache(MOST_PREDICTED)(self._predict_head)
        self._planned = lru_cache(MOST_PLANS)(self._decide)
        self._previous: Plan | None = None
        self._settled: Recent[tuple[PlanOption, Workload], Plan] = Recent()
        self._ran_out: Recent[Workload, None] = Recent()

    def plan(self, workload: Workload) -> Plan:
        """The plan for ``workload``: one point per block, and one for the head.

        A function given as the ``plan`` option is called every time; it must give equal answers on
        all ranks. Everything else is decided once per workload.

        Raises:
            ValueError: the plan does not fit the model (number of names, a point that cannot
                compute its block), the workload is empty, or nothing fits ``memory_limit``.
        """
        return self.plan_for(self.form(workload), workload)

    def plan_for(self, form: PlanOption, workload: Workload) -> Plan:
        """The same where the plan option is ``form``, which is no function."""
        self._previous = self._settled.get((form, workload)) or self._planned(form, workload)
        return self._previous

    def settle(self, form: PlanOption, workload: Workload, plan: Plan) -> None:
        """Have ``plan``, another rank's choice by the plan option ``form``, for ``workload``."""
        self._previous = self._settled[form, workload] = plan

    def ran_out(self, workload: Workload) -> None:
        """Memory did not do for ``workload``, whatever was predicted: its plan is to be the one
        that needs least. On every rank alike."""
        self._ran_out[workload] = None
        self._settled.clear()
        self._planned.cache_clear()

    @property
    def chooses(self) -> bool:
        """Whether the plan option leaves anything to choose; False of a function, which may do so
        for some workloads. A plan that does not fit the model is told of when it is asked for, not
        here."""
        return leaves_open(self.options.plan)

    def keys(self, plan: Plan) -> tuple[Key, ...]:
        """What corrections know each block by under ``plan``, and the head, which comes last."""
        head = [(HEAD, plan.head)] * (self.head is not None)
        return (*zip(self.kinds, self.variants(plan)), *head)

    def time_keys(self, plan: Plan) -> tuple[Key, ...]:
        """``keys`` of ``plan`` for what blocks take: those of several strategies have others."""
        mixed = MIXED * self.mixes(plan)
        return tuple((k, v if k == HEAD else v + mixed) for k, v in self.keys(plan))

    def variants(self, plan: Plan) -> tuple[str, ...]:
        """The variant of each block that ``plan`` means: the Z names of an MLP are one."""
        return tuple(variant_of(b, s) for b, s in zip(self.blocks, plan.strategies))

    def correct(self, corrections: Corrections) -> None:
        """Apply ``corrections`` to predictions from now on; plans are decided anew. On every rank
        alike."""
        self._corrections = corrections
        self.hold(self.static_bytes, self.idle_bytes)

    def hold(self, static_bytes: int, idle_bytes: int) -> None:
        """Count with ``static_bytes`` of weights, gradients and optimizer state, or more where the
        run was seen to hold more, ``idle_bytes`` of which are there only once the model is trained;
        plans are decided anew. On every rank alike."""
        seen = self._corrections.constant(STATIC)
        self.static_bytes = max(static_bytes, seen)
        self.idle_bytes = 0 if seen else idle_bytes
        self._settled.clear()
        self._planned.cache_clear()

    def _static(self, workload: Workload) -> int:
        held = self.static_bytes - self.idle_bytes * (not workload.training)
        return held + self.kept_bytes * workload.keeps_gradients

    def costs(self, workload: Workload, mixed: bool = False) -> Costs:
        """Expected cost of every point of every block, and last of the head: predicted, and
        corrected. With ``mixed`` that of blocks among others of other strategies."""

        def corrected(at: Hashable, variant: Variant, table: _Table, end: str = "") -> CostTable:
            def cost(point: str) -> BlockCost:
                return self._corrections.apply(table[point], (at, variant(point) + end), workload)

            return CostTable(cost)

        tables, end = zip(self._of_kind, self._predicted(workload)), MIXED * mixed
        found = [corrected(at, partial(variant_of, b), of, end) for (at, b), of in tables]
        head = (corrected(HEAD, str, table) for table in self._predicted_head(workload))
        return (*self._per_block(found), *head)

    def predicted_costs(self, workload: Workload) -> Costs:
        """The same by the cost model alone."""
        blocks = self._per_block(self._predicted(workload))
        return (*blocks, *self._predicted_head(workload))

    def _per_block(self, of_kinds: Sequence[T]) -> tuple[T, ...]:
        return tuple(of_kinds[i] for i in self._number)

    def _predict(self, workload: Workload) -> list[_Table]:
        machine, model = self.machine(workload.dtype), self.cost_model

        def predicted(block: BlockSpec) -> _Table:
            return CostTable(
                lambda point: (
                    model.cost(block, point, workload.of(block))
                    if model
                    else prior_cost(block, point, workload.of(block), machine, self.sharded)
                )
            )

        return [predicted(block) for _, block in self._of_kind]

    def _predict_head(self, workload: Workload) -> Sequence[_Table]:
        """Of the head under each of its points; nothing where there is no head."""
        if self.head is None:
            return ()
        head, model, machine = self.head, self.cost_model, self.machine(workload.dtype)
        table = CostTable(
            lambda point: (
                model.head(head, point, workload)
                if model
                else head_cost(head, point, workload, machine, self.sharded)
            )
        )
        return (table,)

    def beside(self, workload: Workload) -> Beside:
        """What a step of ``workload`` needs beside blocks and head, where any of it was
        measured."""
        if self.measured_beside is not None:
            return self.measured_beside(workload)
        rest, floor, margin, model = NOTHING, 0, 0.0, self.cost_model
        if model is not None:
            rest, margin = model.rest(workload, self.blocks, self.head), model.margin
            floor = model.floor(workload)
        rest = self._corrections.apply_to_rest(rest, workload)
        floor = max(floor, self._corrections.constant(FLOOR))
        return Beside(rest, floor if workload.training else 0, margin)

    def predict(self, plan: Plan, workload: Workload) -> tuple[float, int]:
        """Predicted (seconds, peak bytes) of a step under ``plan``, its rest where measured."""
        choices, points = self._choices(plan, workload), self.points(plan)
        return self._step_s(choices, workload, points), choices.peak(points)

    def _step_s(self, choices: Choices, workload: Workload, points: Points) -> float:
        """Seconds of a step under ``points``, of ``choices`` for ``workload``."""
        if self.mixes(self.plan_of(points)):
            choices = replace(choices, costs=self.costs(workload, mixed=True))
        return choices.time_s(points)

    def for_blocks(
        self,
        blocks: Sequence[BlockSpec],
        head: HeadSpec | None,
        as_here: Callable[[Workload], Workload],
    ) -> Planner:
        """The planner of the same model, all else being equal, as a program of other ``blocks`` and
        another ``head``, which no profile has measured.

        Args:
            as_here: a workload of that program -> the same as this planner has it.
        """
        made = replace(self, blocks=blocks, head=head, cost_model=None, as_given=as_here)
        made = replace(made, measured_beside=lambda own: self.beside(as_here(own)))
        made.correct(self._corrections)
        return made

    def held(self, plan: Plan, workload: Workload) -> tuple[Part, ...]:
        """What a rank holds under ``plan`` when it holds most: parts of the predicted peak."""
        kinds = [*(b.kind for b in self.blocks), *[HEAD] * (self.head is not None)]
        return break_down(self._choices(plan, workload), self.points(plan), kinds)

    def memory_limit(self, dtype: torch.dtype) -> float:
        """Bytes a plan may need on a rank: the option, else the capacity, else infinite.

        Args:
            dtype: of the workload, as the machine's rates are measured with it.
        """
        if self.options.memory_limit is not None:
            return self.options.memory_limit
        capacity = self.machine(dtype).capacity_bytes
        return float("inf") if capacity is None else capacity

    def host_limit(self, dtype: torch.dtype) -> float:
        """Bytes that blocks may keep on the host for a rank: the option, else what the host has,
        else infinite.

        Args:
            dtype: as of ``memory_limit``.
        """
        if self.options.host_memory is not None:
            return self.options.host_memory
        capacity = self.machine(dtype).host_capacity_bytes
        return float("inf") if capacity is None else max(0, capacity)

    def asked_by_name(self, workload: Workload, block: int) -> bool:
        """Whether the plan option names the point of the block at index ``block``, or of the head,
        which comes last."""
        return self.points(self.asked(self.form(workload), workload))[block] != AUTO

    def candidates(self, block: BlockSpec, training: bool) -> tuple[str, ...]:
        """What "auto" may choose for ``block``: feasible, allowed, one name per variant.

        Args:
            training: without backward only some levers have an effect.
        """
        by_variant: dict[str, str] = {}
        for s in (REPLICATED,) if self.num_ranks == 1 else self.options.splitting:
            if s not in block.infeasible:
                by_variant.setdefault(variant_of(block, s), s)
        points = map(Point.parse, block.points(tuple(by_variant.values())))
        allowed = [p for p in points if self._allows(p.levers, training)]
        if block.recompute and training:
            allowed = [p.on_demand() for p in allowed]
        return tuple(dict.fromkeys(map(str, allowed)))

    def _find_free(self, training: bool) -> list[tuple[str, ...]]:
        """The candidates of each kind of block."""
        return [self.candidates(block, training) for _, block in self._of_kind]

    def _allows(self, levers: Sequence[str], training: bool) -> bool:
        return all(v in self.options.levers and (training or v in NO_BACKWARD) for v in levers)

    def _head_candidates(self, training: bool) -> tuple[str, ...]:
        points = self._head_points()
        return tuple(p for p in points if self._allows(p.split("+") if p else (), training))

    def _kind(self, b: BlockSpec) -> Hashable:
        limits = tuple(sorted(b.infeasible)), tuple(sorted(b.refused_levers)), b.recompute
        return b.priced_by, limits, "" if self.cost_model is None else b.structure

    def form(self, workload: Workload) -> PlanOption:
        """The plan option; where it is a function, what it returns for ``workload``."""
        form = self.options.plan
        if not callable(form):
            return form
        form = form(workload)
        return form if isinstance(form, str | Plan) else parse_plan(form, self.where)

    def _decide(self, form: PlanOption, workload: Workload) -> Plan:
        if workload.batch < 1 or workload.seq_len < 1:
            raise ValueError(
                f"empty input: batch {workload.batch}, sequence length {workload.seq_len}; "
                "both must be at least 1"
            )
        asked = self.asked(form, workload)
        return self._choose(asked, workload) if AUTO in self.points(asked) else asked

    def asked(self, form: PlanOption, workload: Workload) -> Plan:
        """What ``form`` asks for ``workload``: a point or "auto" for every block and the head.

        Raises:
            ValueError: it does not fit the model.
        """
        asked = asked_plan(form, self.blocks, self.where)
        names = tuple(
            name if name == AUTO else self._meant(block, name, workload.training)
            for block, name in zip(self.blocks, asked.strategies)
        )
        free = self._free(workload.training)
        for i, name in dict.fromkeys(zip(self._number, names)):
            check_feasible(self._of_kind[i][1], name, free[i], self.options.splitting, self.where)
        if asked.alone:  # a plan that was chosen says so of its head; ``Alone`` says it again
            return Plan(names)
        check_head(asked.head, self.head, self.where)
        return Plan(names, asked.head if self.head else "")

    def static(self, strategy: str, workload: Workload) -> Plan:
        """The plan of ``strategy`` for all blocks of ``workload``."""
        return Plan(tuple(self._meant(b, strategy, workload.training) for b in self.blocks))

    def _meant(self, block: BlockSpec, name: str, training: bool) -> str:
        """The point that computes ``block`` where ``name`` is asked for."""
        point = Point.parse(name)
        if self.num_ranks == 1:
            point = replace(point, strategy=REPLICATED)
        return str(point.on_demand() if block.recompute and training else point)

    def _head_points(self) -> tuple[str, ...]:
        return self.head.points() if self.head else ("",)

    def _choose(self, asked: Plan, workload: Workload) -> Plan:
        """The fastest plan that fits, with what ``asked`` names where that is not "auto"."""
        offered = self._offered(asked, workload)
        is_limited = self.options.memory_limit is not None
        if self.num_ranks == 1 and not is_limited and all(len(of) == 1 for of in offered):
            return self.plan_of([only for (only,) in offered])
        choices = self._choices(asked, workload)
        limit = self.memory_limit(workload.dtype)
        points = choices.fastest(limit)
        if points is None:
            points = self._over_the_limit(choices, asked, limit, workload)
        if workload in self._ran_out:
            smallest = smallest_within_host(choices)
            best = self.plan_of(smallest if choices.fits(smallest, limit) else points)
        else:
            best = self._steady(points, choices, limit, workload)
        log.info("plan for %s: %s", describe_workload(self.as_given(workload)), best.key)
        return best

    def least_bytes(self, workload: Workload, asked: Plan | None = None) -> int:
        """Bytes of a rank that the smallest plan needs.

        Args:
            asked: a point or "auto" for every block and for the head; None: the planner's to
                choose for all.
        """
        return self._choices(asked or self._all_auto(), workload).smallest()[0]

    def longest(self, workload: Workload, most: int, asked: Plan | None = None) -> int:
        """The longest sequences, in tokens up to ``most``, for which a plan fits the memory limit:
        as ``workload`` but for their length. 0: none does.

        Args:
            asked: as of ``least_bytes``.
        """
        limit = self.memory_limit(workload.dtype)

        def need(seq_len: int) -> float:
            choices = self._choices(asked or self._all_auto(), replace(workload, seq_len=seq_len))
            return limit if choices.feasible(limit) else math.inf

        return longest_length(need, limit, most)

    def _all_auto(self) -> Plan:
        return Plan((AUTO,) * len(self.blocks), AUTO)

    def points(self, plan: Plan) -> tuple[str, ...]:
        """The points of ``plan``, the head's last where there is one."""
        return (*plan.strategies, plan.head) if self.head else plan.strategies

    def plan_of(self, points: Sequence[str]) -> Plan:
        """The plan of these ``points``."""
        n = len(self.blocks)
        return Plan(tuple(points[:n]), points[n] if self.head else "")

    def _offered(self, asked: Plan, workload: Workload) -> list[tuple[str, ...]]:
        """For every block, and last for the head, what ``asked`` allows."""
        free = self._free(workload.training)
        levers = self.options.levers
        if set(ON_HOST) & set(levers) and self.machine(workload.dtype).host_bandwidth is None:
            free = [tuple(p for p in points if not Point.parse(p).uses_host) for points in free]
        offered = [
            points if name == AUTO else (name,)
            for points, name in zip(self._per_block(free), asked.strategies)
        ]
        if self.head is not None:
            head = self._head_candidates(workload.training) if asked.head == AUTO else (asked.head,)
            offered.append(head)
        return offered

    def _choices(self, asked: Plan, workload: Workload) -> Choices:
        """For every block and the head what ``asked`` allows, with the costs of all."""
        machine, beside = self.machine(workload.dtype), self.beside(workload)
        return Choices(
            self._offered(asked, workload),
            self.costs(workload),
            beside.rest,
            self._static(workload),
            beside.floor_bytes,
            beside.margin,
            num_groups(workload.training, self.sharded) * machine.communicator_bytes,
            self.host_limit(workload.dtype),
            [*made_again(self.blocks, workload), *[0] * (self.head is not None)],
        )

    def _over_the_limit(
        self, choices: Choices, asked: Plan, limit: float, workload: Workload
    ) -> Points:
        given = self.as_given(workload)
        longest = self.longest(workload, workload.seq_len, asked) if given == workload else None
        text = why_nothing_fits(choices, limit, given, longest, self.options)
        # The capacity is the machine's word, not the user's, and the prediction is no measurement.
        log.warning("%s; the device has %s. Trying it all the same.", text, format_bytes(limit))
        return smallest_within_host(choices)

    def _steady(self, fastest: Points, choices: Choices, limit: float, workload: Workload) -> Plan:
        """The plan of ``fastest``, or one nearly as fast (``steady``): the previous one where it is
        legal and has a lever only where that has; they are for what does not fit without."""
        old, n = self.points(self._previous) if self._previous else None, len(self.blocks)
        if old and (
            not all(s in points for s, points in zip(old, choices.names))
            or any(("+" in a) > ("+" in b) for a, b in zip(old, fastest))
            or old[n:] != fastest[n:]
        ):
            old = None
        alike = of_one_strategy(fastest, choices.names, self.blocks, self.options.splitting)
        share, step_s = self.options.smoothing, partial(self._step_s, choices, workload)
        if not alike and step_s(fastest) > choices.time_s(fastest):  # a mix, slower than predicted
            args = choices, self.blocks, self.options.splitting, limit
            fastest = min((fastest, *with_levers_of_one_strategy(*args)), key=step_s)
        return self.plan_of(steady(fastest, old, alike, choices, limit, share, step_s))
