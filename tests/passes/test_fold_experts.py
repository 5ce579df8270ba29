"""Experts that are written out become operators, and give the same."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from expert_graphs import (
    NUM_EXPERTS,
    WIDTH,
    Matmul,
    expert_inputs,
    experts,
    fallback,
    folded,
    pytorch,
)
from pass_graphs import HIDDEN, context, operators, run, trace
from torch import Tensor
from torch.nn import functional as F

from paradyse.passes.fold_experts import fold_experts

IDS = {
    "some": torch.tensor([[0, 3], [3, 1], [4, 3], [1, 0], [0, 4], [4, 1], [3, 0]]),
    "one has all": torch.full((7, 1), 2),
    "one token": torch.tensor([[4, 1]]),
}
"""Experts of tokens; each leaves out at least one."""


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize(
    ("matmul", "dtype", "counted"),
    [(fallback, torch.float64, torch.int32), (pytorch, torch.bfloat16, torch.float32)],
)
def test_the_same_is_computed(
    matmul: Matmul, dtype: torch.dtype, counted: torch.dtype, ids: Tensor
) -> None:
    inputs = expert_inputs(ids, dtype)
    fn = partial(experts, matmul=matmul, counted=counted)
    ctx, gm, count = folded(fn, *inputs)
    assert count == 2 and not ctx.notes
    found = operators(gm)
    assert (found["route_rows"], found["take_rows"], found["grouped_mm"]) == (1, 3, 2)
    gone = ("sort", "histc", "cumsum", "index", "index_put", "floor_divide", "empty_like", "arange")
    assert not any(found[name] for name in gone)
    torch.testing.assert_close(run(gm, *inputs), fn(*inputs))


def test_one_sort_serves_experts_that_share_their_ids() -> None:
    def twice(x: Tensor, ids: Tensor, scores: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y: Tensor = experts(x, ids, scores, up, down)
        return y + experts(x, ids.flip(0), scores, up, down)

    inputs = expert_inputs(IDS["some"])
    _, gm, count = folded(twice, *inputs)
    assert count == 4 and operators(gm)["route_rows"] == 2
    torch.testing.assert_close(run(gm, *inputs), twice(*inputs))


def test_counts_that_are_not_those_of_the_rows_are_refused_by_name() -> None:
    """Bins that are wider than one expert: what a matmul reads then are not the ends of experts."""
    inputs = expert_inputs(IDS["some"])
    fn = partial(experts, most=NUM_EXPERTS + 3)
    ctx, gm = context(), trace(fn, *inputs)
    before = operators(gm)
    assert fold_experts(gm, ctx) == 0
    assert operators(gm) == before
    assert len(ctx.notes) == 2
    assert all("rows of experts stay as they are" in note for note in ctx.notes)


def with_ids_beyond(x: Tensor, ids: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """Experts as transformers 5.17 has them: what is beyond the last expert is filled."""
    k = ids.shape[1]
    in_order, order = torch.sort(ids.reshape(-1))
    counts = torch.histc(in_order.float(), bins=NUM_EXPERTS, min=0, max=NUM_EXPERTS - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    beyond = (in_order >= NUM_EXPERTS).unsqueeze(-1)
    of_rows = bias[in_order.clamp(max=NUM_EXPERTS - 1)]
    rows = x[order // k].masked_fill(beyond, 0.0)
    y = fallback(rows, up.transpose(1, 2), ends).add(of_rows).masked_fill(beyond, 0.0)
    y = fallback(F.silu(y), down.transpose(1, 2), ends).masked_fill(beyond, 0.0)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return y[inverse].view(*ids.shape, -1).sum(1)


def routed(x: Tensor, router: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return with_ids_beyond(x, F.linear(x, router).topk(2, -1)[1], up, down, bias)


def test_ids_of_a_top_k_are_of_experts_that_there_are() -> None:
    x, ids, _, up, down = expert_inputs(IDS["some"])
    bias, router = torch.randn(NUM_EXPERTS, WIDTH), torch.randn(NUM_EXPERTS, HIDDEN)
    _, gm, _ = folded(routed, x, router, up, down, bias)
    found = operators(gm)
    assert not any(found[name] for name in ("ge", "clamp", "masked_fill"))
    torch.testing.assert_close(
        run(gm, x, router, up, down, bias), routed(x, router, up, down, bias)
    )
    wide = torch.randn(NUM_EXPERTS + 3, HIDDEN)  # a router that knows of more
    for fn, given in ((with_ids_beyond, ids), (routed, wide)):
        _, gm, _ = folded(fn, x, given, up, down, bias)
        assert operators(gm)["masked_fill"] == 3
        torch.testing.assert_close(run(gm, x, given, up, down, bias), fn(x, given, up, down, bias))
