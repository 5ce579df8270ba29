"""``paradyse::attention``: exact attention of a whole sequence on one rank, as an operator.

Also the shell that the operators of ``paradyse.strategies`` share: spec, layout, fake, gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paradyse.kernels.attention import attention_backward, attention_forward, bias_gradient
from paradyse.kernels.attention_core import stat_dtype
from paradyse.kernels.attention_mask import AttentionSpec, Runs
from paradyse.torch_private import schema_of

Grads = tuple[Tensor, Tensor, Tensor, Tensor]
"""dq, dk, dv, and the bias's gradient (of no elements when it was not asked for)."""


def make_spec(
    seq_len: int,
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
    head_ids: Tensor | None,
) -> AttentionSpec:
    """The operators' arguments, where -1 (0 for softcap) stands for unset, as a spec.

    Raises:
        ValueError: a mask that does not fit the sequence.
    """
    for name, x in (("key_padding", key_padding), ("document_ids", document_ids)):
        if x is not None and x.shape[1] != seq_len:
            raise ValueError(f"{name} is {list(x.shape)}, but the sequence has {seq_len} tokens")
    if bias is not None and (bias.dim() != 4 or any(n not in (1, seq_len) for n in bias.shape[2:])):
        raise ValueError(
            f"bias is {list(bias.shape)}; for {seq_len} tokens give [B|1, H|1, S|1, S|1]"
        )
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
    )


def token_major(x: Tensor) -> Tensor:
    """[B, H, S, D] laid out as [B, S, H, D], in memory of its own: how operators return tensors."""
    y = x.transpose(1, 2)
    alone = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return (
        x
        if alone and y.is_contiguous()
        else y.clone(memory_format=torch.contiguous_format).transpose(1, 2)
    )


def empty_like_heads(x: Tensor, width: int | None = None) -> Tensor:
    """An empty ``token_major`` tensor of ``x``'s shape, its last dim replaced by ``width``."""
    b, h, s, d = x.shape
    return x.new_empty((b, s, h, d if width is None else width)).transpose(1, 2)


def fake_forward(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    return empty_like_heads(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=stat_dtype(q.dtype))


def fake_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Grads:
    *_, d_bias = rest
    return empty_like_heads(q), empty_like_heads(k), empty_like_heads(v), d_bias


def _keep_all(q: Tensor, k: Tensor, v: Tensor, outputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return q, k, v, *outputs


def register_gradient(
    forward: Any,
    backward: Any,
    fake_forward: Any = fake_forward,
    fake_backward: Any = fake_backward,
    keep: Any = _keep_all,
) -> None:
    """Make ``backward`` the gradient of ``forward``, both custom ops.

    Args:
        forward: ``op(q, k, v, *rest) -> (out, ...)``; only ``out`` is differentiable.
        backward: ``op(grad_out, *kept, *rest, bias_grad) -> Grads``.
        fake_backward: has an empty gradient of the bias in place of ``bias_grad``.
        keep: ``(q, k, v, outputs) -> kept``, the tensors and numbers that backward needs.
    """
    bias_at = [a.name for a in schema_of(forward).arguments].index("bias") - 3

    def fake(grad_out: Tensor, *args: Any) -> Grads:
        *args_, bias_grad = args
        bias = args_[bias_at - num_rest]
        d_bias = (
            torch.empty_like(bias, memory_format=torch.contiguous_format)
            if bias_grad
            else grad_out.new_empty(0)
        )
        return fake_backward(grad_out, *args_, d_bias)

    num_rest = len(schema_of(forward).arguments) - 3

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        q, k, v, *rest = inputs
        ctx.bias_grad = rest[bias_at] is not None and rest[bias_at].requires_grad
        args = (*keep(q, k, v, output), *rest)
        ctx.is_tensor = [isinstance(x, Tensor) for x in args]
        ctx.others = [None if isinstance(x, Tensor) else x for x in args]
        ctx.save_for_backward(*(x for x in args if isinstance(x, Tensor)))
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    def gradient(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Any, ...]:
        none: list[Any] = [None] * num_rest
        if grad_out is None:
            return (None, None, None, *none)
        tensors = iter(ctx.saved_tensors)
        args = [next(tensors) if t else x for t, x in zip(ctx.is_tensor, ctx.others, strict=True)]
        dq, dk, dv, d_bias = backward(grad_out, *args, ctx.bias_grad)
        none[bias_at] = d_bias if ctx.bias_grad else None
        return (dq, dk, dv, *none)

    forward.register_fake(fake_forward)
    backward.register_fake(fake)
    forward.register_autograd(gradient, setup_context=setup_context)


def _one_rank(q: Tensor, info: Tensor | None) -> tuple[int, Runs]:
    n = q.shape[2]
    return (n if info is None else int(info[0])), ((0, n),)


@torch.library.custom_op("paradyse::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
) -> tuple[Tensor, Tensor]:
    """Attention over the whole sequence in its natural order.

    Args:
        q: [B, H, N, D]. k: [B, Hk, N, D]. v: [B, Hk, N, Dv]; H is a multiple of Hk.
        key_padding: [B|1, S] bool, True where a key may be seen. document_ids: [B|1, S] int.
        bias: [B|1, H|1, S|1, S|1], bool (True = visible) or float (added to the scores;
            differentiable).
        seed: int64 [], needed with dropout.
        left, right, chunk: see ``paradyse.types.MaskSpec``; -1 for unset.
        softcap: see ``AttentionSpec``; 0 for unset.
        head_ids: int64 [H], the global indices of the query heads, where they are a part of all
            heads.
        info: int64 [2] on the CPU, (S, block id); tokens past S <= N are padding. None: S = N.
    Returns:
        out [B, H, N, Dv], laid out as [B, N, H, Dv], and lse [B, H, N], float32 (float64 for
        float64), not differentiable. A row that sees nothing has out 0, lse -inf and gradient 0.
    """
    seq_len, runs = _one_rank(q, info)
    spec = make_spec(
        seq_len,
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
    out, lse = attention_forward(q, k, v, runs, runs, spec)
    return token_major(out), lse.contiguous()


@torch.library.custom_op("paradyse::attention_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
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
    head_ids: Tensor | None,
    info: Tensor | None,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    seq_len, runs = _one_rank(q, info)
    spec = make_spec(
        seq_len,
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
    saved = (grad_out, q, k, v, out, lse, runs, runs, spec)
    dq, dk, dv = attention_backward(*saved)
    d_bias = bias_gradient(*saved) if bias_grad else q.new_empty(0)
    return token_major(dq), token_major(dk), token_major(dv), d_bias


register_gradient(attention, _backward)
