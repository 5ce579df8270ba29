"""From a workload to a plan: a strategy for every block.

``Planner.plan`` is a pure function of the workload and of state that all ranks share (options,
blocks, agreed machine rates, the workloads before), so ranks agree without a word; a ``workload``
seen before is one look-up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from paradyse.config import AUTO, Options, PlanByKind, PlanOption, parse_plan
from paradyse.distributed.session import Recent
from paradyse.planning.corrections import FLOOR, STATIC, Corrections
from paradyse.planning.costs import NOTHING, BlockCost, Machine
from paradyse.planning.measured import CostModel
from paradyse.planning.prior import prior_cost
from paradyse.planning.solver import Choices
from paradyse.strategies import canonical_strategy
from paradyse.types import REPLICATED, BlockSpec, Plan, Workload

log = logging.getLogger(__name__)

Costs = tuple[dict[str, BlockCost], ...]
"""Per block, the cost of every strategy that can compute it."""


MOST_PLANS = 4096
"""Workloads whose plans are kept: more lengths than a batch of text has, and few megabytes."""


def format_bytes(n: float) -> str:
    """Bytes ``n`` for people: ``1.5 GiB``."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(n) >= 1024 and len(units) > 1:
        n /= 1024
        units.pop(0)
    return f"{n:.0f} B" if units[0] == "B" else f"{n:.1f} {units[0]}"


def describe_workload(w: Workload) -> str:
    """The workload ``w`` for people."""
    mode = "training" if w.training else "inference"
    dtype = str(w.dtype).removeprefix("torch.")
    return f"batch {w.batch} x {w.seq_len} tokens, {dtype}, {mode}, {w.num_ranks} ranks"


def longest_length(need: Callable[[int], float], limit: float, most: int) -> int:
    """The longest length, in tokens, that needs at most ``limit`` bytes, to a thousandth; 0: none.

    Args:
        need: of a length, growing with it.
        most: the search ends here.
    """
    if need(1) > limit:
        return 0
    low, high = 1, 2
    while high < most and need(high) <= limit:
        low, high = high, high * 2
    while high - low > max(1, low >> 10):
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle) <= limit else (low, middle)
    return low


