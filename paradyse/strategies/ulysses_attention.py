"""``paradyse::attention_ulysses``: an all-to-all turns the split of the sequence into a split of
the heads.

DeepSpeed-Ulysses (arXiv 2309.14509), for any numbers of heads and ranks: every rank takes the same
number of *slots*, a slot being one KV head with (a part of) its query heads. KV heads are
replicated where that spreads the work better, as it must where p exceeds them; what is left over is
padding, sent but not computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paradyse import comm
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
from paradyse.mesh import Axis, axis_named


@dataclass(frozen=True)
class HeadSlots:
    """Which heads each rank computes: slots [r n, (r+1) n) of the list (KV head, replica)."""

    num_heads: int
    num_kv_heads: int
    num_ranks: int
    replicas: int
    """Slots that share one KV head; each takes a part of its query heads."""

    @property
    def slots_per_rank(self) -> int:
        return -(-self.num_kv_heads * self.replicas // self.num_ranks)

    @property
    def heads_per_slot(self) -> int:
        return -(-self.num_heads // self.num_kv_heads // self.replicas)

    def real_slots(self, rank: int) -> int:
        """Slots of ``rank`` that are not padding; they come first."""
        n = self.slots_per_rank
        return max(0, min(n, self.num_kv_heads * self.replicas - rank * n))

    def head_ids(self, rank: int) -> Tensor:
        """Query head [real slots * heads per slot] int64 of each head that ``rank`` computes."""
        group = self.num_heads // self.num_kv_heads
        slot = torch.arange(self.real_slots(rank)) + rank * self.slots_per_rank
        first = slot // self.replicas * group + slot % self.replicas * self.heads_per_slot
        ids = first[:, None] + torch.arange(self.heads_per_slot)
        return ids.flatten().clamp(max=self.num_heads - 1)

    def spread_queries(self, x: Tensor) -> Tensor:
        """[B, s, H, D] to [B, s, p, n g D]: each rank's slots."""
        b, s, _, d = x.shape
        group, g, r = self.num_heads // self.num_kv_heads, self.heads_per_slot, self.replicas
        x = F.pad(x.reshape(b, s, self.num_kv_heads, group, d), (0, 0, 0, r * g - group))
        return self._to_ranks(x.reshape(b, s, self.num_kv_heads * r, g * d))

    def collect_queries(self, x: Tensor, width: int) -> Tensor:
        """The inverse of ``spread_queries``."""
        b, s = x.shape[:2]
        group, g, r = self.num_heads // self.num_kv_heads, self.heads_per_slot, self.replicas
        x = x.reshape(b, s, -1, g * width)[:, :, : self.num_kv_heads * r]
        x = x.reshape(b, s, self.num_kv_heads, r * g, width)[:, :, :, :group]
        return x.reshape(b, s, self.num_heads, width)

    def spread_keys(self, x: Tensor) -> Tensor:
        """[B, s, Hk, D] to [B, s, p, n D], replicated."""
        return self._to_ranks(x if self.replicas == 1 else x.repeat_interleave(self.replicas, 2))

    def sum_keys(self, x: Tensor, width: int) -> Tensor:
        """The transpose of ``spread_keys``: replicas are summed."""
        b, s = x.shape[:2]
        x = x.reshape(b, s, -1, width)[:, :, : self.num_kv_heads * self.replicas]
        return x.reshape(b, s, self.num_kv_heads, self.replicas, width).sum(3)

    def _to_ranks(self, x: Tensor) -> Tensor:
        b, s, slots, w = x.shape
        padded = self.num_ranks * self.slots_per_rank
        return F.pad(x, (0, 0, 0, padded - slots)).reshape(
            b, s, self.num_ranks, self.slots_per_rank * w
        )


def head_slots(num_heads: int, num_kv_heads: int, num_ranks: int) -> HeadSlots:
    """The slots with the least work for the busiest rank, then the fewest bytes."""
    group = num_heads // num_kv_heads
    options = [
        HeadSlots(num_heads, num_kv_heads, num_ranks, r)
        for r in range(1, min(group, num_ranks) + 1)
    ]
    return min(
        options, key=lambda s: (s.slots_per_rank * s.heads_per_slot, s.slots_per_rank, s.replicas)
    )


