"""Toy graphs with experts for tests of passes, written as transformers does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  registers its matmul
from pass_graphs import HIDDEN, VOCABULARY, attend, context, trace
from torch import Tensor, fx
from torch.nn import functional as F

from paradyse.passes.fold_experts import fold_experts
from paradyse.passes.pipeline import CaptureContext
from paradyse.passes.remove_mutation import remove_mutation

NUM_EXPERTS, WIDTH, TOP = 5, 16, 2

Matmul = Callable[[Tensor, Tensor, Tensor], Tensor]
Inside = Callable[[Tensor, Tensor, int], Tensor]
"""What happens to rows in the order of experts: (rows, tokens, experts of each token) -> rows."""


def fallback(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """The matmul that transformers has traced for all dtypes but bfloat16."""
    out: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weights, offs=ends)
    return out


def pytorch(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """PyTorch's own."""
    return F.grouped_mm(rows, weights, offs=ends)


def experts(
    x: Tensor,
    ids: Tensor,
    scores: Tensor,
    up: Tensor,
    down: Tensor,
    matmul: Matmul = fallback,
    inside: Inside = lambda rows, x, k: rows,
    most: int = NUM_EXPERTS - 1,
    counted: torch.dtype = torch.float32,
) -> Tensor:
    """``x`` [T, h], each token through the experts ``ids`` [T, k] with the weights ``scores``.

    Args:
        most: the largest id that is counted.
        counted: what the counts are cast to.
    """
    k = ids.shape[1]
    in_order, order = torch.sort(ids.reshape(-1))
    counts = torch.histc(in_order.float(), bins=NUM_EXPERTS, min=0, max=most)
    ends = torch.cumsum(counts.to(counted), 0, dtype=torch.int32)
    rows = inside(x[order // k], x, k)
    y = matmul(F.silu(matmul(rows, up.transpose(1, 2), ends)), down.transpose(1, 2), ends)
    y = y * scores.reshape(-1)[order][:, None]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return y[inverse].view(*ids.shape, -1).sum(1)


def expert_inputs(ids: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Of ``experts``, for ``ids`` [T, k]."""
    tokens, up, down = (
        torch.randn(n, dtype=dtype)
        for n in ((len(ids), HIDDEN), (NUM_EXPERTS, WIDTH, HIDDEN), (NUM_EXPERTS, HIDDEN, WIDTH))
    )
    return [tokens, ids, torch.rand(ids.shape).to(dtype), up, down]


def toy_inputs(batch: int = 2, length: int = 5) -> list[Tensor]:
    """Ids [B, S], weights of the embedding, attention, the router and the experts."""
    ids = torch.randint(VOCABULARY, (batch, length))
    shapes = (VOCABULARY, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (NUM_EXPERTS, HIDDEN)
    return [ids, *(torch.randn(n) for n in shapes), *expert_inputs(ids)[3:]]


def toy(
    ids: Tensor,
    embed: Tensor,
    qkv: Tensor,
    proj: Tensor,
    router: Tensor,
    up: Tensor,
    down: Tensor,
    inside: Inside,
) -> Tensor:
    """Attention, a router, and its experts."""
    x = F.embedding(ids, embed)
    q = F.linear(x, qkv)[:, None]
    x = x + F.linear(attend(q, q, q)[:, 0], proj)
    flat = x.flatten(0, 1)
    scores, chosen = F.linear(flat, router).softmax(-1).topk(TOP, -1)
    return x + experts(flat, chosen, scores, up, down, inside=inside).view(x.shape)


def folded(
    fn: Callable[..., Any], *inputs: Tensor, weights: int = 0
) -> tuple[CaptureContext, fx.GraphModule, int]:
    """Context and graph of ``fn`` behind the pass, and how many matmuls it found."""
    ctx, gm = context(), trace(fn, *inputs, weights=weights)
    remove_mutation(gm, ctx)
    return ctx, gm, fold_experts(gm, ctx)