@dataclass(eq=False)
class Planner:
    """Chooses plans for the blocks of one captured graph."""

    options: Options
    """Of these ``plan``, ``strategies``, ``memory_limit`` and ``smoothing``."""
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

    def __post_init__(self) -> None:
        by_function = callable(self.options.plan)
        self._where = f"{'the function given as ' if by_function else ''}option 'plan'"
        self.kinds = tuple(self._kind(b) for b in self.blocks)
        """Blocks of one kind cost the same and have the same choices."""
        self._corrections = Corrections()
        self._planned = lru_cache(MOST_PLANS)(self._decide)
        self._previous: Plan | None = None
        self._settled: Recent[tuple[PlanOption, Workload], Plan] = Recent()
        self._ran_out: Recent[Workload, None] = Recent()

    def plan(self, workload: Workload) -> Plan:
        """The plan for ``workload``: one strategy per block.

        A function given as the ``plan`` option is called every time; it must give equal answers on
        all ranks. Everything else is decided once per workload.

        Raises:
            ValueError: the plan does not fit the model (number of names, a strategy that cannot
                compute its block), the workload is empty, or nothing fits ``memory_limit``.
        """
        form = self._form(workload)
        self._previous = self._settled.get((form, workload)) or self._planned(form, workload)
        return self._previous

    def settle(self, workload: Workload, plan: Plan) -> None:
        """Have ``plan``, another rank's choice, for ``workload``."""
        self._previous = self._settled[self._form(workload), workload] = plan

    def ran_out(self, workload: Workload) -> None:
        """Memory did not do for ``workload``, whatever was predicted: its plan is to be the one
        that needs least. On every rank alike."""
        self._ran_out[workload] = None
        self._settled.clear()
        self._planned.cache_clear()

    @property
    def chooses(self) -> bool:
        """Whether any block's strategy is the planner's to choose. A plan that does not fit the
        model is told of when it is asked for, not here."""
        form = self.options.plan
        parts = (form.attention, form.mlp) if isinstance(form, PlanByKind) else (form,)
        return any(p == AUTO or isinstance(p, tuple) and AUTO in p for p in parts)

    def variants(self, plan: Plan) -> tuple[str, ...]:
        """The variant of each block that ``plan`` means: the Z names of an MLP are one."""
        return tuple(canonical_strategy(b.kind, s) for b, s in zip(self.blocks, plan.strategies))

    def correct(self, corrections: Corrections) -> None:
        """Apply ``corrections`` to predictions from now on; plans are decided anew. On every rank
        alike."""
        self._corrections = corrections
        self.hold(self.static_bytes)

    def hold(self, static_bytes: int) -> None:
        """Count with ``static_bytes`` of weights, gradients and optimizer state, or more where the
        run was seen to hold more; plans are decided anew. On every rank alike."""
        self.static_bytes = max(static_bytes, self._corrections.constant(STATIC))
        self._settled.clear()
        self._planned.cache_clear()

    def costs(self, workload: Workload) -> Costs:
        """Expected cost of every feasible strategy of every block: predicted, and corrected."""
        predicted = self.predicted_costs(workload)

        def corrected(i: int) -> dict[str, BlockCost]:
            of, kind = self.blocks[i].kind, self.kinds[i]
            return {
                s: self._corrections.apply(c, (kind, canonical_strategy(of, s)), workload)
                for s, c in predicted[i].items()
            }

        return self._once_a_kind(corrected)

    def predicted_costs(self, workload: Workload) -> Costs:
        """The same by the cost model alone."""
        machine, model = self.machine(workload.dtype), self.cost_model

        def predicted(i: int) -> dict[str, BlockCost]:
            block = self.blocks[i]
            return {
                s: model.cost(block, s, workload)
                if model
                else prior_cost(block, s, workload, machine, self.sharded)
                for s in block.feasible()
            }

        return self._once_a_kind(predicted)

    def _once_a_kind(self, of: Callable[[int], dict[str, BlockCost]]) -> Costs:
        """Per block what ``of`` says of the first block of its kind."""
        found = {kind: of(self.kinds.index(kind)) for kind in dict.fromkeys(self.kinds)}
        return tuple(found[kind] for kind in self.kinds)

    def rest(self, workload: Workload) -> BlockCost:
        """Cost of what is not in a block, where any of it was measured."""
        rest = self.cost_model.rest(workload, self.blocks) if self.cost_model else NOTHING
        return self._corrections.apply_to_rest(rest, workload)

    def predict(self, plan: Plan, workload: Workload) -> tuple[float, int]:
        """Predicted (seconds, peak bytes) of a step under ``plan``, its rest where measured."""
        choices = self._choices(plan.strategies, workload)
        return choices.time_s(plan.strategies), choices.peak(plan.strategies)

    def memory_limit(self, dtype: torch.dtype) -> float:
        """Bytes a plan may need on a rank: the option, else the capacity, else infinite.

        Args:
            dtype: of the workload, as the machine's rates are measured with it.
        """
        if self.options.memory_limit is not None:
            return self.options.memory_limit
        capacity = self.machine(dtype).capacity_bytes
        return float("inf") if capacity is None else capacity

    def asked_by_name(self, workload: Workload, block: int) -> bool:
        """Whether the plan option names the strategy of the block at index ``block``."""
        return self._names(self._form(workload))[block] != AUTO

    def candidates(self, block: BlockSpec) -> tuple[str, ...]:
        """What "auto" may choose for ``block``: feasible, allowed, one name per variant."""
        by_variant: dict[str, str] = {}
        for s in self.options.strategies:
            if s not in block.infeasible:
                by_variant.setdefault(canonical_strategy(block.kind, s), s)
        return tuple(by_variant.values())

    def _kind(self, b: BlockSpec) -> Hashable:
        widths = (b.hidden, b.num_heads, b.num_kv_heads, b.head_dim, b.intermediate)
        weights = (b.num_weight_elements, b.num_split_weight_elements)
        measured_as = "" if self.cost_model is None else b.structure
        return b.kind, widths, weights, b.mask, tuple(sorted(b.infeasible)), measured_as

    def _form(self, workload: Workload) -> PlanOption:
        """The plan option; where it is a function, what it returns for ``workload``."""
        form = self.options.plan
        if not callable(form):
            return form
        form = form(workload)
        return form if isinstance(form, str | Plan) else parse_plan(form, self._where)

    def _decide(self, form: PlanOption, workload: Workload) -> Plan:
        if workload.batch < 1 or workload.seq_len < 1:
            raise ValueError(
                f"empty input: batch {workload.batch}, sequence length {workload.seq_len}; "
                "both must be at least 1"
            )
        names = self._names(form)
        if self.num_ranks == 1:
            return Plan((REPLICATED,) * len(self.blocks))
        return self._choose(names, workload) if AUTO in names else Plan(names)

    def _names(self, form: PlanOption) -> tuple[str, ...]:
        """A name (or "auto") for every block, from any form of the plan; feasibility checked."""
        where = self._where
        form = parse_plan(form, where)
        if not self.blocks:
            return ()
        if callable(form):
            raise ValueError(f"{where}: returned a function; return a Plan or names")
        if isinstance(form, str):
            names = (form,) * len(self.blocks)
        elif isinstance(form, Plan):
            if len(form.strategies) != len(self.blocks):
                raise ValueError(
                    f"{where}: {len(form.strategies)} strategies given, but the model has "
                    f"{len(self.blocks)} blocks ({self._counts()})"
                )
            names = form.strategies
        elif isinstance(form, PlanByKind):
            names = self._by_kind(form, where)
        else:
            names = self._by_layer(form, where)
        if self.num_ranks > 1:
            self._check_feasible(names, where)
        return names

    def _num_blocks(self, kind: str) -> int:
        return sum(b.kind == kind for b in self.blocks)

    def _counts(self) -> str:
        return f"{self._num_blocks('attention')} attention, {self._num_blocks('mlp')} mlp"

    def _by_layer(self, names: tuple[str, ...], where: str) -> tuple[str, ...]:
        counts = {n for n in (self._num_blocks("attention"), self._num_blocks("mlp")) if n}
        if len(counts) > 1:
            raise ValueError(
                f"{where}: a list with one name per layer is ambiguous for a model whose blocks do "
                f"not pair up ({self._counts()}); give {{'attention': [...], 'mlp': [...]}}"
            )
        if len(names) not in counts:
            raise ValueError(
                f"{where}: {len(names)} names given, but the model has {max(counts)} layers "
                f"({self._counts()} blocks); give one name per layer"
            )
        return tuple(names[b.layer] for b in self.blocks)

    def _by_kind(self, form: PlanByKind, where: str) -> tuple[str, ...]:
        of = {"attention": form.attention, "mlp": form.mlp}
        for kind, given in of.items():
            if not isinstance(given, str) and len(given) != self._num_blocks(kind):
                raise ValueError(
                    f"{where}[{kind!r}]: {len(given)} names given, but the model has "
                    f"{self._num_blocks(kind)} {kind} blocks"
                )
        per_block = [(of[b.kind], b.layer) for b in self.blocks]
        return tuple(g if isinstance(g, str) else g[i] for g, i in per_block)

    def _check_feasible(self, names: tuple[str, ...], where: str) -> None:
        for block, name in zip(self.blocks, names):
            feasible = ", ".join(block.feasible()) or "none"
            if name in block.infeasible:
                raise ValueError(
                    f"{where}: {name!r} cannot compute block '{block.name}': "
                    f"{block.infeasible[name]}; feasible there: {feasible}"
                )
            if name == AUTO and not self.candidates(block):
                reasons = "; ".join(f"{s}: {block.infeasible[s]}" for s in self.options.strategies)
                raise ValueError(
                    f"no strategy in option 'strategies' can compute block '{block.name}' "
                    f"({reasons}); feasible there: {feasible}"
                )

    def _choose(self, names: tuple[str, ...], workload: Workload) -> Plan:
        """The fastest plan that fits, with ``names`` fixed where they are not "auto"."""
        choices = self._choices(names, workload)
        limit = self.memory_limit(workload.dtype)
        strategies = choices.fastest(limit)
        if strategies is None:
            strategies = self._over_the_limit(names, limit, workload)
        if workload in self._ran_out:
            best = Plan(choices.smallest()[1])
        else:
            best = self._smooth(Plan(strategies), choices, limit)
        log.info("plan for %s: %s", describe_workload(workload), best.key)
        return best

    def least_bytes(self, workload: Workload, names: tuple[str, ...] | None = None) -> int:
        """Bytes of a rank that the smallest plan needs.

        Args:
            names: a strategy or "auto" for every block; None: the planner's to choose for all.
        """
        return self._choices(names or (AUTO,) * len(self.blocks), workload).smallest()[0]

    def longest(self, workload: Workload, most: int, names: tuple[str, ...] | None = None) -> int:
        """The longest sequences, in tokens up to ``most``, for which a plan fits the memory limit:
        as ``workload`` but for their length. 0: none does.

        Args:
            names: as of ``least_bytes``.
        """

        def need(seq_len: int) -> int:
            return self.least_bytes(replace(workload, seq_len=seq_len), names)

        return longest_length(need, self.memory_limit(workload.dtype), most)

    def _choices(self, names: Sequence[str], workload: Workload) -> Choices:
        """For every block what its name allows."""
        free = {k: self.candidates(b) for k, b in zip(self.kinds, self.blocks)}
        model = self.cost_model
        floor, margin = (model.floor_bytes, model.margin) if model else (0, 0.0)
        return Choices(
            [free[k] if n == AUTO else (n,) for k, n in zip(self.kinds, names)],
            self.costs(workload),
            self.rest(workload),
            self.static_bytes,
            max(floor, self._corrections.constant(FLOOR)) if workload.training else 0,
            margin,
            self.machine(workload.dtype).communicator_bytes,
        )

    def _over_the_limit(
        self, names: tuple[str, ...], limit: float, workload: Workload
    ) -> tuple[str, ...]:
        need, strategies = self._choices(names, workload).smallest()
        longest = self.longest(workload, workload.seq_len, names)
        text = (
            f"no plan fits for {describe_workload(workload)}: the smallest needs "
            f"{format_bytes(need)} a rank, {format_bytes(self.static_bytes)} of "
            "them weights, gradients and optimizer state; the longest sequences that would fit "
            f"have {longest} tokens"
        )
        if self.options.memory_limit is not None:
            allowed = ", ".join(self.options.strategies)
            raise ValueError(
                f"{text}, but option 'memory_limit' is {format_bytes(limit)}; raise it, use more "
                f"ranks or shorter or fewer sequences, or allow more strategies (now: {allowed})"
            )
        # The capacity is the machine's word, not the user's, and the prediction is no measurement.
        log.warning("%s; the device has %s. Trying it all the same.", text, format_bytes(limit))
        return strategies

    def _smooth(self, best: Plan, choices: Choices, limit: float) -> Plan:
        """The previous plan instead, where it is legal, fits, and is nearly as fast."""
        previous = self._previous
        if previous is None or previous == best:
            return best
        if not all(s in names for s, names in zip(previous.strategies, choices.names)):
            return best
        best_s, old_s = (
            choices.time_s(p.strategies) - choices.rest.time_s for p in (best, previous)
        )
        keep = old_s <= best_s * (1 + self.options.smoothing)
        return previous if keep and choices.peak(previous.strategies) <= limit else best
