"""Ulysses: an all-to-all turns the split of the sequence into a split of the heads.

DeepSpeed-Ulysses (arXiv 2309.14509), for any numbers of heads and ranks: ``head_exchange`` says
which heads go where, and packs and unpacks the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis
from paradyse.kernels.attention import attention_backward, attention_forward, bias_gradient
from paradyse.kernels.attention_core import Backward, empty_lse
from paradyse.kernels.attention_mask import AttentionSpec
from paradyse.kernels.attention_op import token_major
from paradyse.kernels.head_exchange import (
    receive_heads,
    receive_tokens,
    send_heads,
    send_tokens,
)
from paradyse.kernels.head_slots import HeadSlots
from paradyse.strategies.attention.method import Context
from paradyse.strategies.groups.heads import deal_heads


def _exchange(message: Tensor, at: Context) -> Tensor:
    """Slice i of ``message`` [p, ..] to rank i; what they sent."""
    return message if at.axis.size == 1 else collectives.all_to_all(message, at.axis, at.block_id)


def _heads(x: Tensor, width: int, real: int) -> Tensor:
    """[B, N, h' width] to [B, h, N, width], a view without padding heads."""
    return x.unflatten(2, (-1, width))[:, :, :real].transpose(1, 2)


@dataclass(frozen=True)
class _Part:
    """One rank's part of the work: its slots, and the widths of the message [.., n (g D + D + Dv)]
    of q, k, v.
    """

    slots: HeadSlots
    rank: int
    key_width: int
    value_width: int

    @property
    def real(self) -> tuple[int, int]:
        """Query heads and KV heads that this rank computes."""
        n = self.slots.real_slots(self.rank)
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

    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        """``spec`` for the heads that this rank computes."""
        ids, bias, num_heads = self.slots.head_ids(self.rank), spec.bias, self.slots.num_heads
        if spec.head_ids is not None:
            ids = spec.head_ids.cpu()[ids]
        elif bias is not None and bias.shape[1] not in (1, num_heads):
            raise ValueError(f"bias has {bias.shape[1]} heads, the query {num_heads}")
        return replace(spec, head_ids=ids)


def _part(num_heads: int, value_width: int, at: Context) -> _Part:
    slots = deal_heads(num_heads, at.num_kv_heads, at.axis.size)
    return _Part(slots, at.axis.rank, at.key_width, value_width)


def forward(q: Tensor, k: Tensor, v: Tensor, at: Context) -> tuple[Tensor, list[Tensor]]:
    """``Method.forward``.

    Args:
        q: [B, H, s, D], this rank's tokens.
        k, v: [B, Hk, s, D] and [B, Hk, s, Dv].
        at: the call.
    Returns:
        this rank's out [B, H, s, Dv]; then, of its own heads over the whole sequence of N = p s
        tokens, lse [B, h, N], out [B, h, N, Dv] and the message [B, N, n (g D + D + Dv)] that
        brought q, k, v: for backward, which so has only gradients to send.
    Raises:
        ValueError: a bias of another number of heads.
    """
    part = _part(q.shape[1], v.shape[3], at)
    slots, spec = part.slots, part.spec(at.spec)
    received = _exchange(send_heads(slots, (q, k, v)), at)
    qkv = receive_tokens(received)
    del received
    runs = ((0, qkv.shape[1]),)
    if part.real[0]:
        out_h, lse = attention_forward(*part.heads(qkv), runs, runs, spec)
    else:
        out_h = q.new_empty(q.shape[0], 0, qkv.shape[1], v.shape[3])
        lse = empty_lse(out_h)
    received = _exchange(send_tokens(slots, (out_h,)), at)
    (out,) = receive_heads(slots, received, (v.shape[3],))
    return out, [lse.contiguous(), token_major(out_h), qkv]


def backward(
    grad_out: Tensor, saved: Sequence[Tensor], at: Context, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """``Method.backward``, from what ``forward`` gives for it alone.

    Args:
        grad_out: [B, H, s, Dv].
        saved: lse, out and the message.
        at: the call.
        bias_grad: whether the bias needs a gradient.
    Returns:
        dq, dk, dv, and this rank's share of the bias's gradient; None where it computes no head.
    """
    lse, out_h, qkv = saved
    _, num_heads, _, value_width = grad_out.shape
    part = _part(num_heads, value_width, at)
    slots, runs = part.slots, ((0, qkv.shape[1]),)
    received = _exchange(send_heads(slots, (grad_out,)), at)
    grad_h = _heads(receive_tokens(received), value_width, part.real[0])
    del received
    d_heads, d_bias = part.heads(qkv), None
    if part.real[0]:
        given = Backward(grad_h, *d_heads, out_h, lse)
        args = (given, runs, runs, part.spec(at.spec))
        d_heads = attention_backward(*args)
        d_bias = bias_gradient(*args) if bias_grad else None
        del args, given
    received = _exchange(send_tokens(slots, d_heads), at)
    dq, dk, dv = receive_heads(slots, received, part.widths)
    return dq, dk, dv, d_bias


def fake_kept(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> list[Tensor]:
    """``Method.fake_kept``: empty tensors for what ``forward`` keeps of ``q``, ``k`` and ``v`` on
    this rank of ``axis``.
    """
    slots = deal_heads(q.shape[1], k.shape[1], axis.size)
    b, _, s, d = q.shape
    n, g, dv = slots.slots_per_rank, slots.heads_per_slot, v.shape[3]
    out_h = q.new_empty((b, s * axis.size, slots.real_slots(axis.rank) * g, dv)).transpose(1, 2)
    return [empty_lse(out_h), out_h, q.new_empty((b, s * axis.size, n * (g * d + d + dv)))]
