"""Which dim tokens lie split along between blocks: the sequence, or another one.

A program has its tokens split along one dim, and a block that mixes it has to send messages. Where
tokens have other dims, such as the batch, which no block mixes, or space beside time, another
program of the same graph splits them along one of these. Which is best depends on the lengths at
hand, so each call has a choice of programs, as far as it may pay, and each of these its plans.
Dynamic Sequence Parallelism (arXiv 2403.10266) chooses a dim for every stage; here a stage that
mixes the dim at rest switches by itself (strategy ``dsp``), and the dim at rest is chosen by call.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from paradyse.config import AUTO, PlanByKind, PlanOption
from paradyse.distributed.axis import TokenLayout
from paradyse.distributed.session import Recent
from paradyse.planning.corrections import Corrections
from paradyse.planning.planner import Planner
from paradyse.planning.prior import prior_cost
from paradyse.planning.time_ratios import Ratios
from paradyse.planning.units import describe_workload
from paradyse.types import BATCH, SPLITS, BlockSpec, HeadSpec, Plan, Workload, other_dim

log = logging.getLogger(__name__)

OWN_TOKENS = "megatron_cz"
"""A strategy under which linears are computed on the rank's own tokens."""

Described = tuple[Sequence[BlockSpec], HeadSpec | None]
"""Blocks and head of a program."""


def most_blocks(num_blocks: int) -> int:
    """Blocks that a program may have which splits another dim than one of ``num_blocks``: what is
    not of the sequence, such as a projection of a text, may be of its batch."""
    return 2 * num_blocks + 8


