"""What the library tells people about itself: plans explained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paradyse.planning.alone import Alone
from paradyse.planning.breakdown import Part
from paradyse.planning.costs import BlockCost
from paradyse.planning.gathered import GatheredWork, with_shares
from paradyse.planning.planner import Costs, Planner
from paradyse.planning.reasons import held_on_host, over, slower, what_is_seen, why_chosen, why_not
from paradyse.planning.splits import Splits
from paradyse.planning.tables import Rows, Shown, rich_table, text_table
from paradyse.planning.units import describe_workload, format_bytes, format_seconds
from paradyse.types import (
    ATTENTION_STRATEGIES,
    BATCH,
    HEAD,
    LEVER_SETS,
    LEVERS,
    ON_HOST,
    REPLICATED,
    BlockSpec,
    Plan,
    Point,
    Workload,
)

WHOLE_LOGITS = "whole logits"
"""A head without levers."""


def plan_table(blocks: Sequence[BlockSpec], plan: Plan) -> str:
    """Of each of ``blocks``, and of the head, what ``plan`` has, as text."""
    pairs = zip(blocks, plan.strategies, strict=True)
    rows = [(b.name, s, str(b.mask or "") or "-", b.structure) for b, s in pairs]
    rows += [(HEAD, plan.head, "-", "-")] * bool(plan.head)
    return text_table(("block", "strategy", "mask", "structure"), rows)


@dataclass(frozen=True)
class StrategyRow:
    """One strategy for one block, or for all blocks."""

    strategy: str
    why: str
    """``chosen``, or why not."""
    time_s: float | None = None
    """Predicted seconds a step; None where it cannot run."""
    peak_bytes: int | None = None
    """A block's: saved for backward + workspace. A plan's: as predicted for the rank."""
    comm_bytes: int | None = None
    """Sent by a rank in a step."""
    source: str = ""
    """What the time comes from (``BlockCost.source``); several for a plan of unlike parts."""
    memory_source: str = ""
    """"online" where the bytes were corrected by this run (``BlockCost.memory_source``)."""

    def cells(self) -> tuple[str, ...]:
        if self.time_s is None or self.peak_bytes is None or self.comm_bytes is None:
            return self.strategy, "-", "-", "-", "-", self.why
        sizes = format_bytes(self.peak_bytes), format_bytes(self.comm_bytes)
        return self.strategy, format_seconds(self.time_s), *sizes, self._sources(), self.why

    def _sources(self) -> str:
        if self.memory_source == self.source:
            return self.source
        if self.memory_source:
            return f"{self.source}, memory {self.memory_source}"
        return "online time" if self.source == "online" else self.source


@dataclass(frozen=True)
class BlockReport:
    """One block, or the head: what was chosen, and every strategy with its prediction."""

    name: str
    kind: str
    mask: str
    """The mask in words, and of several dims of tokens those of attention; empty for an MLP."""
    chosen: str
    rows: tuple[StrategyRow, ...]
    """One per strategy, and one per set of levers of the chosen one; of the head one per set."""


@dataclass(frozen=True)
class PlanReport(Shown):
    """The plan for a workload and why it is that one, as ``paradyse.explain`` gives it.

    Times are in seconds a step, sizes in bytes of one rank. ``str()`` has all of it as tables;
    reading it never raises.

    Example:

        report = paradyse.explain(compiled, batch_size=1, seq_len=8192)
        print(report.plan.key, report.time_s, "seconds", report.peak_bytes, "bytes")
        for block in report.blocks:
            print(block.name, block.chosen, [(row.strategy, row.why) for row in block.rows])
    """

    workload: Workload
    plan: Plan
    blocks: tuple[BlockReport, ...]
    """The head's is the last, where there is one."""
    static_plans: tuple[StrategyRow, ...]
    """Every strategy as the plan for all blocks, with the head as it was chosen."""
    time_s: float
    """Predicted seconds a step of all blocks under the plan."""
    peak_bytes: int
    """Predicted peak bytes of a rank under the plan."""
    limit_bytes: float
    """What a plan may need."""
    machine: str
    """Where the machine's rates come from."""
    gathered: tuple[str, ...]
    """What runs on gathered tensors, why, and what that costs: exact and slow."""
    notes: tuple[str, ...]
    """On the profile that the costs come from."""
    levers: tuple[str, ...]
    """Each lever of the plan, with what it costs and spares."""
    held: tuple[Part, ...]
    """The parts of ``peak_bytes``."""
    kernels: tuple[str, ...]
    """On a GPU: which kernel computes the attention of which mask, and where the choice is from."""
    tried: tuple[str, ...]
    """Plans that this run has tried side by side at this scale of lengths."""

    def _tables(self) -> list[tuple[str, tuple[str, ...], Rows]]:
        """Title, header and rows; blocks that tell the same are shown once."""
        tables: list[tuple[str, tuple[str, ...], Rows]] = []
        groups: dict[tuple[Any, ...], list[BlockReport]] = {}
        for b in self.blocks:
            groups.setdefault((b.kind, b.mask, b.chosen, b.rows), []).append(b)
        header = ("strategy", "time", "memory", "sent", "source", "why")
        for same in groups.values():
            b, more = same[0], f" and {len(same) - 1} like it" if len(same) > 1 else ""
            title = f"{b.name}{more}: {b.chosen}" + (f" (mask: {b.mask})" if b.mask else "")
            tables.append((title, header, [r.cells() for r in b.rows]))
        if self.static_plans:
            rows = [r.cells() for r in self.static_plans]
            tables.append(("one strategy for all blocks", header, rows))
        if self.held:
            rows = [(what, format_bytes(n)) for what, n in self.held]
            tables.append(("held at the peak", ("what", "bytes"), rows))
        return tables

    def _headline(self) -> str:
        headline = f"plan for {describe_workload(self.workload)}{self._split()}"
        limit = f" of {format_bytes(self.limit_bytes)}" if self.limit_bytes < float("inf") else ""
        return (
            f"{headline}\npredicted: {format_seconds(self.time_s)} a step, peak "
            f"{format_bytes(self.peak_bytes)}{limit}; machine: {self.machine}"
        )

    def _split(self) -> str:
        if self.plan.split in ("", BATCH):
            return "; each rank computes its own sequences" if self.plan.split else ""
        return f"; tokens split along {self.plan.split}"

    def _notes(self) -> str:
        gathered = (f"on gathered tensors: {g}" for g in self.gathered)
        kernels = (f"kernel: {k}" for k in self.kernels)
        return "\n".join((*self.levers, *self.tried, *self.notes, *gathered, *kernels))

    def __str__(self) -> str:
        parts = [self._headline()]
        for title, header, rows in self._tables():
            parts.append(f"{title}\n{text_table(header, rows)}" if rows else title)
        return "\n\n".join(p for p in [*parts, self._notes()] if p)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        tables = [rich_table(*t) if t[2] else Text(t[0]) for t in self._tables()]
        return Group(Text(self._headline()), *tables, Text(self._notes()))


