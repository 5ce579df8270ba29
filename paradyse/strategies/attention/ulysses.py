"""``paradyse::attention_ulysses``: an all-to-all turns the split of the sequence into a split of
the heads.

DeepSpeed-Ulysses (arXiv 2309.14509), for any numbers of heads and ranks: ``head_exchange`` says
which heads go where, and packs and unpacks the messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis, axis_named
from paradyse.kernels.attention import attention_backward, attention_forward, bias_gradient
from paradyse.kernels.attention_core import stat_dtype
from paradyse.kernels.attention_mask import AttentionSpec
from paradyse.kernels.attention_op import (
    Grads,
    empty_like_heads,
    make_spec,
    register_gradient,
    token_major,
)
from paradyse.kernels.head_exchange import (
    HeadSlots,
    receive_heads,
    receive_tokens,
    send_heads,
    send_tokens,
)
from paradyse.strategies.groups.heads import deal_heads


def _exchange(message: Tensor, axis: Axis, block_id: int) -> Tensor:
    """Slice i of ``message`` [p, ..] to rank i; what they sent."""
    return message if axis.size == 1 else collectives.all_to_all(message, axis, block_id)


def _heads(x: Tensor, width: int, real: int) -> Tensor:
    """[B, N, h' width] to [B, h, N, width], a view without padding heads."""
    return x.unflatten(2, (-1, width))[:, :, :real].transpose(1, 2)


@dataclass(frozen=True)
class _Part:
    """One rank's part of the work: slots, widths of the message [.., n (g D + D + Dv)], spec with
    own heads.
    """

    axis: Axis
    slots: HeadSlots
    spec: AttentionSpec
    key_width: int
    value_width: int

    @property
    def real(self) -> tuple[int, int]:
        """Query heads and KV heads that this rank computes."""
        n = self.slots.real_slots(self.axis.rank)
        return n * self.slots.heads_per_slot, n

    @property
    def widths(self) -> tuple[int, int, int]:
        return self.key_width, self.key_width, self.value_width

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the message [B, N, n (g D + D + Dv)] as real heads of q, k, v, [B, h, N, D]."""
        h, h_kv = self.real
        parts = qkv.split(self.slots.columns(self.widths), -1)
        q, k, v = (_heads(*x) for x in zip(parts, self.widths, (h, h_kv, h_kv)))
        return q, k, v


def _part(
    num_heads: int, num_kv_heads: int, d: int, dv: int, axis: Axis, args: tuple[Any, ...]
) -> _Part:
    *args_, head_ids = args
    slots = deal_heads(num_heads, num_kv_heads, axis.size)
    ids = slots.head_ids(axis.rank)
    if head_ids is not None:
        ids = head_ids.cpu()[ids]
    bias = args_[3]
    if bias is not None and bias.shape[1] > 1 and head_ids is None and bias.shape[1] != num_heads:
        raise ValueError(f"bias has {bias.shape[1]} heads, the query {num_heads}")
    return _Part(axis, slots, make_spec(*[*args_, ids]), d, dv)


@torch.library.custom_op("paradyse::attention_ulysses", mutates_args=())
def attention_ulysses(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``paradyse::attention_ring``'s arguments and first result.

    Returns:
        this rank's out [B, H, s, Dv]; then, of its own heads over the whole sequence of N = p s
        tokens, lse [B, h, N], out [B, h, N, Dv] and the message [B, N, n (g D + D + Dv)] that
        brought q, k, v: for backward, which so has only gradients to send.
    """
    ax, block_id = axis_named(axis), int(info[1])
    args = (
        int(info[0]), key_padding, document_ids, bias, seed, left, right, chunk, scale, softcap,
        dropout_p, head_ids
    )  # fmt: skip
    part = _part(q.shape[1], k.shape[1], q.shape[3], v.shape[3], ax, args)
    slots = part.slots
    received = _exchange(send_heads(slots, (q, k, v)), ax, block_id)
    qkv = receive_tokens(received)
    del received
    runs = ((0, qkv.shape[1]),)
    if part.real[0]:
        out_h, lse = attention_forward(*part.heads(qkv), runs, runs, part.spec)
    else:
        nothing = (q.shape[0], 0, qkv.shape[1])
        out_h, lse = (
            q.new_empty(*nothing, v.shape[3]),
            q.new_empty(nothing, dtype=stat_dtype(q.dtype)),
        )
    received = _exchange(send_tokens(slots, (out_h,)), ax, block_id)
    (out,) = receive_heads(slots, received, (v.shape[3],))
    return token_major(out), lse.contiguous(), token_major(out_h), qkv


@torch.library.custom_op("paradyse::attention_ulysses_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    lse: Tensor,
    out_h: Tensor,
    qkv: Tensor,
    num_kv_heads: int,
    key_width: int,
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
    ax, block_id = axis_named(axis), int(info[1])
    args = (
        int(info[0]), key_padding, document_ids, bias, seed, left, right, chunk, scale, softcap,
        dropout_p, head_ids
    )  # fmt: skip
    _, num_heads, _, value_width = grad_out.shape
    part = _part(num_heads, num_kv_heads, key_width, value_width, ax, args)
    slots, runs = part.slots, ((0, qkv.shape[1]),)
    received = _exchange(send_heads(slots, (grad_out,)), ax, block_id)
    grad_h = _heads(receive_tokens(received), value_width, part.real[0])
    del received
    d_bias = grad_out.new_empty(0)
    heads = part.heads(qkv)
    if part.real[0]:
        saved = (grad_h, *heads, out_h, lse, runs, runs, part.spec)
        d_heads = attention_backward(*saved)
        d_bias = bias_gradient(*saved) if bias_grad else d_bias
    else:
        d_heads = heads
        if bias_grad and bias is not None:
            d_bias = torch.zeros_like(bias, memory_format=torch.contiguous_format)
    received = _exchange(send_tokens(slots, d_heads), ax, block_id)
    dq, dk, dv = receive_heads(slots, received, part.widths)
    if bias_grad and ax.size > 1:
        d_bias = collectives.all_reduce(d_bias, ax, block_id)
    return token_major(dq), token_major(dk), token_major(dv), d_bias


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ax = axis_named(rest[11])
    slots = deal_heads(q.shape[1], k.shape[1], ax.size)
    b, _, s, d = q.shape
    n, g, dv = slots.slots_per_rank, slots.heads_per_slot, v.shape[3]
    h, seq_len = slots.real_slots(ax.rank) * g, s * ax.size
    return (
        empty_like_heads(q, dv),
        q.new_empty((b, h, seq_len), dtype=stat_dtype(q.dtype)),
        q.new_empty((b, seq_len, h, dv)).transpose(1, 2),
        q.new_empty((b, seq_len, n * (g * d + d + dv))),
    )


def _fake_backward(
    grad_out: Tensor,
    lse: Tensor,
    out_h: Tensor,
    qkv: Tensor,
    num_kv_heads: int,
    key_width: int,
    *rest: Any,
) -> Grads:
    b, _, s, width = grad_out.shape
    keys = grad_out.new_empty((b, s, num_kv_heads, key_width)).transpose(1, 2)
    values = grad_out.new_empty((b, s, num_kv_heads, width)).transpose(1, 2)
    return empty_like_heads(grad_out, key_width), keys, values, rest[-1]


register_gradient(
    attention_ulysses,
    _backward,
    _fake_forward,
    _fake_backward,
    keep=lambda q, k, v, outputs: (*outputs[1:], k.shape[1], q.shape[3]),
)
