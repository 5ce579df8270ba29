"""``paradyse::attention_ring``: every rank keeps its queries while keys and values go round the
ring.

Ring attention (arXiv 2310.01889) with log-sum-exp merging, in the balanced token order (chunks r
and 2p-1-r), so that causal work is equal on all ranks. Used by ``megatron_cz``, and by ``metp`` for
each group of heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis, axis_named
from paradyse.kernels.attention import (
    attention_backward,
    attention_forward,
    bias_gradient,
)
from paradyse.kernels.attention_core import stat_dtype
from paradyse.kernels.attention_mask import AttentionSpec
from paradyse.kernels.attention_op import make_spec, register_gradient, token_major
from paradyse.kernels.merge import merge


def _pack(*tensors: Tensor) -> Tensor:
    """One message instead of several."""
    return torch.cat([t.reshape(-1) for t in tensors])


def _unpack(message: Tensor, *like: Tensor) -> list[Tensor]:
    parts = message.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like)]


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, axis: Axis, block_id: int
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries [B, H, s, D] to the keys of all ranks: out [B, H, s, Dv],
    lse [B, H, s].
    """
    layout, p = axis.layout(spec.seq_len), axis.size
    own = layout.runs(axis.rank)
    out: Tensor | None = None
    lse: Tensor | None = None
    message = _pack(k, v) if p > 1 else None
    for step in range(p):
        pending = None
        if message is not None and step + 1 < p:
            pending = collectives.ring_exchange([message], axis, block_id)
        part = attention_forward(q, k, v, own, layout.runs((axis.rank - step) % p), spec)
        if out is None or lse is None:
            out, lse = part
        else:
            out, lse = merge(out, lse, *part, dtype=q.dtype if step == p - 1 else None)
        if pending is not None:
            (message,) = pending.wait()
            k, v = _unpack(message, k, v)
    assert out is not None and lse is not None
    return out, lse


def ring_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    axis: Axis,
    block_id: int,
    bias_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k, v, and of the bias (whole, on every rank; no elements unless
    asked for).

    Keys and values go round once more. Their gradients follow one hop behind, each rank adding its
    share, and take one more hop home. They are summed in ``stat_dtype``.
    """
    layout, p, exact = axis.layout(spec.seq_len), axis.size, stat_dtype(q.dtype)
    own = layout.runs(axis.rank)
    k_own, v_own = k, v
    total_q: Tensor | None = None
    d_bias: Tensor | None = None
    gradients_under_way: collectives.Pending | None = None
    message = _pack(k, v) if p > 1 else None
    for step in range(p):
        pending = None
        if message is not None and step + 1 < p:
            pending = collectives.ring_exchange([message], axis, block_id)
        runs = layout.runs((axis.rank - step) % p)
        saved = (grad_out, q, k, v, out, lse, own, runs, spec)
        dq, dk, dv = attention_backward(*saved)
        if p == 1:
            return dq, dk, dv, bias_gradient(*saved) if bias_grad else q.new_empty(0)
        if bias_grad:
            d_bias_i = bias_gradient(*saved)
            d_bias = d_bias_i if d_bias is None else d_bias + d_bias_i
        total_q = dq.to(exact) if total_q is None else total_q.add_(dq)
        grads = _pack(dk.to(exact), dv.to(exact))
        if gradients_under_way is not None:
            grads += gradients_under_way.wait()[0]
        gradients_under_way = collectives.ring_exchange([grads], axis, block_id)
        if pending is not None:
            (message,) = pending.wait()
            k, v = _unpack(message, k, v)
    assert gradients_under_way is not None and total_q is not None
    dk, dv = _unpack(gradients_under_way.wait()[0], k_own, v_own)
    d_bias = (
        collectives.all_reduce(d_bias, axis, block_id) if d_bias is not None else q.new_empty(0)
    )
    return total_q.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_bias


@torch.library.custom_op("paradyse::attention_ring", mutates_args=())
def attention_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    info: Tensor,
    key_padding: Tensor | None,
    document_ids: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    left: int,
    right: int,
    chunk: int,
    scale: float,
    softcap: float,
    dropout_p: float,
    axis: str,
    head_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``paradyse::attention`` where each rank holds some tokens.

    Args:
        q, k, v: this rank's tokens, [B, H, s, D], [B, Hk, s, D], [B, Hk, s, Dv], in the order of
            ``TokenLayout.runs``.
        info: int64 [2] on the CPU: the sequence's length S, the block id.
        key_padding, document_ids, bias: of the whole sequence, equal on all ranks. A learned bias
            gets its whole gradient on every rank.
        axis: the name for ``axis_named``.
    Returns:
        this rank's out [B, H, s, Dv] and lse [B, H, s]; rows of padding tokens are 0.
    Raises:
        CollectiveError: another rank did not take part.
    """
    spec = make_spec(
        int(info[0]),
        key_padding,
        document_ids,
        bias,
        seed,
        left,
        right,
        chunk,
        scale,
        softcap,
        dropout_p,
        head_ids,
    )
    out, lse = ring_forward(q, k, v, spec, axis_named(axis), int(info[1]))
    return token_major(out), lse.contiguous()


@torch.library.custom_op("paradyse::attention_ring_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    info: Tensor,
    key_padding: Tensor | None,
    document_ids: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    left: int,
    right: int,
    chunk: int,
    scale: float,
    softcap: float,
    dropout_p: float,
    axis: str,
    head_ids: Tensor | None,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spec = make_spec(
        int(info[0]),
        key_padding,
        document_ids,
        bias,
        seed,
        left,
        right,
        chunk,
        scale,
        softcap,
        dropout_p,
        head_ids,
    )
    dq, dk, dv, d_bias = ring_backward(
        grad_out, q, k, v, out, lse, spec, axis_named(axis), int(info[1]), bias_grad
    )
    return token_major(dq), token_major(dk), token_major(dv), d_bias


register_gradient(attention_ring, _backward)
