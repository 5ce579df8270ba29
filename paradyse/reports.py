"""What is said of a compiled model: why it takes its plans, and what it has done so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paradyse.config import check_count
from paradyse.distributed import collectives
from paradyse.distributed.axis import device_of
from paradyse.distributed.collectives import REPLICAS
from paradyse.kernels.selection import capability_of, describe_choices
from paradyse.mixed.step_reports import MixedReport
from paradyse.mixed.training import MixedModel
from paradyse.planning.explain import PlanReport, explain_plan, short_key
from paradyse.planning.gathered_work import gathered_work
from paradyse.planning.tables import Rows, Shown, rich_table, text_table
from paradyse.planning.units import format_bytes
from paradyse.profiling.step_reports import StepReport, known_calls
from paradyse.runtime.registry import captures_of
from paradyse.strategies import canonical_strategy
from paradyse.strategies.base import VariantCache
from paradyse.types import BlockSpec, Point
from paradyse.weights.shard import Model, check_module


@dataclass(frozen=True)
class Stats(Shown):
    """Counters of one compiled model, all captures together, as ``paradyse.stats`` gives them.

    Sizes are in bytes, lengths in tokens. ``str()`` has all of it as tables; reading it never
    raises.

    Example:

        stats = paradyse.stats(compiled)
        print(stats.plan_switches, "switches between the plans of", *stats.plan_per_length)
        if stats.last is not None:
            print(stats.last.time_s, "seconds for", stats.last.seq_len, "tokens")
    """

    captures: int = 0
    """Graphs that Dynamo handed over."""
    variants_compiled: int = 0
    """Compilations of a block under a strategy."""
    pieces_compiled: int = 0
    """Compilations of what lies between blocks."""
    steps: int = 0
    """Forward calls."""
    plan_switches: int = 0
    """Calls whose plan was another than the call's before."""
    plan_per_length: Mapping[int, str] = field(default_factory=dict)
    """Sequence length -> key of the plan last used for it."""
    bytes_per_collective: Mapping[str, int] = field(default_factory=dict)
    """Collective -> bytes this rank sent."""
    calls_per_collective: Mapping[str, int] = field(default_factory=dict)
    """Collective -> how often."""
    bytes_per_block: Mapping[str, int] = field(default_factory=dict)
    """Block -> bytes this rank sent for it."""
    last: StepReport | None = None
    """The latest call that is over; None before the first."""
    groups: MixedReport | None = None
    """The latest step in groups; None where there are none."""

    def _tables(self) -> list[tuple[str, tuple[str, ...], Rows]]:
        counters = ("captures", "variants_compiled", "pieces_compiled", "steps", "plan_switches")
        rows: Rows = [(c.replace("_", " "), str(getattr(self, c))) for c in counters]
        plans: Rows = [(str(n), short_key(k)) for n, k in sorted(self.plan_per_length.items())]
        calls, sizes = self.calls_per_collective, sorted(self.bytes_per_collective.items())
        sent: Rows = [(c, str(calls.get(c, 0)), format_bytes(n)) for c, n in sizes]
        return [
            ("counters", ("counter", "value"), rows),
            ("plans", ("length", "plan"), plans),
            ("communication", ("collective", "calls", "sent"), sent),
            *([] if self.groups is None else [self.groups.table()]),
        ]

    def __str__(self) -> str:
        return "\n\n".join(f"{t}\n{text_table(h, rows)}" for t, h, rows in self._tables() if rows)

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*[rich_table(*t) for t in self._tables() if t[2]])


