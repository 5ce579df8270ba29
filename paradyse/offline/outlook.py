"""What a dry run and a machine on paper say of every strategy at every length, and of the mixture.

Memory is that of ``dry_run``; operations, bytes and messages are ``prior_cost``'s, from the
shapes of the captured blocks, at the rates of ``devices.machine_of``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from paradyse.config import Options
from paradyse.offline.dry_run import DryRun, Sizes
from paradyse.planning.costs import BlockCost, Machine
from paradyse.planning.explain import count_names
from paradyse.planning.planner import Planner
from paradyse.planning.prior import prior_cost
from paradyse.strategies import canonical_strategy
from paradyse.strategies.tiles import tile_tokens
from paradyse.types import (
    ATTENTION_STRATEGIES,
    LEVER_SETS,
    LEVERS,
    REPLICATED,
    BlockSpec,
    HeadSpec,
    Plan,
    Point,
    Workload,
)

MIXTURE = "mixture"
"""What the planner chooses, a point for every block, with all levers that it may use."""

NO_LEVERS = f"{MIXTURE}, no levers"
"""The same with none."""

LONGEST = 1 << 34
"""Tokens at which the search for the longest length ends."""

RESIDENT = 2
"""Times a block's whole weights are there where they lie spread over ranks: its own, and the next
block's on their way while it runs (``unshard.LookAhead``)."""


class PaperCosts:
    """Costs for a ``Planner``: times predicted, memory seen in a dry run."""

    floor_bytes = 0
    """Sharded weights' gradients are summed block by block."""
    margin = 0.0
    """Bytes are counted, not measured."""

    def __init__(self, run: DryRun, machine: Machine, sharded: bool = True):
        self.run, self.machine, self.sharded = run, machine, sharded

    def cost(self, block: BlockSpec, point: str, workload: Workload) -> BlockCost:
        """Of ``block`` under ``point`` for ``workload``."""
        prior = prior_cost(block, point, workload, self.machine, self.sharded)
        saved, workspace = self._held(self.run.block(block, point), workload)
        if Point.parse(point).offloads:  # as ``lever_work.offload`` has it
            return replace(
                prior, saved_bytes=0, workspace_bytes=workspace + 2 * saved, host_bytes=saved
            )
        return replace(prior, saved_bytes=saved, workspace_bytes=workspace)

    def rest(
        self,
        workload: Workload,
        blocks: Sequence[BlockSpec] = (),
        head: HeadSpec | None = None,
    ) -> BlockCost:
        """Of embedding, head and loss for ``workload``: memory, and the time of their matmuls; the
        same whatever the ``blocks`` and the ``head``."""
        between, tokens = self.run.between, self.run.tokens(workload.seq_len, workload.batch)
        flops = sum(sizes.growth.flops_at(tokens) for sizes in between)
        tables = sum(self._held(sizes, workload)[0] for sizes in between if sizes.lasting)
        # what the head saves is gone before any block's backward: it is workspace
        most = max((sum(self._held(sizes, workload)) for sizes in between), default=0)
        return BlockCost(flops / self.machine.matmul_flops, tables, most, 0)

    def _held(self, sizes: Sizes, workload: Workload) -> tuple[int, int]:
        """Bytes saved and of workspace, weights included."""
        batch = workload.batch
        tokens = self.run.tokens(workload.seq_len, batch)
        saved, workspace = sizes.at(tokens, batch * tile_tokens(batch))
        return saved, workspace + RESIDENT * sizes.growth.gathered_bytes * self.sharded


@dataclass(frozen=True)
class Forecast:
    """One strategy (or the mixture) at one length."""

    seq_len: int
    time_s: float
    """Of a step, forward and backward, without the optimizer."""
    peak_bytes: int
    """Of a rank."""
    fits: bool
    plan: Plan
    """The variant of every block, and the head's levers."""


@dataclass(frozen=True)
class Outlook:
    """The answer of ``look_ahead``."""

    run: DryRun
    machine: Machine
    limit_bytes: float
    batch: int
    dtype: torch.dtype
    infeasible: Mapping[str, str]
    """Strategy -> why it cannot be the plan of all blocks."""
    forecasts: Mapping[str, tuple[Forecast, ...]]
    """Strategy, or ``MIXTURE`` -> one for each length; the mixture's only where it fits."""
    longest: Mapping[str, int]
    """Strategy, ``MIXTURE`` or ``NO_LEVERS`` -> the longest length that fits, in tokens; 0: none
    does. Also of the mixture with one lever alone, where there are several."""


