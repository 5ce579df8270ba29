"""``paradyse::attention``: exact attention of a whole sequence on one rank, as an operator.

Also what it shares with the operator over ranks of ``paradyse.strategies.attention``: arguments,
spec, layout, gradient. The arguments of both, for S tokens:

- ``key_padding``: [B|1, S] bool, True where a key may be seen. ``document_ids``: [B|1, S] int.
- ``bias``: [B|1, H|1, S|1, S|1], bool (True = visible) or float (added to the scores;
  differentiable); or by distance, float, [H|1, 2, S]: see ``AttentionSpec``.
- ``seed``: int64 [], needed with ``dropout_p`` > 0.
- ``left``, ``right``, ``chunk``: see ``paradyse.types.MaskSpec``; -1 for unset.
- ``scale``, ``softcap``: see ``AttentionSpec``; 0 for no softcap.
- ``head_ids``: int64 [H], the global indices of the query heads, where they are not all heads.
- ``info``: int64 [2] on the CPU, (S, block id); tokens past S <= N are padding. None: S = N.
  Where keys are of another sequence than queries, [3]: (length of the queries', block id, S).
- ``sinks``: [H], one more score of each row (differentiable): see ``AttentionSpec``.
- ``sequence_ids``: int64 [B], the global indices of the sequences for dropout, where they are not
  all sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paradyse.kernels.attention import attention_backward, attention_forward, bias_gradient
from paradyse.kernels.attention_core import Backward, empty_like_heads, empty_lse
from paradyse.kernels.attention_mask import AttentionSpec, Runs
from paradyse.kernels.sinks import sink_gradient, with_sinks
from paradyse.torch_private import overload_of, schema_of, tree_leaves

Grads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""dq, dk, dv, and the gradients of the bias (of no elements when it was not asked for) and of the
sinks (of no elements where there are none)."""


ARGUMENTS = (
    "Tensor? key_padding, Tensor? document_ids, Tensor? bias, Tensor? seed, SymInt left, "
    "SymInt right, SymInt chunk, float scale, float softcap, float dropout_p, "
    "Tensor? head_ids=None, Tensor? info=None, Tensor? sinks=None, "
    "Tensor? sequence_ids=None"
)
"""Of every attention operator after q, k and v, as ``paradyse::attention`` states them."""

INFO_AT = [a.split()[1].partition("=")[0] for a in ARGUMENTS.split(", ")].index("info")
"""The place of ``info`` among ``ARGUMENTS``."""

BACKWARD = (
    "Tensor grad_out, Tensor[] saved, SymInt num_kv_heads, SymInt num_keys, SymInt key_width, "
    "bool bias_grad"
)
"""Of every backward operator before its own and ``ARGUMENTS``."""

_GRADIENTS: dict[Any, tuple[Callable[..., None], Callable[..., tuple[Any, ...]]]] = {}
"""Operator -> what notes for its gradient what that needs, and the gradient."""