def explain_plan(
    alone: Alone,
    workload: Workload,
    notes: Sequence[str] = (),
    kernels: tuple[str, ...] = (),
    gathered: Sequence[GatheredWork] = (),
) -> PlanReport:
    """The report on the plan for ``workload``.

    Every rank of the axis must call it, as the machine may be measured for it.

    Args:
        alone: weighs computing the whole on every rank against the plans of several.
        notes: on the graph; what runs on gathered tensors, and why.
        kernels: on a GPU, which kernel computes the attention of which mask.
        gathered: what operators of ``notes`` cost at ``workload``.
    """
    splits, planner = alone.splits, alone.planner
    plan = alone.settle(splits.plan(workload), workload)
    of, own = splits.of(plan, workload)
    costs = of.costs(own, of.mixes(plan))
    limit = planner.memory_limit(workload.dtype)
    time_s, peak = splits.predict(plan, workload)
    blocks = tuple(
        BlockReport(b.name, b.kind, what_is_seen(b, own), s, rows)
        for i, (b, s) in enumerate(zip(of.blocks, plan.strategies))
        for rows in [_block_rows(of, own, plan, costs, i)]
    )
    plans = [(s, _static_plan(planner, workload, s, plan.head)) for s in _strategies(planner)]
    plans += _other_plans(workload, plan, alone)
    return PlanReport(
        workload,
        plan,
        (*blocks, *_head_report(of, own, plan, costs)),
        tuple(_plan_row(splits, workload, plan, name, other) for name, other in plans),
        time_s,
        peak,
        limit,
        planner.machine(workload.dtype).source or "given",
        _with_costs(
            notes,
            () if plan.alone or plan.split else gathered,
            time_s,
            planner.cost_model is not None,
        ),
        planner.cost_model.notes_on(planner.blocks) if planner.cost_model is not None else (),
        _levers(splits, workload, plan),
        of.held(plan, own),
        kernels,
        _tried(alone, workload),
    )


