"""Ring: every rank keeps its queries while keys and values go round.

Ring attention (arXiv 2310.01889) with log-sum-exp merging, in the balanced token order (chunks r
and 2p-1-r), so that causal work is equal on all ranks. Used by ``megatron_cz``, and by ``metp`` for
each group of heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paradyse.distributed import collectives
from paradyse.kernels.attention import (
    attention_backward,
    attention_forward,
    bias_gradient,
)
from paradyse.kernels.attention_core import Backward, stat_dtype
from paradyse.kernels.merge import merge
from paradyse.kernels.sinks import sink_gradient, with_sinks
from paradyse.strategies.attention.method import Context
from paradyse.weights.shard_comm import flatten, unflatten


def forward(q: Tensor, k: Tensor, v: Tensor, at: Context) -> tuple[Tensor, list[Tensor]]:
    """``Method.forward``: attention of this rank's queries to the keys of all ranks.

    Args:
        q: [B, H, s, D], this rank's tokens.
        k, v: [B, Hk, s, D] and [B, Hk, s, Dv]; s is that of the keys' sequence.
        at: the call.
    Returns:
        out [B, H, s, Dv] in q's dtype, [lse [B, H, s] in ``stat_dtype``].
    """
    axis, spec = at.axis, at.spec
    (rows, layout), p = at.layouts, axis.size
    own = rows.runs(axis.rank)
    out: Tensor | None = None
    lse: Tensor | None = None
    message, shapes = flatten([k, v]), [k.shape, v.shape]
    for step in range(p):
        pending = collectives.ring_exchange(message, axis, at.block_id) if step + 1 < p else None
        part = attention_forward(q, k, v, own, layout.runs((axis.rank - step) % p), spec)
        if out is None or lse is None:
            out, lse = part
        else:
            out, lse = merge(out, lse, *part, dtype=q.dtype if step == p - 1 else None)
        if pending is not None:
            message = pending.wait()
            k, v = unflatten(message, shapes)
    assert out is not None and lse is not None
    out, lse = with_sinks(out, lse, spec)
    return out, [lse.contiguous()]


def backward(
    grad_out: Tensor, saved: Sequence[Tensor], at: Context, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """``Method.backward``.

    Keys and values go round once more. Their gradients follow one hop behind, each rank adding its
    share; the last hop brings them home, where that rank's own share is. They are summed in
    ``stat_dtype``.

    Args:
        grad_out: [B, H, s, Dv].
        saved: q, k, v, out and lse of ``forward``.
        at: the call.
        bias_grad: whether the bias needs a gradient.
    Returns:
        dq, dk, dv in the dtypes of q, k, v, and this rank's shares of the gradients of bias and
        sinks, or None.
    """
    q, k, v, out, lse = saved
    axis, spec = at.axis, at.spec
    (rows, layout), p, exact = at.layouts, axis.size, stat_dtype(q.dtype)
    own = rows.runs(axis.rank)
    total_q: Tensor | None = None
    d_bias: Tensor | None = None
    d_sinks = sink_gradient(grad_out, out, lse, spec) if spec.sinks is not None else None
    gradients_under_way: collectives.Pending | None = None
    message, shapes, kept = flatten([k, v]), [k.shape, v.shape], q.new_empty(0)
    for step in range(p):
        pending = collectives.ring_exchange(message, axis, at.block_id) if step + 1 < p else None
        runs = layout.runs((axis.rank - step) % p)
        part = (Backward(grad_out, q, k, v, out, lse), own, runs, spec)
        dq, dk, dv = attention_backward(*part)
        if bias_grad:
            d_bias_i = bias_gradient(*part)
            d_bias = d_bias_i if d_bias is None else d_bias + d_bias_i
        if p == 1:
            return dq, dk, dv, d_bias, d_sinks
        total_q = dq.to(exact) if total_q is None else total_q.add_(dq)
        grads = flatten([dk.to(exact), dv.to(exact)])
        if step == 0:
            kept = grads  # this rank's keys and values: the others' shares come home to it
        else:
            if gradients_under_way is not None:
                grads += gradients_under_way.wait()
            gradients_under_way = collectives.ring_exchange(grads, axis, at.block_id)
        if pending is not None:
            message = pending.wait()
            k, v = unflatten(message, shapes)
    assert gradients_under_way is not None and total_q is not None
    dk, dv = unflatten(kept.add_(gradients_under_way.wait()), shapes)
    return total_q.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_bias, d_sinks
