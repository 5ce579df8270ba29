"""What is said of a compiled model: why it takes its plans, and what it has done so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from paradyse.config import check_count
from paradyse.distributed import collectives
from paradyse.distributed.axis import device_of
from paradyse.distributed.collectives import REPLICAS
from paradyse.kernels.selection import capability_of, describe_choices
from paradyse.mixed.training import MixedModel
from paradyse.planning.explain import PlanReport, Stats, explain_plan
from paradyse.planning.gathered_work import gathered_work
from paradyse.profiling.step_reports import known_steps
from paradyse.runtime.registry import captures_of
from paradyse.strategies import canonical_strategy
from paradyse.strategies.base import VariantCache
from paradyse.types import BlockSpec, Point


def explain(
    compiled_model: Any, batch_size: int, seq_len: int, other_lens: Sequence[int] = ()
) -> PlanReport:
    """Why each block gets its strategy at this workload. Call it on every rank.

    Args:
        compiled_model: has run at least once.
        batch_size: sequences of one call.
        seq_len: tokens of each; of the sequence with the most work where the model has several,
            such as those of an encoder and a decoder.
        other_lens: tokens of the other ones; by default as many.
    Raises:
        ValueError: the model has not run yet, so no graph of it is known, or nothing of it is
            split; a size that is no whole number of at least 1; other lengths than the model has
            sequences.
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
    capture, graph = graphs[-1]
    num_others = len(graph.program.ctx.seqs) - 1 + len(graph.program.unsplit)
    if len(other_lens) not in (0, num_others):
        raise ValueError(
            f"other_lens has {len(other_lens)} lengths, and this model {num_others} sequences "
            "beside that of seq_len: give one for each, or none"
        )
    others = tuple((batch_size, n) for n in other_lens)
    trains = torch.is_grad_enabled()
    like = graph.choice.guard.workload(batch_size, seq_len, trains, others=others)
    kernels = attention_kernels(graph.blocks, graph.choice.dtype, device_of(capture.axis.group))
    choice, program = graph.choice, graph.program
    planner = choice.planner
    works = gathered_work(program, like, planner.machine(like.dtype))
    return explain_plan(planner, like, program.ctx.notes, kernels, choice.alone, works)


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


def stats(compiled_model: Any) -> Stats:
    """What has happened so far with ``compiled_model`` on this rank, and for a ``MixedModel`` in
    the groups of the latest step. Models of equal code share their graphs, and what is counted of
    these; ``last`` is the model's own."""
    if isinstance(compiled_model, MixedModel):
        return replace(stats(compiled_model.model), groups=compiled_model.last)
    captures = list(captures_of(compiled_model))
    graphs = [(c, g) for c in captures for g in c.graphs.values()]
    variants = {
        (block.structure, canonical_strategy(block.kind, s))
        for _, g in graphs
        for program in g.programs
        for block, step in zip(g.blocks, program.block_steps, strict=True)
        for s in {Point.parse(s).variant for s in program.variants[step.position]}
    }
    traffic = [
        collectives.traffic(c.axis, i)
        for c, g in graphs
        for i in (*(s.block_id for s in g.program.block_steps), g.program.schedule.between_id)
    ]
    traffic += [collectives.traffic(axis, REPLICAS) for axis in {c.axis for c in captures}]
    guards = dict.fromkeys(g.choice.guard for _, g in graphs)
    lasts = [s.last for s in known_steps(compiled_model.parameters()) if s.last is not None]
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
        plan_per_length={n: plan for g in guards for n, plan in g.plan_of.items()},
        bytes_per_collective=dict(sent),
        calls_per_collective=dict(calls),
        bytes_per_block=dict(per_block),
        last=max(lasts, key=lambda step: step.number, default=None),
    )