def _tried(alone: Alone, workload: Workload) -> tuple[str, ...]:
    """The plans that were tried, the fastest first."""
    seconds = alone.tried.expected_s(workload)
    return tuple(
        f"tried in this run: {short_key(plan.key)}, {slower(time_s, min(seconds.values()))}"
        for plan, time_s in sorted(seconds.items(), key=lambda pair: pair[1])
    )


def _with_costs(
    notes: Sequence[str], gathered: Sequence[GatheredWork], step_s: float, measured: bool
) -> tuple[str, ...]:
    """``notes``, those with costs first; ``step_s`` and ``measured`` as of ``with_shares``."""
    priced = [work.line(share) for work, share in with_shares(gathered, step_s, measured)]
    of = {note for work in gathered for note in work.notes}
    return (*priced, *(note for note in notes if note not in of))


def _strategies(planner: Planner) -> tuple[str, ...]:
    return (REPLICATED,) if planner.num_ranks == 1 else ATTENTION_STRATEGIES


def _shown(planner: Planner, block: BlockSpec, chosen: str, workload: Workload) -> tuple[str, ...]:
    """Every strategy, and the chosen one with every set of levers that is allowed."""
    allowed = set(planner.options.levers)
    if planner.machine(workload.dtype).host_bandwidth is None:
        allowed.difference_update(ON_HOST)
    points = block.points((Point.parse(chosen).strategy,))
    texts = [
        *_strategies(planner),
        *(p for p in points if allowed.issuperset(Point.parse(p).levers)),
    ]
    if block.recompute and workload.training:
        texts = [str(Point.parse(text).on_demand()) for text in texts]
    return tuple(dict.fromkeys((*texts, chosen)))


def _block_rows(
    planner: Planner, workload: Workload, plan: Plan, costs: Costs, i: int
) -> tuple[StrategyRow, ...]:
    block, chosen, rows = planner.blocks[i], plan.strategies[i], []
    for s in _shown(planner, block, chosen, workload):
        if reason := block.why_not(s):
            rows.append(StrategyRow(s, f"infeasible: {reason}"))
            continue
        why = why_chosen if s == chosen else why_not
        rows.append(_row(s, costs[i][s], why(planner, workload, plan, i, s)))
    return tuple(rows)


def _row(name: str, cost: BlockCost, why: str) -> StrategyRow:
    held = cost.saved_bytes + cost.workspace_bytes
    sources = cost.source, cost.memory_source
    return StrategyRow(name, why, cost.time_s, held, cost.comm_bytes, *sources)


def _head_report(
    planner: Planner, workload: Workload, plan: Plan, costs: Costs
) -> tuple[BlockReport, ...]:
    """Of the head, which has levers alone; nothing where it has none."""
    head, rows, i = planner.head, [], len(planner.blocks)
    if head is None:
        return ()
    for levers in LEVER_SETS[HEAD]:
        point, name = "+".join(levers), "+".join(levers) or WHOLE_LOGITS
        if reasons := [head.infeasible[v] for v in levers if v in head.infeasible]:
            rows.append(StrategyRow(name, f"infeasible: {reasons[0]}"))
        elif plan.alone:
            rows.append(StrategyRow(name, why_not(planner, workload, plan, i, point)))
        elif point == plan.head:
            rows.append(_row(name, costs[i][point], why_chosen(planner, workload, plan, i, point)))
        elif set(levers) <= set(planner.options.levers):
            rows.append(_row(name, costs[i][point], why_not(planner, workload, plan, i, point)))
    if plan.alone:
        rows.append(_row(REPLICATED, costs[i][REPLICATED], "chosen"))
    return (BlockReport(HEAD, HEAD, "", plan.head or WHOLE_LOGITS, tuple(rows)),)


