"""``flash_attention``: exact attention between queries and keys at given global positions.

Order: what carries it out, the operators, public functions. On CUDA the Triton kernels of
``flash_forward`` and ``flash_backward``; on a CPU the tiles of ``attention`` where the keys ascend,
and else the definition in blocks of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paradyse.kernels.attention import attention_backward, attention_forward
from paradyse.kernels.attention_mask import AttentionSpec, Runs
from paradyse.kernels.attention_op import (
    empty_like_heads,
    fake_forward,
    make_spec,
    token_major,
)
from paradyse.kernels.flash_backward import launch_backward
from paradyse.kernels.flash_forward import launch_forward
from paradyse.kernels.flash_plan import INTERPRETED, Plan, make_plan, refusal
from paradyse.kernels.flash_reference import blocked_backward, blocked_forward
from paradyse.kernels.flash_tiles import describe_mask

_MOST_RUNS = 64
"""Keys in more stretches than this are in no order that the tiles of a CPU would gain from."""


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    kv_positions: Tensor,
    spec: AttentionSpec,
) -> Plan:
    reason = refusal(q, k, v, spec.scale)
    if reason is not None:
        raise NotImplementedError(f"flash_attention on {q.device}: {reason}")
    visibility = describe_mask(q_positions, kv_positions, spec)
    return make_plan(q, k, v, visibility, spec)


def _on_device(x: Tensor) -> bool:
    return INTERPRETED if x.device.type == "cpu" else True


def _runs(positions: Tensor) -> Runs | None:
    """The positions, on a CPU, as stretches; None if they are too many."""
    breaks = (positions.diff() != 1).nonzero().flatten() + 1
    if len(positions) == 0 or len(breaks) >= _MOST_RUNS:
        return None
    begins = [0, *breaks.tolist(), len(positions)]
    return tuple((int(positions[a]), b - a) for a, b in zip(begins, begins[1:], strict=False))


def _cpu_runs(q_positions: Tensor, kv_positions: Tensor) -> tuple[Runs, Runs] | None:
    if bool((kv_positions.diff() <= 0).any()):
        return None
    q_runs, kv_runs = _runs(q_positions), _runs(kv_positions)
    return None if q_runs is None or kv_runs is None else (q_runs, kv_runs)


def _check(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, spec: AttentionSpec) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v must have one dtype, not {q.dtype}, {k.dtype}, {v.dtype}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key heads")
    if q.shape[-1] != k.shape[-1] or k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit: give "
            "[B, H, Sq, D], [B, Hk, Sk, D] and [B, Hk, Sk, Dv]"
        )
    for name, x, n in (("q_positions", i, q.shape[2]), ("kv_positions", j, k.shape[2])):
        if x.shape != (n,) or x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} is {x.dtype} {list(x.shape)}; give int32 or int64 [{n}]")
    for name in ("key_padding", "document_ids", "bias"):
        x = getattr(spec, name)
        if x is not None and x.shape[0] not in (1, q.shape[0]):
            raise ValueError(f"{name} is {list(x.shape)}, but there are {q.shape[0]} sequences")
    p = spec.dropout_p
    if not 0 <= p <= 1 or (p > 0 and spec.seed is None):
        raise ValueError(f"dropout_p {p} must be in [0, 1], and above 0 it needs a seed")


# Operators


@torch.library.custom_op("paradyse::flash_attention", mutates_args=())
def _flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    kv_positions: Tensor,
    key_padding: Tensor | None,
    document_ids: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    head_ids: Tensor | None,
    seq_len: int,
    left: int,
    right: int,
    chunk: int,
    scale: float,
    softcap: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """``flash_attention`` with its mask spelled out; -1, and 0 for ``softcap``, stand for unset."""
    masks = (key_padding, document_ids, bias, seed, left, right, chunk)
    spec = make_spec(seq_len, *masks, scale, softcap, dropout_p, head_ids)
    _check(q, k, v, q_positions, kv_positions, spec)
    if _on_device(q):
        q, k, v = (_readable(x) for x in (q, k, v))
        return launch_forward(q, k, v, _plan(q, k, v, q_positions, kv_positions, spec))
    runs = _cpu_runs(q_positions, kv_positions)
    if runs is not None:
        out, lse = attention_forward(q, k, v, *runs, spec)
    else:
        out, lse = blocked_forward(q, k, v, q_positions, kv_positions, spec)
    return token_major(out), lse.contiguous()


@torch.library.custom_op("paradyse::flash_attention_backward", mutates_args=())
def _flash_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_positions: Tensor,
    kv_positions: Tensor,
    key_padding: Tensor | None,
    document_ids: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    head_ids: Tensor | None,
    seq_len: int,
    left: int,
    right: int,
    chunk: int,
    scale: float,
    softcap: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    masks = (key_padding, document_ids, bias, seed, left, right, chunk)
    spec = make_spec(seq_len, *masks, scale, softcap, dropout_p, head_ids)
    _check(q, k, v, q_positions, kv_positions, spec)
    if _on_device(q):
        grad_out, q, k, v, out = (_readable(x) for x in (grad_out, q, k, v, out))
        plan = _plan(q, k, v, q_positions, kv_positions, spec)
        grad_lse = None if grad_lse is None else grad_lse.float().contiguous()
        return launch_backward(grad_out, grad_lse, q, k, v, out, lse.contiguous(), plan)
    runs = _cpu_runs(q_positions, kv_positions) if grad_lse is None else None
    if runs is not None:
        grads = attention_backward(grad_out, q, k, v, out, lse, *runs, spec)
    else:
        where = (q_positions, kv_positions, spec)
        grads = blocked_backward(grad_out, grad_lse, q, k, v, out, lse, *where)
    dq, dk, dv = (token_major(x) for x in grads)
    return dq, dk, dv


def _fake_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like_heads(q), empty_like_heads(k), empty_like_heads(v)


def _readable(x: Tensor) -> Tensor:
    """With adjacent elements along the width, which the kernels read without a stride."""
    return x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.numbers = inputs[:10], inputs[10:]
    ctx.present = [x is not None for x in tensors]
    ctx.save_for_backward(*output, *(x for x in tensors if x is not None))
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    none = [None] * (len(ctx.present) - 3 + len(ctx.numbers))
    if grad_out is None and grad_lse is None:
        return (None, None, None, *none)
    out, lse, *saved = ctx.saved_tensors
    given = iter(saved)
    q, k, v, *masks = [next(given) if x else None for x in ctx.present]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    args = (grad_out, grad_lse, q, k, v, out, lse, *masks, *ctx.numbers)
    return (*torch.ops.paradyse.flash_attention_backward(*args), *none)


_flash_attention.register_fake(fake_forward)
_flash_attention.register_autograd(_gradient, setup_context=_setup_context)
_flash_attention_backward.register_fake(_fake_backward)


# Public functions


def _unset(x: int | None) -> int:
    return -1 if x is None else x


def _rest(spec: AttentionSpec, scale: float, softcap: float | None) -> tuple[Any, ...]:
    softcap = spec.softcap if softcap is None else softcap
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap {softcap} must be positive, or None")
    tensors = (spec.key_padding, spec.document_ids, spec.bias, spec.seed, spec.head_ids)
    limits = (spec.seq_len, _unset(spec.left), _unset(spec.right), _unset(spec.chunk))
    return (*tensors, *limits, scale, 0.0 if softcap is None else softcap, spec.dropout_p)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_positions: Tensor,
    kv_positions: Tensor,
    mask_spec: AttentionSpec,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of some queries to some keys (FlashAttention-2, arXiv 2307.08691).

    Args:
        q: [B, H, Sq, D], bfloat16, float16 or float32 (on a CPU also float64).
        k, v: [B, Hk, Sk, D] and [B, Hk, Sk, Dv]; query head h uses key head h // (H // Hk). Any
            strides, best with D adjacent, as in [B, S, H, D] seen as [B, H, S, D].
        q_positions, kv_positions: int [Sq], [Sk], global positions, in any order; tiles are skipped
            where neighbours in the tensor are neighbours in the sequence.
        mask_spec: which pairs are visible, bias and dropout; its ``scale`` is not used.
        softcap: ``AttentionSpec.softcap``; None: the one of ``mask_spec``.
    Returns:
        out [B, H, Sq, Dv] in q's dtype, laid out as [B, Sq, H, Dv], and lse [B, H, Sq] float32
        (float64 for float64): log of the sum of exp(scores) over the visible keys. Both are
        differentiable. A row that sees no key has out 0, lse -inf and gradients 0. Gradients are
        the same in every run.
    Raises:
        ValueError: shapes, positions or a mask that do not fit; dropout without a seed.
        NotImplementedError: a learned bias; on CUDA, what ``flash_plan.refusal`` names.
    """
    bias = mask_spec.bias
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "flash_attention gives a bias no gradient: detach it, or use paradyse::attention"
        )
    rest = _rest(mask_spec, scale, softcap)
    return torch.ops.paradyse.flash_attention(q, k, v, q_positions, kv_positions, *rest)


def flash_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    q_positions: Tensor,
    kv_positions: Tensor,
    mask_spec: AttentionSpec,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv through these keys, where ``out`` and ``lse`` are over all keys that the queries
    see, here or elsewhere: a ring adds up what its steps give.
    """
    rest = _rest(mask_spec, scale, softcap)
    args = (grad_out, None, q, k, v, out, lse, q_positions, kv_positions, *rest)
    return torch.ops.paradyse.flash_attention_backward(*args)
