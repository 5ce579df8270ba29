"""Attention by its definition, in plain PyTorch: the oracle of the tests.

It is differentiable and holds all scores. Positions may come in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paradyse.kernels.attention_core import stat_dtype, times_keys, times_values
from paradyse.kernels.attention_mask import AttentionSpec, dropout_keep


def visible_pairs(q_positions: Tensor, kv_positions: Tensor, spec: AttentionSpec) -> Tensor:
    """Which keys each query sees, bias aside.

    Args:
        q_positions, kv_positions: int [R] and [K], global.
    Returns:
        bool [B|1, 1, R, K].
    """
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


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    kv_positions: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """``attention.attention_forward`` by its definition.

    Args:
        q, k, v: [B, H, Sq, D], [B, Hk, Sk, D], [B, Hk, Sk, Dv], of one dtype.
        q_positions, kv_positions: int [Sq] and [Sk], global.
    Returns:
        out [B, H, Sq, Dv] and lse [B, H, Sq] (``stat_dtype``).
    """
    scores = times_keys(q, k).to(stat_dtype(q.dtype)) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    visible = visible_pairs(q_positions, kv_positions, spec)
    bias = spec.head_bias(q.shape[1])
    if bias is not None and bias.dim() == 3:
        far = kv_positions - q_positions[:, None]
        scores = scores + bias[:, (far >= 0).long(), far.abs().clamp(max=spec.seq_len - 1)]
    elif bias is not None:
        for dim, positions in ((2, q_positions), (3, kv_positions)):
            if bias.shape[dim] > 1:
                bias = bias.index_select(dim, positions.clamp(max=spec.seq_len - 1))
        if bias.dtype == torch.bool:
            visible = visible & bias
        else:
            scores = scores + bias
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    sinks = spec.head_sinks(q.shape[1])
    if sinks is not None:  # a row that sees no key has no lse, whatever its sink
        column = torch.where(lse > -torch.inf, sinks[:, None], -torch.inf)
        lse = torch.cat([scores, column[..., None]], -1).logsumexp(-1)
    base = torch.where(lse == -torch.inf, 0, lse)[..., None]
    p = torch.where(visible, scores - base, -torch.inf).exp()
    if spec.dropout_p > 0:
        keep = dropout_keep(spec, slice(0, q.shape[0]), q.shape[1], q_positions, kv_positions)
        p = p * (keep.to(p.dtype) / max(1 - spec.dropout_p, 1e-9))
    return times_values(p.to(q.dtype), v), lse