def dims_of(workload: Workload) -> dict[str, int]:
    """``Plan.split`` -> length of each dim that tokens of ``workload`` have, the batch last."""
    lengths = [workload.seq_len, *(n for _, n in workload.others)]
    dims = {other_dim(i) if i else "": n for i, n in enumerate(lengths)}
    tokens = workload.batch * workload.seq_len
    return dims | {BATCH: max(1, tokens // math.prod(lengths))}


def lies_along(workload: Workload, split: str) -> Workload:
    """``workload``, in which tokens lie split along the sequence, as planners have it that split
    them along ``split`` (``Plan.split``), one of ``dims_of``: its length is that of this dim, and
    the dims of ``Workload.others`` are the sequence, the other ones, and then the batch."""
    tokens, dims = workload.batch * workload.seq_len, dims_of(workload)
    length = dims.pop(split)
    others = tuple((max(1, tokens // n), n) for n in dims.values())
    return replace(workload, batch=max(1, tokens // length), seq_len=length, others=others)


def of_sequences(own: Workload) -> Workload:
    """The workload that ``own`` is of by ``lies_along``, but for the dims beside its sequence."""
    tokens, seq_len = own.batch * own.seq_len, own.others[0][1]
    return replace(own, batch=max(1, tokens // seq_len), seq_len=seq_len, others=())


def split_of(form: PlanOption) -> str:
    """Which dim the plan option ``form`` wants tokens split along: as ``Plan.split``, or "auto"."""
    if isinstance(form, Plan | PlanByKind):
        return form.split
    return AUTO if form == AUTO else ""


class Splits:
    """Plans of one model, whatever dim its tokens lie split along.

    Args:
        planner: of the program that splits the sequence.
        refused: why there is no other; "": there may be.
    """

    def __init__(self, planner: Planner, refused: str = "") -> None:
        self.planner = planner
        self.planners: dict[str, Planner] = {}
        """``Plan.split`` -> the planner of a program that splits another dim."""
        self.refused: dict[str, str] = dict.fromkeys(SPLITS, refused) if refused else {}
        """``Plan.split`` -> why there is no such program."""
        self._last: str | None = None
        """``Plan.split`` of the plan before, where that was left open."""
        self._ran_out: Recent[Workload, None] = Recent()
        self._times = Ratios()
        """Seconds of blocks in this run over those that were predicted."""
        self._said = False
        self.describe: Callable[[str], Described | str] | None = None
        """Gives blocks and head of the program that splits another dim, or why there is none; None:
        none can be made now."""

    def plan(self, workload: Workload) -> Plan:
        """The plan for ``workload``, by the option ``plan``. A batch of one, such as the last of an
        epoch, is split along its sequence where its plan names the batch.

        Raises:
            ValueError: as ``Planner.plan``; tokens cannot be split along the dim that it names.
        """
        return self.plan_for(self.planner.form(workload), workload)

    def plan_for(self, form: PlanOption, workload: Workload) -> Plan:
        """The same for ``workload`` where the plan option is ``form``, which is no function.

        Raises:
            ValueError: as ``plan``.
        """
        wanted = split_of(form)
        fixed = self.planner.num_ranks == 1 or not self.planner.blocks
        if wanted == BATCH and not fixed and self._is_of_one(workload):
            assert isinstance(form, Plan | PlanByKind)
            self._say_that_one_is_left()
            form, wanted = replace(form, split=""), ""
        if wanted in ("", AUTO) or fixed:
            try:
                best = self.planner.plan_for(form, workload)
            except ValueError:
                other = self._another(form, workload) if wanted == AUTO and not fixed else None
                if other is None:
                    raise
                best = other
            if wanted == AUTO:
                for split in self._worth_a_look(best, workload):
                    best = self._faster(best, split, form, workload)
                self._last = best.split
            return best
        found = self._plan_along(wanted, form, workload)
        if isinstance(found, str):
            raise ValueError(
                f"{self.planner.where}: tokens cannot lie split along {wanted!r} for "
                f"{describe_workload(workload)}: {found}; leave 'split' out to split the sequence"
            )
        return found

    def of(self, plan: Plan, workload: Workload) -> tuple[Planner, Workload]:
        """The planner that ``plan`` is of, and ``workload`` as that has it."""
        return self.planner_of(plan), lies_along(workload, plan.split) if plan.split else workload

    def planner_of(self, plan: Plan) -> Planner:
        """The planner that ``plan`` is of."""
        return self.planners[plan.split] if plan.split else self.planner

    def predict(self, plan: Plan, workload: Workload) -> tuple[float, int]:
        """``Planner.predict`` of ``plan`` for ``workload``, by the planner that it is of. What
        neither a profile nor this run has measured is taken to be as far off as what the profile
        has, and the rest of a step is there whatever is split."""
        planner, own = self.of(plan, workload)
        time_s, peak = planner.predict(plan, own)
        if plan.split and not self._knows(planner):
            rest_s = planner.beside(own).rest.time_s
            time_s = rest_s + (time_s - rest_s) * off_by(self.planner, workload)
        return time_s, peak

    def _knows(self, planner: Planner) -> bool:
        """Whether this run has shown what blocks of ``planner`` take."""
        return not self._times.of_kind.keys().isdisjoint(planner.kinds)

    def settle(self, form: PlanOption, workload: Workload, plan: Plan) -> None:
        """Have ``plan``, another rank's choice by the plan option ``form``, for ``workload``; its
        program is there after.

        Raises:
            ValueError: there is no such program on this rank.
        """
        if not plan.split:
            self.planner.settle(form, workload, plan)
        elif isinstance(why := self.planner_along(plan.split), str):
            raise ValueError(f"the first rank splits tokens along {plan.split!r}, not here: {why}")

    def ran_out(self, workload: Workload) -> None:
        """``Planner.ran_out`` at ``workload``, of all planners."""
        self._ran_out[workload] = None
        self.planner.ran_out(workload)
        for split, planner in self.planners.items():
            planner.ran_out(lies_along(workload, split))

    def hold(self, static_bytes: int, idle_bytes: int) -> None:
        """``Planner.hold`` of ``static_bytes`` and ``idle_bytes``, of all planners."""
        for planner in (self.planner, *self.planners.values()):
            planner.hold(static_bytes, idle_bytes)

    def correct(self, corrections: Corrections) -> None:
        """``Planner.correct`` by ``corrections``, of all planners."""
        self._times = corrections.times
        for planner in (self.planner, *self.planners.values()):
            planner.correct(corrections)

    def planner_along(self, split: str) -> Planner | str:
        """The planner of the program that splits ``split``, which is made now if it is not there;
        or why there is none."""
        if split in self.refused:
            return self.refused[split]
        if split not in self.planners:
            described = self.describe(split) if self.describe else "no step of it has run yet"
            if isinstance(described, str):
                if self.describe is not None:
                    self.refused[split] = described
                    log.info("tokens are not split along %s: %s", split, described)
                return described
            if len(described[0]) > most_blocks(len(self.planner.blocks)):
                self.refused[split] = "it has many more blocks then"
                return self.refused[split]
            self.planners[split] = self.planner.for_blocks(*described, of_sequences)
        return self.planners[split]

    def best_along(self, split: str, workload: Workload) -> Plan | str:
        """The plan for ``workload`` with tokens split along ``split`` and all else left open, or
        why there is none."""
        return self._plan_or_why(split, AUTO, workload)

    def _is_of_one(self, workload: Workload) -> bool:
        """Whether ``workload`` is a batch of one. Where its ``others`` are sequences of their own,
        and no dims of the same tokens, the program says so, and what is split along none."""
        if dims_of(workload)[BATCH] > 1:
            return False
        if workload.others:
            self.planner_along(BATCH)
        return not workload.others or BATCH not in self.refused

    def _say_that_one_is_left(self) -> None:
        if not self._said:
            self._said = True
            log.warning(
                "%s splits tokens along the batch: of a batch of one they are split along the "
                "sequence",
                self.planner.where,
            )

    def _plan_or_why(self, split: str, form: PlanOption, workload: Workload) -> Plan | str:
        try:
            return self._plan_along(split, form, workload)
        except ValueError as e:
            return str(e)

    def _plan_along(self, split: str, form: PlanOption, workload: Workload) -> Plan | str:
        """The plan by the option ``form`` with tokens split along ``split``, or why not."""
        dims = dims_of(workload)
        if split not in dims:
            others = ", ".join(map(repr, list(dims)[1:]))
            return f"beside their sequence they have the dims {others}"
        planner = self.planner_along(split)
        if isinstance(planner, str):
            return planner
        return replace(planner.plan_for(form, lies_along(workload, split)), split=split)

    def _another(self, form: PlanOption, workload: Workload) -> Plan | None:
        """A plan for ``workload`` with tokens split along another dim than their sequence; None:
        there is none, or none that fits."""
        found = (self._plan_or_why(of, form, workload) for of in self._splits_of(workload))
        return next((plan for plan in found if isinstance(plan, Plan)), None)

    def _splits_of(self, workload: Workload) -> list[str]:
        """Dims beside the sequence that tokens of ``workload`` may lie split along."""
        allowed = self.planner.options.splits if self.planner.chooses else ()
        return [
            split
            for split in SPLITS[: 1 + len(workload.others)]
            if split in allowed
            and split not in self.refused
            and lies_along(workload, split).seq_len > 1
        ]

    def _worth_a_look(self, plan: Plan, workload: Workload) -> list[str]:
        """Dims that ``workload`` may be faster split along than it is by ``plan``. The batch: if it
        were not even if ranks sent nothing, it is not; another dim, whose split asks for as many
        messages: where fewer rows are padding."""
        if plan.split or not self.planner.blocks:
            return []
        slack, now, found = self.planner.options.smoothing, _padding(workload), []
        for split in self._splits_of(workload):
            saved = self._share_without_messages(plan, workload) if split == BATCH else 1.0
            if _padding(lies_along(workload, split)) / now * saved * (1 + slack) < 1:
                found.append(split)
        return found

    def _share_without_messages(self, plan: Plan, workload: Workload) -> float:
        """The share of the time of the blocks of ``plan`` that would be left if all were computed
        on the rank's own tokens, and ranks sent nothing."""
        machine = self.planner.machine(workload.dtype)
        quiet = replace(machine, latency_s=0.0, bandwidth_bytes=math.inf, links={})
        with_s = without_s = 0.0
        alike = Counter(zip(self.planner.kinds, plan.strategies))
        first = dict(zip(self.planner.kinds, self.planner.blocks))
        for (kind, point), num in alike.items():
            own, sharded = workload.of(first[kind]), self.planner.sharded
            with_s += num * prior_cost(first[kind], point, own, machine, sharded).time_s
            without_s += num * prior_cost(first[kind], OWN_TOKENS, own, quiet, sharded).time_s
        return without_s / with_s

    def _faster(self, best: Plan, split: str, form: PlanOption, workload: Workload) -> Plan:
        """``best``, or the plan with tokens split along ``split`` where that is faster and fits;
        which of them splits as the plan before may be slower by smoothing."""
        other = self._plan_or_why(split, form, workload)
        if isinstance(other, str):
            log.debug("%s split along %s: %s", describe_workload(workload), split, other)
            return best
        planner, own = self.of(other, workload)
        (time_s, held), (other_s, peak) = (self.predict(p, workload) for p in (best, other))
        limit = planner.memory_limit(own.dtype)
        if workload in self._ran_out or held > limit:
            return other if peak < held else best
        times = {best.split: time_s, split: other_s}
        if self._last in times:
            times[self._last] /= 1 + self.planner.options.smoothing
        return other if peak <= limit and times[split] < times[best.split] else best


def off_by(planner: Planner, workload: Workload) -> float:
    """How many times longer the blocks of ``planner``, computed on the rank's own tokens, take at
    ``workload`` by its profile than by the prior, which is all that there is of blocks of another
    program; 1 without a profile."""
    if planner.cost_model is None:
        return 1.0
    machine, costs = planner.machine(workload.dtype), planner.predicted_costs(workload)
    pairs = list(zip(planner.blocks, planner.static(OWN_TOKENS, workload).strategies))
    measured_s = sum(costs[i][s].time_s for i, (_, s) in enumerate(pairs))
    priors = (prior_cost(b, s, workload.of(b), machine, planner.sharded) for b, s in pairs)
    return measured_s / sum(cost.time_s for cost in priors)


def _padding(workload: Workload) -> float:
    """By how many times a rank has more tokens than there are, shared out evenly."""
    layout = TokenLayout(workload.num_ranks, workload.seq_len)
    return layout.local_len * workload.num_ranks / workload.seq_len