def explain(
    compiled_model: Model,
    batch_size: int,
    seq_len: int,
    other_lens: Sequence[int] = (),
    mask: str | None = None,
) -> PlanReport:
    """Why each block gets its strategy at this workload; call it on every rank.

    Under ``torch.no_grad()`` it is the plan of evaluation, which keeps nothing for backward.

    Args:
        compiled_model: has run at least once.
        batch_size: sequences of one call.
        seq_len: tokens of each; of the sequence with the most work where the model has several,
            such as those of an encoder and a decoder.
        other_lens: tokens of the other ones; by default as many.
        mask: of such batches, as ``StepReport.mask`` has it ("causal, key padding"): plain, padded
            and packed batches have graphs of their own. None: of the graph that was captured last.
    Returns:
        The plan with its predicted seconds and bytes, and those of every other strategy.
    Raises:
        ValueError: the model has not run yet, so no graph of it is known, or nothing of it is
            split; a size that is no whole number of at least 1; other lengths than the model has
            sequences; no batch with such a mask has run; it is a ``MixedModel``, whose groups have
            a plan each.

    Example:

        compiled = torch.compile(model, backend="paradyse")
        compiled(**batch).loss.backward()
        print(paradyse.explain(compiled, batch_size=1, seq_len=8192))
        mask = paradyse.stats(compiled).last.mask
        print(paradyse.explain(compiled, batch_size=1, seq_len=8192, mask=mask))
    """
    if isinstance(compiled_model, MixedModel):
        raise ValueError(
            "groups have a plan each: MixedBatches.explain(step) says which sequences go where and "
            "why, and stats(model) what they took; explain(model.model, ...) is of one group"
        )
    check_count("batch_size", batch_size)
    check_count("seq_len", seq_len)
    for length in other_lens:
        check_count("other_lens", length)
    graphs = [(c, g) for c in captures_of(compiled_model) for g in c.graphs.values() if g.blocks]
    if not graphs:
        whole = list(captures_of(compiled_model, whole=True))
        split = list(captures_of(compiled_model))
        notes = dict.fromkeys(n for c in (*split, *whole) for n in c.notes)
        what = "no block of this model is found" if split else "nothing of this model is split"
        raise ValueError(
            f"{what}, so there is nothing to choose: {'; '.join(notes)}"
            if notes
            else "no graph of this model is known yet: run one step of the compiled model first"
        )
    masks = [g.choice.workload(1, 1, training=True).mask for _, g in graphs]
    if mask not in (None, *masks):
        known = ", ".join(repr(m) for m in dict.fromkeys(masks))
        raise ValueError(
            f"no batch with mask {mask!r} has run: give one of {known}, or run such a batch first"
        )
    capture, graph = [pair for pair, m in zip(graphs, masks) if mask in (None, m)][-1]
    num_others = len(graph.program.ctx.seqs) - 1 + len(graph.program.unsplit)
    if len(other_lens) not in (0, num_others):
        raise ValueError(
            f"other_lens has {len(other_lens)} lengths, and this model {num_others} sequences "
            "beside that of seq_len: give one for each, or none"
        )
    others = tuple((batch_size, n) for n in other_lens)
    trains = torch.is_grad_enabled()
    like = graph.choice.workload(batch_size, seq_len, trains, others=others)
    kernels = attention_kernels(graph.blocks, graph.choice.dtype, device_of(capture.axis.group))
    choice, program = graph.choice, graph.program
    notes = capture.notes_of(program.ctx.notes)
    works = gathered_work(program, like, choice.planner.machine(like.dtype))
    with graph.planning():
        return explain_plan(choice.alone, like, notes, kernels, works)


def attention_kernels(
    blocks: Sequence[BlockSpec], dtype: torch.dtype, device: torch.device
) -> tuple[str, ...]:
    """Which kernel computes the attention of ``blocks`` in ``dtype``, if ``device`` is a GPU;
    nothing on a CPU, where there is one kernel."""
    if device.type != "cuda":
        return ()
    capability = capability_of(device)
    widths = sorted({b.head_dim for b in blocks if b.kind == "attention" and b.head_dim})
    return tuple(
        f"width {width}, {line}"
        for width in widths
        for line in describe_choices(capability, dtype, width)
    )


def stats(compiled_model: Model | MixedModel) -> Stats:
    """What has happened so far with ``compiled_model`` on this rank.

    Models of equal code share their graphs, and what is counted of these; ``last`` is the model's
    own. Of a ``MixedModel``, ``groups`` has the groups of the latest step.

    Args:
        compiled_model: what ``torch.compile`` returned, or the module that it was given.
    Returns:
        Counts, and bytes that this rank sent.
    Raises:
        ValueError: ``compiled_model`` is no module.

    Example:

        stats = paradyse.stats(compiled)
        print(stats.steps, "calls,", stats.captures, "graphs")
        print(stats.plan_per_length, stats.bytes_per_collective)
    """
    if isinstance(compiled_model, MixedModel):
        return replace(stats(compiled_model.model), groups=compiled_model.last)
    captures = list(captures_of(compiled_model))
    graphs = [(c, g) for c in captures for g in c.graphs.values()]
    variants = {
        (
            program.ctx.at_rest,
            program.scope.batch is None,
            block.structure,
            canonical_strategy(block.kind, s),
        )
        for _, g in graphs
        for program in g.programs
        for block, step in zip(g.blocks_of(program), program.block_steps, strict=True)
        for s in {Point.parse(s).variant for s in program.variants[step.position]}
    }
    programs = [p for _, g in graphs for p in g.programs if p.axis.size > 1 or p is g.program]
    traffic = [
        collectives.traffic(p.axis, i)
        for p in programs
        for i in (*(s.block_id for s in p.block_steps), p.schedule.between_id)
    ]
    traffic += [collectives.traffic(axis, REPLICAS) for axis in {c.axis for c in captures}]
    guards = dict.fromkeys(g.choice.guard for _, g in graphs)
    used = [(at, n, plan) for g in guards for n, (at, plan) in g.used.items()]
    used.sort(key=lambda call: call[0])  # of one length in several graphs the latest call counts
    known = known_calls(check_module(compiled_model).parameters())
    lasts = [s.last for s in known if s.last is not None]
    sent, calls, per_block = Counter[str](), Counter[str](), Counter[str]()
    for t in traffic:
        sent.update(t.sent_bytes)
        calls.update(t.calls)
        per_block[t.name] += t.sent_bytes.total()
    return Stats(
        captures=len(captures),
        variants_compiled=len(variants),
        pieces_compiled=sum(
            session.of(VariantCache).num_compiled
            for session in {p.axis.session for _, g in graphs for p in g.programs}
        ),
        steps=sum(c.num_steps for c in captures),
        plan_switches=sum(g.num_switches for g in guards),
        plan_per_length={n: plan.key for _, n, plan in used},
        bytes_per_collective=dict(sent),
        calls_per_collective=dict(calls),
        bytes_per_block=dict(per_block),
        last=max(lasts, key=lambda step: step.number, default=None),
    )