def look_ahead(
    run: DryRun,
    machine: Machine,
    lengths: Sequence[int] | Callable[[int], Sequence[int]],
    dtype: torch.dtype,
    batch: int = 1,
    memory_limit: int | None = None,
    sharded: bool = True,
    levers: Sequence[str] = LEVERS,
) -> Outlook:
    """Every strategy, and the mixture of all, at ``lengths``.

    Args:
        lengths: tokens of a sequence; or a function of the longest length that fits.
        dtype: of weights and activations.
        batch: sequences a step.
        memory_limit: bytes a rank may use; None: what ``machine`` has.
        sharded: weights at rest are 1/p on each rank; as ``run`` was made.
        levers: that the mixture may use.
    """
    if memory_limit is not None:
        machine = replace(machine, capacity_bytes=memory_limit)
    costs = cast(Any, PaperCosts(run, machine, sharded))

    def planner_with(levers: Sequence[str]) -> Planner:
        # plans by length alone, not by what came before
        options = Options(smoothing=0.0, levers=tuple(levers))
        known = run.static_bytes, sharded, costs
        return Planner(options, run.blocks, run.num_ranks, lambda _: machine, *known)

    planner = planner_with(levers)
    limit = planner.memory_limit(dtype)

    def workload(seq_len: int) -> Workload:
        return Workload(batch, seq_len, dtype, True, run.num_ranks)

    infeasible = {}
    strategies = (REPLICATED,) if run.num_ranks == 1 else ATTENTION_STRATEGIES
    for s in strategies:
        why = [f"{b.name}: {b.infeasible[s]}" for b in run.blocks if s in b.infeasible]
        if why:
            infeasible[s] = why[0]
    static = {s: planner.static(s, workload(1)) for s in strategies if s not in infeasible}
    longest = {s: planner.longest(workload(1), LONGEST, plan) for s, plan in static.items()}
    longest |= _longest_by_levers(planner_with, levers, run.blocks, workload(1))
    if callable(lengths):
        lengths = lengths(longest[MIXTURE])
    forecasts = {
        s: tuple(_forecast(planner, plan, workload(n)) for n in lengths)
        for s, plan in static.items()
    }
    possible = [w for w in map(workload, lengths) if planner.least_bytes(w) <= limit]
    forecasts[MIXTURE] = tuple(_forecast(planner, planner.plan(w), w) for w in possible)
    return Outlook(run, machine, limit, batch, dtype, infeasible, forecasts, longest)


def _longest_by_levers(
    planner_with: Callable[[Sequence[str]], Planner],
    levers: Sequence[str],
    blocks: Sequence[BlockSpec],
    like: Workload,
) -> dict[str, int]:
    """The mixture's longest lengths: with all ``levers`` that ``blocks`` have, without any, and,
    where there are several, with each alone."""
    used = [v for v in levers if any(v in s for b in blocks for s in LEVER_SETS[b.kind])]
    sets = {NO_LEVERS: (), MIXTURE: tuple(used)}
    if len(used) > 1:
        sets |= {f"{MIXTURE}, {v}": (v,) for v in used}
    return {name: planner_with(s).longest(like, LONGEST) for name, s in sets.items()}


def _forecast(planner: Planner, plan: Plan, workload: Workload) -> Forecast:
    time_s, peak = planner.predict(plan, workload)
    fits = peak <= planner.memory_limit(workload.dtype)
    variants = replace(plan, strategies=planner.variants(plan))
    return Forecast(workload.seq_len, time_s, peak, fits, variants)


def plan_in_words(blocks: Sequence[BlockSpec], plan: Plan) -> str:
    """Per kind of ``blocks`` each point of ``plan``, with how many blocks have it:
    ``attention metp; mlp 3 metp, ...``."""
    kinds = dict.fromkeys(b.kind for b in blocks)
    pairs = [(b.kind, canonical_strategy(b.kind, s)) for b, s in zip(blocks, plan.strategies)]
    words = [f"{kind} {count_names([s for k, s in pairs if k == kind])}" for kind in kinds]
    return "; ".join(words + [f"head {plan.head}"] * bool(plan.head))