def _levers(splits: Splits, workload: Workload, plan: Plan) -> tuple[str, ...]:
    """Each lever of ``plan``: where it is, and what a step would take without it."""
    (time_s, peak), lines = splits.predict(plan, workload), list[str]()
    planner, own = splits.of(plan, workload)
    machine = planner.machine(workload.dtype)
    for lever in LEVERS:
        blocks = [lever in Point.parse(s).levers for s in plan.strategies]
        in_head = lever in plan.head.split("+")
        if not any(blocks) and not in_head:
            continue
        where = [f"{sum(blocks)} of {len(blocks)} blocks"] * any(blocks) + ["the head"] * in_head
        less_s, more = splits.predict(_without(plan, lever), workload)
        lines.append(
            f"lever {lever} in {' and '.join(where)}: without it "
            f"{format_seconds(less_s)} instead of {format_seconds(time_s)} a step, and a peak of "
            f"{format_bytes(more)} instead of {format_bytes(peak)}"
        )
    if any(Point.parse(s).uses_host for s in plan.strategies):
        held, host = map(format_bytes, held_on_host(planner, own, plan))
        lines.append(f"on the host: {held} of {host}")
    if machine.host_bandwidth is None:
        lines += [
            f"lever {lever} by name alone: no link to another memory is known (the device's is the "
            "host's, or the profile is older than what measures it)"
            for lever in ON_HOST
            if lever in planner.options.levers
        ]
    return tuple(lines)


def _without(plan: Plan, lever: str) -> Plan:
    def less(text: str) -> str:
        return "+".join(part for part in text.split("+") if part != lever)

    return Plan(tuple(map(less, plan.strategies)), less(plan.head), plan.split)


def _static_plan(planner: Planner, workload: Workload, strategy: str, head: str) -> Plan | str:
    """The plan of ``strategy`` for all blocks, with the levers ``head`` where the head can have
    them; or why there is none."""
    for b in planner.blocks:
        if strategy in b.infeasible:
            return f"infeasible for {b.name}"
    levers = head if planner.head is not None and head in planner.head.points() else ""
    return replace(planner.static(strategy, workload), head=levers)


def _other_plans(workload: Workload, plan: Plan, alone: Alone) -> list[tuple[str, Plan | str]]:
    """Plans that are no matter of single blocks, where there are several ranks, or why there is
    none: tokens split along other dims, by the best strategies; and every rank computes all."""
    if alone.planner.num_ranks == 1:
        return []
    found: list[tuple[str, Plan | str]] = []
    for split in alone.splits.planners:
        best = plan if split == plan.split else alone.splits.best_along(split, workload)
        found.append((f"split along {split}", best))
    refused = f"infeasible: {alone.refused}" if alone.refused else ""
    return [*found, (REPLICATED, refused or alone.plan(workload))]


def _plan_row(
    splits: Splits, workload: Workload, plan: Plan, name: str, other: Plan | str
) -> StrategyRow:
    """Of the plan ``other``, called ``name``, against ``plan``; or why there is no such plan."""
    if isinstance(other, str):
        return StrategyRow(name, other)
    planner, own = splits.of(other, workload)
    time_s, peak = splits.predict(other, workload)
    costs, limit = planner.costs(own), planner.memory_limit(own.dtype)
    chosen = [c[point] for c, point in zip(costs, planner.points(other))]
    sent = sum(c.comm_bytes for c in chosen)
    alike = (other.head, other.split) == (plan.head, plan.split)
    if alike and planner.variants(other) == planner.variants(plan):
        why = "this is the plan"
    elif peak > limit:
        why = over(peak, limit)
    else:
        why = slower(time_s, splits.predict(plan, workload)[0])
    sources = ", ".join(dict.fromkeys(c.source for c in chosen))
    memory = {c.memory_source for c in chosen}
    return StrategyRow(name, why, time_s, peak, sent, sources, min(memory, default=""))


def count_names(names: Sequence[str]) -> str:
    """Each of ``names`` once, with how often where there are others: ``3 metp, 5 ulysses_z``."""
    counts = Counter(names)
    return ", ".join(n if c == len(names) else f"{c} {n}" for n, c in counts.items())


def short_key(key: str) -> str:
    """A plan's ``key`` for people: each point once, with how many blocks it has, and the head's."""
    plan = Plan.of_key(key)
    blocks = count_names(plan.strategies)
    if plan.alone:
        return f"{blocks} on every rank"
    head = f"; head {plan.head}" if plan.head else ""
    return f"{blocks}{head}; split along {plan.split}" if plan.split else blocks + head
