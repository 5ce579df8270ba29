"""Rows in the order of experts are split where nothing sees that order, and there alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from expert_graphs import Inside, folded, toy, toy_inputs

from paradyse.graph.expert_rules import GROUPED_MM, ROUTE_ROWS, TAKE_ROWS
from paradyse.passes.expert_regions import expert_regions
from paradyse.passes.name_dims import name_dims
from paradyse.passes.place_tokens import place_tokens

SEEN: dict[str, tuple[Inside, str]] = {
    "sums over rows": (lambda rows, x, k: rows + rows.cumsum(0), "aten.cumsum.default mixes rows"),
    "reads rows in their own order": (
        lambda rows, x, k: rows + x.repeat_interleave(k, 0),
        "which is not in the order of experts",
    ),
    "is of no row": (lambda rows, x, k: rows * rows.amax(), "aten.amax.default mixes rows"),
}
"""What may happen between the sort and the way back so that ranks cannot sort for themselves."""


def test_each_rank_sorts_the_rows_of_its_own_tokens() -> None:
    ctx, gm, _ = folded(partial(toy, inside=lambda rows, x, k: rows), *toy_inputs(), weights=6)
    name_dims(gm, ctx)
    place_tokens(gm, ctx)
    assert ctx.seq is not None
    (region,) = expert_regions(gm.graph, ctx.names, ctx.seq)
    assert not region.seen and not ctx.gathered and not ctx.whole_experts
    assert [n.target for n in region.takes] == [TAKE_ROWS] * 2
    assert [n.target for n in region.matmuls] == [GROUPED_MM] * 2
    assert [n.target for n in region.ways_back] == [TAKE_ROWS]
    assert set(ctx.split).issuperset(region.nodes)
    replicated = [n for n in gm.graph.nodes if n.op == "call_function" and n not in ctx.split]
    assert all(n.target is torch.ops.aten.transpose.int for n in replicated)


@pytest.mark.parametrize("why", SEEN)
def test_where_the_order_is_seen_all_is_computed_on_gathered_tokens(why: str) -> None:
    inside, text = SEEN[why]
    ctx, gm, _ = folded(partial(toy, inside=inside), *toy_inputs(), weights=6)
    name_dims(gm, ctx)
    place_tokens(gm, ctx)
    assert ctx.seq is not None
    (region,) = expert_regions(gm.graph, ctx.names, ctx.seq)
    assert text in region.seen
    assert ctx.split.keys().isdisjoint(region.nodes) and ctx.whole_experts.issuperset(region.nodes)
    reasons = [reason for node, reason in ctx.gathered if node.target is ROUTE_ROWS]
    assert reasons == [region.seen]