def make_spec(
    num_tokens: tuple[int, int],
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
    head_ids: Tensor | None = None,
    info: Tensor | None = None,
    sinks: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> AttentionSpec:
    """``ARGUMENTS`` as a spec.

    Args:
        num_tokens: of queries and of keys, where there is no ``info``.
    Raises:
        ValueError: a mask that does not fit the sequence.
    """
    num_queries, seq_len = num_tokens
    if info is not None:
        num_queries, seq_len = int(info[0]), int(info[2 * (len(info) > 2)])
    across = num_queries != seq_len
    if across and (max(left, right, chunk) >= 0 or document_ids is not None):
        raise ValueError(
            f"{num_queries} queries of one sequence see {seq_len} keys of another: there is no "
            "window, chunk or document for them"
        )
    for name, x in (("key_padding", key_padding), ("document_ids", document_ids)):
        if x is not None and x.shape[1] != seq_len:
            raise ValueError(f"{name} is {list(x.shape)}, but the sequence has {seq_len} tokens")
    if bias is not None and not _fits(bias, num_queries, seq_len):
        tokens = f"{num_queries} queries and {seq_len} keys" if across else f"{seq_len} tokens"
        raise ValueError(
            f"bias is {list(bias.shape)} of {bias.dtype}; for {tokens} give "
            "[B|1, H|1, S|1, S|1], or numbers [H|1, 2, S]"
        )
    if sinks is not None and sinks.dim() != 1:
        raise ValueError(f"sinks are {list(sinks.shape)}; give [H]")
    return AttentionSpec(
        seq_len=seq_len,
        scale=scale,
        left=None if left < 0 else left,
        right=None if right < 0 else right,
        chunk=None if chunk < 0 else chunk,
        key_padding=key_padding,
        document_ids=document_ids,
        bias=bias,
        softcap=softcap if softcap > 0 else None,
        dropout_p=dropout_p,
        seed=seed,
        head_ids=head_ids,
        sinks=sinks,
        sequence_ids=sequence_ids,
        query_len=num_queries if across else None,
    )


def _fits(bias: Tensor, num_queries: int, num_keys: int) -> bool:
    if bias.dim() == 3:
        of_one = num_queries == num_keys
        return of_one and bias.is_floating_point() and bias.shape[1:] == (2, num_keys)
    wanted = zip(bias.shape[2:], (num_queries, num_keys), strict=False)
    return bias.dim() == 4 and all(n in (1, m) for n, m in wanted)


def token_major(x: Tensor) -> Tensor:
    """``x`` [B, H, S, D] laid out as [B, S, H, D], in memory of its own: how operators return
    tensors.
    """
    y = x.transpose(1, 2)
    alone = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return (
        x
        if alone and y.is_contiguous()
        else y.clone(memory_format=torch.contiguous_format).transpose(1, 2)
    )


def register_gradient(forward: Any, backward: Any, saved: Callable[..., Sequence[Tensor]]) -> None:
    """Make ``backward`` the gradient of ``forward``, both custom ops.

    Args:
        forward: ``op(q, k, v, *rest) -> (out, others)``, ``rest`` ending in ``ARGUMENTS``. Only
            ``out`` is differentiable.
        backward: ``op`` of ``BACKWARD`` and ``rest``, which gives ``Grads``.
        saved: ``(inputs, outputs)`` -> the tensors that backward needs besides ``rest``.
    """
    names = [a.name for a in schema_of(forward).arguments]
    bias_at, sinks_at = names.index("bias"), names.index("sinks")

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        q, k, _, *rest = inputs
        kept, bias = saved(inputs, output), inputs[bias_at]
        ctx.sizes = (*k.shape[1:3], q.shape[3], bias is not None and bias.requires_grad)
        ctx.is_tensor = [isinstance(x, Tensor) for x in rest]
        ctx.others = [None if isinstance(x, Tensor) else x for x in rest]
        ctx.num_kept = len(kept)
        ctx.save_for_backward(*kept, *(x for x in rest if isinstance(x, Tensor)))
        ctx.mark_non_differentiable(*tree_leaves(output[1:]))
        ctx.set_materialize_grads(False)

    def gradient(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Any, ...]:
        grads: list[Any] = [None] * len(names)
        if grad_out is None:
            return tuple(grads[: len(ctx.needs_input_grad)])
        tensors = list(ctx.saved_tensors)
        kept, given = tensors[: ctx.num_kept], iter(tensors[ctx.num_kept :])
        rest = [next(given) if t else x for t, x in zip(ctx.is_tensor, ctx.others, strict=True)]
        *grads[:3], d_bias, d_sinks = backward(grad_out, kept, *ctx.sizes, *rest)
        grads[bias_at] = d_bias if ctx.sizes[-1] else None
        grads[sinks_at] = d_sinks if d_sinks.numel() else None
        # with lists among its tensors an operator wants none for arguments that were left out
        return tuple(grads[: len(ctx.needs_input_grad)])

    def fake(
        grad_out: Tensor,
        saved: Sequence[Tensor],
        num_kv_heads: int,
        num_keys: int,
        key_width: int,
        bias_grad: bool,
        *rest: Any,
    ) -> Grads:
        b, _, _, width = grad_out.shape
        dk, dv = (
            grad_out.new_empty((b, num_keys, num_kv_heads, w)).transpose(1, 2)
            for w in (key_width, width)
        )
        bias = rest[bias_at - 3]
        d_bias = bias.new_empty(bias.shape) if bias_grad else grad_out.new_empty(0)
        sinks = rest[sinks_at - 3] if sinks_at - 3 < len(rest) else None
        d_sinks = grad_out.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
        return empty_like_heads(grad_out, key_width), dk, dv, d_bias, d_sinks

    backward.register_fake(fake)
    forward.register_autograd(gradient, setup_context=setup_context)
    _GRADIENTS[overload_of(forward)] = setup_context, gradient


class _Replayed(torch.autograd.Function):
    """The output of an operator that has run; its gradient is the operator's."""

    @staticmethod
    def forward(ctx: Any, op: Any, results: Sequence[Tensor], *inputs: Any) -> Tensor:
        out = results[0].view_as(results[0])
        ctx.op, (setup_context, _) = op, _GRADIENTS[op]
        setup_context(ctx, inputs, (out, *results[1:]))
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None) -> Any:
        _, gradient = _GRADIENTS[ctx.op]
        return None, None, *gradient(ctx, grad_out)


