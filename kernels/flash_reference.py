"""Attention between queries and keys of known positions by its definition, in plain PyTorch.

Positions may come in any order. ``dense_attention`` is differentiable and holds all scores: an
oracle for tests. The two functions after it hold a block of rows at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paradyse.kernels.attention_core import stat_dtype, times_keys, times_rows, times_values
from paradyse.kernels.attention_mask import AttentionSpec, dropout_keep

_BLOCK_BYTES = 64 * 2**20
"""Most memory of one block of scores."""


def visible_pairs(q_positions: Tensor, kv_positions: Tensor, spec: AttentionSpec) -> Tensor:
    """[B|1, 1, R, K] bool: which keys each query sees, bias aside."""
    i, j = q_positions[:, None], kv_positions
    visible = ((i < spec.seq_len) & (j < spec.seq_len))[None, None]
    if spec.left is not None:
        visible = visible & (j >= i - spec.left)
    if spec.right is not None:
        visible = visible & (j <= i + spec.right)
    if spec.chunk is not None:
        visible = visible & (i // spec.chunk == j // spec.chunk)
    rows, keys = (x.clamp(max=spec.seq_len - 1) for x in (q_positions, kv_positions))
    if spec.key_padding is not None:
        visible = visible & spec.key_padding[:, None, None, keys]
    if spec.document_ids is not None:
        ids = spec.document_ids
        visible = visible & (ids[:, rows][:, None, :, None] == ids[:, keys][:, None, None])
    return visible


def _scores(
    q: Tensor,
    k: Tensor,
    q_positions: Tensor,
    kv_positions: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scores [B, H, R, K] before the mask, visible pairs, and the slope of the softcap."""
    scores = times_keys(q, k).to(stat_dtype(q.dtype)) * spec.scale
    slope = None
    if spec.softcap is not None:
        capped = torch.tanh(scores / spec.softcap)
        scores, slope = capped * spec.softcap, 1 - capped * capped
    visible = visible_pairs(q_positions, kv_positions, spec)
    bias = spec.head_bias(q.shape[1])
    if bias is not None:
        last = spec.seq_len - 1
        if bias.shape[2] > 1:
            bias = bias[:, :, q_positions.clamp(max=last)]
        if bias.shape[3] > 1:
            bias = bias[..., kv_positions.clamp(max=last)]
        if bias.dtype == torch.bool:
            visible = visible & bias
        else:
            scores = scores + bias
    return scores, visible, slope


def _keep(spec: AttentionSpec, q: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """0 for a dropped pair, 1 / (1 - p) for others."""
    keep = dropout_keep(spec, slice(0, q.shape[0]), q.shape[1], i, j)
    return keep.to(stat_dtype(q.dtype)) / max(1 - spec.dropout_p, 1e-9)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    kv_positions: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, Sq, Dv] and lse [B, H, Sq] (``stat_dtype``) at int positions [Sq] and [Sk];
    shapes of q, k, v as in ``flash_attention``.
    """
    scores, visible, _ = _scores(q, k, q_positions, kv_positions, spec)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    base = torch.where(lse == -torch.inf, 0, lse)[..., None]
    p = torch.where(visible, scores - base, -torch.inf).exp()
    if spec.dropout_p > 0:
        p = p * _keep(spec, q, q_positions, kv_positions)
    return times_values(p.to(q.dtype), v), lse


def _blocks(q: Tensor, k: Tensor) -> list[slice]:
    per_row = q.shape[0] * q.shape[1] * k.shape[2] * stat_dtype(q.dtype).itemsize
    rows = max(1, _BLOCK_BYTES // max(per_row, 1))
    return [slice(a, a + rows) for a in range(0, q.shape[2], rows)]


def _without_padding(x: Tensor, positions: Tensor, spec: AttentionSpec) -> Tensor:
    """Computed in ``stat_dtype``, 0 for tokens past the end, whatever they hold."""
    return x.to(stat_dtype(x.dtype)).masked_fill((positions >= spec.seq_len)[:, None], 0)


def blocked_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    kv_positions: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """``dense_attention``, not differentiable."""
    dtype = q.dtype
    q = _without_padding(q, q_positions, spec)
    k, v = (_without_padding(x, kv_positions, spec) for x in (k, v))
    parts = [
        dense_attention(q[:, :, rows], k, v, q_positions[rows], kv_positions, spec)
        for rows in _blocks(q, k)
    ]
    out, lse = (torch.cat(x, 2) for x in zip(*parts, strict=True))
    return out.to(dtype), lse


def blocked_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_positions: Tensor,
    kv_positions: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv through these keys, in the dtype of q; ``out`` and ``lse`` over all keys."""
    dtype = q.dtype
    q, grad_out, out = (_without_padding(x, q_positions, spec) for x in (q, grad_out, out))
    k, v = (_without_padding(x, kv_positions, spec) for x in (k, v))
    delta = (grad_out * out).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    delta = delta.masked_fill(lse == -torch.inf, 0)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows in _blocks(q, k):
        i, q_i, grad = q_positions[rows], q[:, :, rows], grad_out[:, :, rows]
        scores, visible, slope = _scores(q_i, k, i, kv_positions, spec)
        p = (scores - lse[:, :, rows, None]).masked_fill(~visible, -torch.inf).exp()
        dp = times_keys(grad, v)
        dropped = p
        if spec.dropout_p > 0:
            keep = _keep(spec, q_i, i, kv_positions)
            dropped, dp = p * keep, dp * keep
        ds = p * (dp - delta[:, :, rows, None]) * spec.scale
        if slope is not None:
            ds = ds * slope
        dq[:, :, rows] = times_values(ds, k)
        dk += times_rows(ds, q_i, k.shape[1])
        dv += times_rows(dropped, grad, k.shape[1])
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
