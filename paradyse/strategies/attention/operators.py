"""``paradyse::attention_across_ranks``: one operator, whose method is an argument.

To add a method write its forward and backward in a file of its own and add one line to ``METHODS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed.axis import Axis, axis_named
from paradyse.graph.attention_call import Apply, AttentionCall, apply_operator
from paradyse.kernels.attention_core import empty_like_heads
from paradyse.kernels.attention_op import (
    ARGUMENTS,
    BACKWARD,
    INFO_AT,
    Grads,
    make_spec,
    register_gradient,
    token_major,
)
from paradyse.strategies.attention import colossal, ring, ulysses
from paradyse.strategies.attention.method import Context, Method
from paradyse.torch_private import tree_leaves

METHODS = {
    "ring": Method(ring.forward, ring.backward, steps_alike=True),
    "ulysses": Method(ulysses.forward, ulysses.backward, False, ulysses.fake_kept),
    "colossal": Method(colossal.forward, ring.backward, steps_alike=True),
}


def _context(num_kv_heads: int, key_width: int, axis: str, rest: Sequence[Any]) -> Context:
    """Of ``ARGUMENTS``."""
    spec, block_id = make_spec((0, 0), *rest), int(rest[INFO_AT][1])
    across = _is_across(rest)
    return Context(spec, axis_named(axis), block_id, num_kv_heads, key_width, across)


def _is_across(rest: Sequence[Any]) -> bool:
    """Whether ``info`` says that keys are of another sequence."""
    return len(rest[INFO_AT]) > 2


@torch.library.custom_op(
    "paradyse::attention_across_ranks",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, str method, str axis, {ARGUMENTS}) "
    "-> (Tensor, Tensor[])",
)
def attention_across_ranks(
    q: Tensor, k: Tensor, v: Tensor, method: str, axis: str, *rest: Any
) -> tuple[Tensor, list[Tensor]]:
    """``paradyse::attention`` where each rank holds some tokens.

    Args:
        q, k, v: this rank's tokens, [B, H, s, D], [B, Hk, s, D], [B, Hk, s, Dv], in the order of
            ``TokenLayout.runs``. Keys of another sequence lie as that does.
        method: a key of ``METHODS``.
        axis: the name for ``axis_named``.
        rest: ``ARGUMENTS``. Masks and bias are of the whole sequence, equal on all ranks; a learned
            bias and sinks get the rank's share of their gradient. info, int64 [2] on the CPU, is
            required: the sequence's length S, the block id; and of another, the number of keys.
    Returns:
        this rank's out [B, H, s, Dv], and what the method's backward needs besides. Rows of padding
        tokens are those of the rank's last values, as if they attended to one token: rows of 0 have
        no gradient in a norm without an epsilon.
    Raises:
        CollectiveError: another rank did not take part.
        ValueError: a mask that does not fit the sequence.
    """
    context = _context(k.shape[1], q.shape[3], axis, rest)
    out, kept = METHODS[method].forward(q, k, v, context)
    num_past = _rows_past_the_end(context)
    if num_past:
        last = v[:, :, -1:].repeat_interleave(out.shape[1] // v.shape[1], 1)
        out[:, :, -num_past:] = last
    return token_major(out), kept


def _rows_past_the_end(context: Context) -> int:
    """How many of the rank's queries are padding, which lies at the end."""
    layout, num_queries = context.layouts[0], context.spec.num_queries
    runs = layout.runs(context.axis.rank)
    return sum(n - max(0, min(n, num_queries - start)) for start, n in runs)


@torch.library.custom_op(
    "paradyse::attention_across_ranks_backward",
    mutates_args=(),
    schema=f"({BACKWARD}, str method, str axis, {ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def attention_across_ranks_backward(
    grad_out: Tensor,
    saved: Sequence[Tensor],
    num_kv_heads: int,
    num_keys: int,
    key_width: int,
    bias_grad: bool,
    method: str,
    axis: str,
    *rest: Any,
) -> Grads:
    """Gradients through ``attention_across_ranks``.

    Args:
        grad_out: [B, H, s, Dv], of this rank's out.
        saved: what the method's backward needs.
        num_kv_heads, num_keys, key_width: Hk, of this rank, and D.
        bias_grad: whether the bias needs a gradient.
        method, axis, rest: as of ``attention_across_ranks``.
    Returns:
        gradients of this rank's q, k, v, and this rank's shares of those of the bias, of no
        elements unless asked for, and of the sinks, of no elements where there are none.
    """
    at = _context(num_kv_heads, key_width, axis, rest)
    dq, dk, dv, d_bias, d_sinks = METHODS[method].backward(grad_out, saved, at, bias_grad)
    if d_bias is None:
        d_bias = grad_out.new_empty(0)
        if bias_grad:
            assert at.spec.bias is not None
            d_bias = torch.zeros_like(at.spec.bias)
    if d_sinks is None:
        sinks = at.spec.sinks
        d_sinks = grad_out.new_empty(0) if sinks is None else torch.zeros_like(sinks)
    return token_major(dq), token_major(dk), token_major(dv), d_bias, d_sinks


@attention_across_ranks.register_fake
def _fake(
    q: Tensor, k: Tensor, v: Tensor, method: str, axis: str, *rest: Any
) -> tuple[Tensor, list[Tensor]]:
    out = empty_like_heads(q, v.shape[-1])
    return out, METHODS[method].fake_kept(q, k, v, axis_named(axis), _is_across(rest))


def _saved(inputs: tuple[Any, ...], outputs: Sequence[Any]) -> list[Tensor]:
    q, k, v, method, *_ = inputs
    out, *kept = tree_leaves(outputs)
    return [q, k, v, out, *kept] if METHODS[method].keeps_inputs else kept


register_gradient(attention_across_ranks, attention_across_ranks_backward, _saved)


def attend_across_ranks(
    call: AttentionCall, method: str, axis: Axis, apply: Apply = apply_operator
) -> Any:
    """Results of ``paradyse::attention_across_ranks`` for ``call``, which has its ``info``, by
    ``method`` over the ranks of ``axis``; ``apply`` calls the operator.
    """
    op = torch.ops.paradyse.attention_across_ranks.default
    return apply(op, *call.qkv, method, axis.name, *call.rest)


def backward_across_ranks(
    grad_out: Tensor,
    out: Tensor,
    kept: list[Tensor],
    call: AttentionCall,
    method: str,
    axis: Axis,
    bias_grad: bool,
) -> Grads:
    """Gradients through ``attend_across_ranks``, whose results were ``out`` and ``kept``, for an
    autograd function that recomputes q, k and v.

    Args:
        grad_out: [B, H, s, Dv].
        call, method, axis: as they were given there.
        bias_grad: whether the bias needs a gradient.
    """
    op = torch.ops.paradyse.attention_across_ranks_backward
    saved = _saved((*call.qkv, method), (out, kept))
    sizes = (*call.k.shape[1:3], call.q.shape[3])
    grads: Grads = op(grad_out, saved, *sizes, bias_grad, method, axis.name, *call.rest)
    return grads