def replayed(op: Any, results: Sequence[Tensor], *inputs: Any) -> tuple[Tensor, ...]:
    """``op(*inputs)`` where its ``results`` are known: nothing is computed but gradients.

    Args:
        op: an ``OpOverload`` with a gradient of ``register_gradient``.
        results: the tensors that it gave.
        inputs: what it was given.
    """
    return (_Replayed.apply(op, results, *inputs), *results[1:])


def _whole(q: Tensor, k: Tensor, rest: Sequence[Any]) -> tuple[tuple[Runs, Runs], AttentionSpec]:
    """Positions of queries and keys that are whole, and the spec of ``ARGUMENTS``."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    runs = ((0, num_queries),), ((0, num_keys),)
    return runs, make_spec((num_queries, num_keys), *rest)


@torch.library.custom_op(
    "paradyse::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {ARGUMENTS}) -> (Tensor, Tensor)",
)
def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Attention over the whole sequence in its natural order, or of one to another.

    Args:
        q: [B, H, N, D].
        k, v: [B, Hk, N, D] and [B, Hk, N, Dv]; H is a multiple of Hk. Keys of another sequence may
            be more or fewer.
    Returns:
        out [B, H, N, Dv], laid out as [B, N, H, Dv], and lse [B, H, N], float32 (float64 for
        float64), not differentiable. A row that sees nothing has out 0, lse -inf and gradient 0.
    Raises:
        ValueError: heads that do not divide, a mask that does not fit, dropout without a seed.
    """
    runs, spec = _whole(q, k, rest)
    out, lse = with_sinks(*attention_forward(q, k, v, *runs, spec), spec)
    return token_major(out), lse.contiguous()


@torch.library.custom_op(
    "paradyse::attention_backward",
    mutates_args=(),
    schema=f"({BACKWARD}, {ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    grad_out: Tensor,
    saved: Sequence[Tensor],
    kv: int,
    num_keys: int,
    width: int,
    bias_grad: bool,
    *rest: Any,
) -> Grads:
    given = Backward(grad_out, *saved)
    runs, spec = _whole(given.q, given.k, rest)
    args = (given, *runs, spec)
    dq, dk, dv = attention_backward(*args)
    d_bias = bias_gradient(*args) if bias_grad else grad_out.new_empty(0)
    d_sinks = grad_out.new_empty(0)
    if spec.sinks is not None:
        d_sinks = sink_gradient(grad_out, given.out, given.lse, spec)
    return token_major(dq), token_major(dk), token_major(dv), d_bias, d_sinks


@attention.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_like_heads(q, v.shape[-1]), empty_lse(q)


register_gradient(attention, _backward, lambda inputs, outputs: [*inputs[:3], *outputs])
