"""What is said of a compiled model: why it takes its plans, and what it has done so far."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from paradyse.config import check_count
from paradyse.distributed import collectives
from paradyse.distributed.axis import device_of
from paradyse.planning.explain import PlanReport, Stats, attention_kernels, explain_plan
from paradyse.runtime.registry import captures_of
from paradyse.strategies import canonical_strategy
from paradyse.strategies.base import VariantCache
from paradyse.types import Point


def explain(compiled_model: Any, batch_size: int, seq_len: int) -> PlanReport:
    """Why each block gets its strategy at this workload. Call it on every rank.

    Args:
        compiled_model: has run at least once.
        batch_size: sequences of one call.
        seq_len: tokens of each.
    Raises:
        ValueError: the model has not run yet, so no graph of it is known, or nothing of it is
            split; a size that is no whole number of at least 1.
    """
    check_count("batch_size", batch_size)
    check_count("seq_len", seq_len)
    graphs = [(c, g) for c in captures_of(compiled_model) for g in c.graphs.values() if g.blocks]
    if not graphs:
        notes = dict.fromkeys(n for c in captures_of(compiled_model, whole=True) for n in c.notes)
        raise ValueError(
            f"nothing of this model is split, so there is nothing to choose: {'; '.join(notes)}"
            if notes
            else "no graph of this model is known yet: run one step of the compiled model first"
        )
    capture, graph = graphs[-1]
    like = graph.choice.guard.workload(batch_size, seq_len, torch.is_grad_enabled())
    kernels = attention_kernels(graph.blocks, graph.choice.dtype, device_of(capture.axis.group))
    return explain_plan(graph.choice.planner, like, tuple(graph.program.ctx.notes), kernels)


def stats(compiled_model: Any) -> Stats:
    """What has happened so far with ``compiled_model`` on this rank."""
    captures = list(captures_of(compiled_model))
    graphs = [(c, g) for c in captures for g in c.graphs.values()]
    variants = {
        (block.structure, canonical_strategy(block.kind, s))
        for _, g in graphs
        for block, step in zip(g.blocks, g.program.block_steps, strict=True)
        for s in {Point.parse(s).variant for s in g.program.variants[step.position]}
    }
    traffic = [
        collectives.traffic(c.axis, i)
        for c, g in graphs
        for i in (*(s.block_id for s in g.program.block_steps), g.program.schedule.between_id)
    ]
    guards = dict.fromkeys(g.choice.guard for _, g in graphs)
    sent, calls, per_block = Counter[str](), Counter[str](), Counter[str]()
    for t in traffic:
        sent.update(t.sent_bytes)
        calls.update(t.calls)
        per_block[t.name] += t.sent_bytes.total()
    return Stats(
        captures=len(captures),
        variants_compiled=len(variants),
        pieces_compiled=sum(
            session.of(VariantCache).num_compiled for session in {c.axis.session for c in captures}
        ),
        steps=sum(c.num_steps for c in captures),
        plan_switches=sum(g.num_switches for g in guards),
        plan_per_length={n: plan for g in guards for n, plan in g.plan_of.items()},
        bytes_per_collective=dict(sent),
        calls_per_collective=dict(calls),
        bytes_per_block=dict(per_block),
    )