def _heads_from_tokens(x: Tensor, axis: Axis, block_id: int) -> Tensor:
    """[B, s, p, W], slots for every rank, to [B, p s, W]: the whole sequence of this rank's
    slots.
    """
    if axis.size == 1:
        return x[:, :, 0].contiguous()
    y = comm.all_to_all(x.movedim(2, 0), axis, block_id)  # [p, B, s, W]
    p, b, s, w = y.shape
    y = y.view(p, b, 2, s // 2, w)
    natural = y.new_empty(b, 2 * p, s // 2, w)  # rank r holds chunks r and 2p-1-r
    natural[:, :p] = y[:, :, 0].transpose(0, 1)
    natural[:, p:] = y[:, :, 1].flip(0).transpose(0, 1)
    return natural.view(b, p * s, w)


def _tokens_from_heads(x: Tensor, axis: Axis, block_id: int) -> Tensor:
    """The inverse: [B, p s, W] to [B, s, p, W]."""
    p = axis.size
    if p == 1:
        return x[:, :, None]
    b, n, w = x.shape
    chunks = x.view(b, 2 * p, n // (2 * p), w)
    y = torch.stack([chunks[:, :p], chunks[:, p:].flip(1)], 2)  # [B, p, 2, c, W]
    return (
        comm.all_to_all(y.transpose(0, 1), axis, block_id).view(p, b, n // p, w).permute(1, 2, 0, 3)
    )


def _heads(x: Tensor, width: int, real: int) -> Tensor:
    """[B, N, h' width] to [B, h, N, width], a view without padding heads."""
    return x.unflatten(2, (-1, width))[:, :, :real].transpose(1, 2)


def _pad_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, h, N, width] to [B, N, h' width], padding heads 0."""
    return F.pad(x.transpose(1, 2), (0, 0, 0, num_heads - x.shape[1])).flatten(2)


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

    def split(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as [.., n g D], [.., n D], [.., n Dv]."""
        n, g, d = self.slots.slots_per_rank, self.slots.heads_per_slot, self.key_width
        q, k, v = message.split([n * g * d, n * d, n * self.value_width], -1)
        return q, k, v

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.split(qkv)
        h, h_kv = self.real
        d = self.key_width
        return _heads(q, d, h), _heads(k, d, h_kv), _heads(v, self.value_width, h_kv)


def _part(
    num_heads: int, num_kv_heads: int, d: int, dv: int, axis: Axis, args: tuple[Any, ...]
) -> _Part:
    *args_, head_ids = args
    slots = head_slots(num_heads, num_kv_heads, axis.size)
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
        int(info[0]), key_padding, document_ids, bias, seed, left, right, chunk, scale, dropout_p,
        head_ids
    )  # fmt: skip
    part = _part(q.shape[1], k.shape[1], q.shape[3], v.shape[3], ax, args)
    slots = part.slots
    message = [
        slots.spread_queries(q.transpose(1, 2)),
        slots.spread_keys(k.transpose(1, 2)),
        slots.spread_keys(v.transpose(1, 2)),
    ]
    qkv = _heads_from_tokens(torch.cat(message, -1), ax, block_id)
    runs = ((0, qkv.shape[1]),)
    if part.real[0]:
        out_h, lse = attention_forward(*part.heads(qkv), runs, runs, part.spec)
    else:
        nothing = (q.shape[0], 0, qkv.shape[1])
        out_h, lse = (
            q.new_empty(*nothing, v.shape[3]),
            q.new_empty(nothing, dtype=stat_dtype(q.dtype)),
        )
    out = _pad_heads(out_h, slots.slots_per_rank * slots.heads_per_slot)
    out = slots.collect_queries(_tokens_from_heads(out, ax, block_id), v.shape[3])
    return token_major(out.transpose(1, 2)), lse.contiguous(), token_major(out_h), qkv


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
    dropout_p: float,
    axis: str,
    head_ids: Tensor | None,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ax, block_id = axis_named(axis), int(info[1])
    args = (
        int(info[0]), key_padding, document_ids, bias, seed, left, right, chunk, scale, dropout_p,
        head_ids
    )  # fmt: skip
    _, num_heads, _, value_width = grad_out.shape
    part = _part(num_heads, num_kv_heads, key_width, value_width, ax, args)
    slots, runs = part.slots, ((0, qkv.shape[1]),)
    grad = _heads_from_tokens(slots.spread_queries(grad_out.transpose(1, 2)), ax, block_id)
    grad_h = _heads(grad, value_width, part.real[0])
    d_qkv = torch.zeros_like(qkv)
    d_bias = grad_out.new_empty(0)
    if part.real[0]:
        saved = (grad_h, *part.heads(qkv), out_h, lse, runs, runs, part.spec)
        for place, g in zip(part.heads(d_qkv), attention_backward(*saved)):
            place.copy_(g)
        d_bias = bias_gradient(*saved) if bias_grad else d_bias
    elif bias_grad and bias is not None:
        d_bias = torch.zeros_like(bias, memory_format=torch.contiguous_format)
    dq, dk, dv = part.split(_tokens_from_heads(d_qkv, ax, block_id))
    if bias_grad and ax.size > 1:
        d_bias = comm.all_reduce(d_bias, ax, block_id)
    grads = (
        slots.collect_queries(dq, key_width),
        slots.sum_keys(dk, key_width),
        slots.sum_keys(dv, value_width),
    )
    dq, dk, dv = (token_major(g.transpose(1, 2)) for g in grads)
    return dq, dk, dv, d_bias


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ax = axis_named(rest[10])
    slots = head_slots(q.shape[1], k.shape[1], ax.size)
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
