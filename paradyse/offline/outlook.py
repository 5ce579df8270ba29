"""What a dry run and a machine on paper say of every strategy at every length, and of the mixture.

Memory is that of ``dry_run``; operations, bytes and messages are ``prior_cost``'s, from the
shapes of the captured blocks, at the rates of ``devices.machine_of``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from paradyse.config import Options
from paradyse.offline.dry_run import DryRun, Sizes
from paradyse.planning.breakdown import Part
from paradyse.planning.costs import BlockCost, Machine
from paradyse.planning.explain import count_names
from paradyse.planning.gathered import with_shares
from paradyse.planning.planner import Planner
from paradyse.planning.prior import head_cost, prior_cost
from paradyse.strategies import canonical_strategy
from paradyse.strategies.head import TILE_TOKENS as HEAD_TILE_TOKENS
from paradyse.strategies.tiles import chunk_tokens, tile_tokens
from paradyse.types import (
    ATTENTION_STRATEGIES,
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

RESIDENT = {False: 1, True: 2}
"""Times a block's whole weights are there where they lie spread over ranks, by whether it is
trained: its own, and in backward the former one's gradients on their way (``lanes.Overlap``)."""


class PaperCosts:
    """Costs for a ``Planner``: times predicted, memory seen in a dry run."""

    margin = 0.0
    """Bytes are counted, not measured."""

    def __init__(self, run: DryRun, machine: Machine, sharded: bool = True):
        self.run, self.machine, self.sharded = run, machine, sharded

    def cost(self, block: BlockSpec, point: str, workload: Workload) -> BlockCost:
        """Of ``block`` under ``point`` for ``workload``."""
        at, batch = Point.parse(point), workload.batch
        prior = prior_cost(block, point, workload, self.machine, self.sharded)
        tile = batch * chunk_tokens(batch) if "chunked" in at.levers else 0
        saved, workspace = self._held(self.run.block(block, point), workload, tile)
        if not at.offloads:
            return replace(prior, saved_bytes=saved, workspace_bytes=workspace)
        here = prior_cost(block, at.on_device, workload, self.machine, self.sharded)
        return replace(  # as ``lever_work.offload`` has it
            prior,
            saved_bytes=0,
            workspace_bytes=workspace + 2 * saved,
            host_bytes=here.host_bytes + saved,
        )

    def rest(
        self,
        workload: Workload,
        blocks: Sequence[BlockSpec] = (),
        head: HeadSpec | None = None,
    ) -> BlockCost:
        """Of what is no block of ``workload`` and not the head: memory, and the time of its
        matmuls; the same whatever the ``blocks`` and the ``head``."""
        run, tokens = self.run, self.run.tokens(workload.seq_len, workload.batch)
        how = tokens, self.run.num_alike(workload.batch)
        flops = sum(sizes.growth.flops_at(*how) for sizes in (*run.before, *run.between))
        # what lies behind blocks is done before any block's backward: all of it is workspace
        held = [self._held(sizes, workload) for sizes in run.between if not sizes.lasting]
        most = max(map(sum, held), default=0)
        return BlockCost(flops / self.machine.matmul_flops, self._tables(workload), most, 0)

    def head(self, head: HeadSpec, levers: str, workload: Workload) -> BlockCost:
        """Of ``head`` with ``levers`` for ``workload``."""
        prior = head_cost(head, levers, workload, self.machine, self.sharded)
        batch = workload.batch
        tile = batch * max(1, HEAD_TILE_TOKENS // batch)
        held = [self._held(sizes, workload, tile) for sizes in self.run.heads[levers]]
        saved, most = sum(s for s, _ in held), max(w for _, w in held)
        return replace(prior, saved_bytes=saved, workspace_bytes=most)

    def floor(self, workload: Workload) -> int:
        """Bytes that a step of ``workload`` holds before the first block, whatever the plan."""
        held = (sum(self._held(sizes, workload)) for sizes in self.run.before)
        return self._tables(workload) + max(held, default=0)

    def _tables(self, workload: Workload) -> int:
        """Bytes that blocks read to the end, such as rotary tables."""
        lasting = (sizes for sizes in self.run.between if sizes.lasting)
        return sum(self._held(sizes, workload)[0] for sizes in lasting)

    def _held(self, sizes: Sizes, workload: Workload, tile: int = 0) -> tuple[int, int]:
        """Bytes saved and of workspace, weights included; tiles have ``tile`` tokens, by default
        those of blocks."""
        batch = workload.batch
        tokens = self.run.tokens(workload.seq_len, batch)
        tile = tile or batch * tile_tokens(batch)
        saved, workspace = sizes.at(tokens, tile, self.run.num_alike(batch))
        apart = self.sharded and (self.run.num_ranks > 1 or self.run.on_host_bytes > 0)
        gathered_bytes = sizes.growth.gathered_bytes * apart
        return saved, workspace + RESIDENT[workload.training] * gathered_bytes


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
    held: tuple[Part, ...] = ()
    """The parts of the peak."""


@dataclass(frozen=True)
class Reach:
    """How far the mixture gets by some levers."""

    levers: tuple[str, ...]
    longest: Forecast | None
    """The fastest plan that fits the longest sequences that fit; None: none do."""
    least: tuple[tuple[int, int], ...]
    """(Tokens of a sequence, bytes of a rank that the smallest plan needs), for each length."""


@dataclass(frozen=True)
class Outlook:
    """The answer of ``look_ahead``."""

    run: DryRun
    machine: Machine
    limit_bytes: float
    batch: int
    dtype: torch.dtype
    """That blocks compute in."""
    infeasible: Mapping[str, str]
    """Strategy -> why it cannot be the plan of all blocks."""
    forecasts: Mapping[str, tuple[Forecast, ...]]
    """Strategy, or ``MIXTURE`` -> one for each length; the mixture's only where it fits."""
    longest: Mapping[str, int]
    """Strategy, or mixture of ``lever_sets`` -> the longest length that fits, in tokens; 0: none
    does."""
    reaches: Mapping[str, Reach] = field(default_factory=dict)
    """By mixture of ``lever_sets``."""


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
    """Every strategy, and the mixture of all, at ``lengths``; what ``run`` has on the host is not
    there for blocks, and nothing fits where the host cannot take it.

    Args:
        lengths: tokens of a sequence; or a function of the longest length that fits.
        dtype: that blocks compute in: of weights, too, but under autocast.
        batch: sequences a step.
        memory_limit: bytes a rank may use; None: what ``machine`` has.
        sharded: weights at rest are 1/p on each rank; as ``run`` was made.
        levers: that the mixture may use.
    """
    if memory_limit is not None:
        machine = replace(machine, capacity_bytes=memory_limit)
    limit = math.inf if machine.capacity_bytes is None else machine.capacity_bytes
    host = machine.host_capacity_bytes
    left = None if host is None else host - run.on_host_bytes
    full = left is not None and left < 0  # no plan fits
    host_memory, memory = (0, 0) if full else (left, None)
    costs = cast(Any, PaperCosts(run, machine, sharded))

    def planner_with(levers: Sequence[str]) -> Planner:
        # plans by length alone, not by what came before
        options = Options(
            smoothing=0.0, levers=tuple(levers), memory_limit=memory, host_memory=host_memory
        )
        return Planner(
            options,
            run.blocks,
            run.num_ranks,
            lambda _: machine,
            static_bytes=run.static_bytes,
            sharded=sharded,
            cost_model=costs,
            head=run.head,
        )

    planner = planner_with(levers)

    def workload(seq_len: int) -> Workload:
        return run.workload(batch, seq_len, dtype)

    infeasible = {}
    strategies = (REPLICATED,) if run.num_ranks == 1 else ATTENTION_STRATEGIES
    for s in strategies:
        why = [f"{b.name}: {b.infeasible[s]}" for b in run.blocks if s in b.infeasible]
        if why:
            infeasible[s] = why[0]
    static = {s: planner.static(s, workload(1)) for s in strategies if s not in infeasible}
    longest = {s: planner.longest(workload(1), LONGEST, plan) for s, plan in static.items()}
    by_levers = {name: planner_with(s) for name, s in lever_sets(run, levers).items()}
    longest |= {name: p.longest(workload(1), LONGEST) for name, p in by_levers.items()}
    if callable(lengths):
        lengths = lengths(longest[MIXTURE])
    forecasts = {
        s: tuple(_forecast(planner, plan, workload(n)) for n in lengths)
        for s, plan in static.items()
    }
    most = planner.memory_limit(dtype)
    possible = [w for w in map(workload, lengths) if planner.least_bytes(w) <= most]
    mixtures = [(w, plan) for w in possible if (plan := _plan_within_host(planner, w))]
    forecasts[MIXTURE] = tuple(_forecast(planner, plan, w) for w, plan in mixtures)
    reaches = {
        name: _reach(p, workload(longest[name]), [workload(n) for n in lengths])
        for name, p in by_levers.items()
    }
    return Outlook(run, machine, limit, batch, dtype, infeasible, forecasts, longest, reaches)


def notes_on(outlook: Outlook) -> list[str]:
    """What the dry run of ``outlook`` noted: first what is computed on gathered tokens and what
    that costs at the longest of the lengths that fit, of a step by the mixture."""
    run, of = outlook.run, outlook.forecasts[MIXTURE]
    priced, said = list[str](), set[str]()
    if of:
        at = of[-1]
        workload = run.workload(outlook.batch, at.seq_len, outlook.dtype)
        found = run.gathered(workload, outlook.machine)
        for work, share in with_shares(found, at.time_s, measured=False):
            priced.append(f"{work.line(share)} (at {workload.lengths} tokens)")
            said.update(work.notes)
    return [*priced, *(note for note in run.notes if note not in said)]


def lever_sets(run: DryRun, levers: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Mixtures by name, and what each may use of those ``levers`` that blocks or the head of
    ``run`` can have: none, all, each alone, and all but each."""
    of_blocks = {v for b in run.blocks for p in b.points() for v in Point.parse(p).levers}
    of_head = {v for p in run.heads for v in p.split("+")}
    used = tuple(v for v in levers if v in of_blocks | of_head)
    sets = {NO_LEVERS: (), MIXTURE: used}
    if len(used) > 1:
        sets |= {f"{MIXTURE}, {v} alone": (v,) for v in used}
    if len(used) > 2:
        sets |= {f"{MIXTURE}, all but {v}": tuple(u for u in used if u != v) for v in used}
    return sets


def _reach(planner: Planner, longest: Workload, workloads: Sequence[Workload]) -> Reach:
    at_longest = None
    if longest.seq_len:
        at_longest = _forecast(planner, planner.plan(longest), longest)
    least = tuple((w.seq_len, planner.least_bytes(w)) for w in workloads)
    return Reach(planner.options.levers, at_longest, least)


def _plan_within_host(planner: Planner, workload: Workload) -> Plan | None:
    """The plan for ``workload``, which the device can hold; None where the host cannot."""
    try:
        return planner.plan(workload)
    except ValueError:
        return None


def _forecast(planner: Planner, plan: Plan, workload: Workload) -> Forecast:
    time_s, peak = planner.predict(plan, workload)
    fits = peak <= planner.memory_limit(workload.dtype)
    variants, held = replace(plan, strategies=planner.variants(plan)), planner.held(plan, workload)
    return Forecast(workload.seq_len, time_s, peak, fits, variants, held)


def plan_in_words(blocks: Sequence[BlockSpec], plan: Plan) -> str:
    """Per kind of ``blocks`` each point of ``plan``, with how many blocks have it:
    ``attention metp; mlp 3 metp, ...``."""
    kinds = dict.fromkeys(b.kind for b in blocks)
    pairs = [(b.kind, canonical_strategy(b.kind, s)) for b, s in zip(blocks, plan.strategies)]
    words = [f"{kind} {count_names([s for k, s in pairs if k == kind])}" for kind in kinds]
    return "; ".join(words + [f"head {plan.head}"] * bool(plan.head))
