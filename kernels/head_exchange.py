"""What Ulysses' all-to-all sends and receives: tokens of all heads one way, heads of all tokens the
other.

Every rank takes the same number of *slots*, a slot being one KV head with (a part of) its query
heads. KV heads are replicated where that spreads the work better, as it must where p exceeds them;
what is left over is padding, sent but not computed. Tokens are in the balanced order: rank r holds
chunks r and 2p-1-r.

Order: the slots, the reference in plain PyTorch, the public functions. On CUDA each function is one
pass of a kernel (``triton_exchange``) from the tensors at hand to those that are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from paradyse.torch_private import FakeTensor


@dataclass(frozen=True)
class HeadSlots:
    """Which heads each rank computes: slots [r n, (r+1) n) of the list (KV head, replica)."""

    num_heads: int
    num_kv_heads: int
    num_ranks: int
    replicas: int
    """Slots that share one KV head; each takes a part of its query heads."""

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def slots_per_rank(self) -> int:
        return -(-self.num_kv_heads * self.replicas // self.num_ranks)

    @property
    def heads_per_slot(self) -> int:
        return -(-self.group // self.replicas)

    @property
    def queries_per_rank(self) -> int:
        return self.slots_per_rank * self.heads_per_slot

    def real_slots(self, rank: int) -> int:
        """Slots of ``rank`` that are not padding; they come first."""
        n = self.slots_per_rank
        return max(0, min(n, self.num_kv_heads * self.replicas - rank * n))

    @cached_property
    def q(self) -> tuple[tuple[int, ...], ...]:
        """Per rank the query heads of its slots, ``heads_per_slot`` of each; -1: a missing one."""
        n, g = self.slots_per_rank, self.heads_per_slot

        def head(slot: int, i: int) -> int:
            kv, part = divmod(slot, self.replicas)
            at = part * g + i
            return kv * self.group + at if kv < self.num_kv_heads and at < self.group else -1

        ranks = [range(r * n, (r + 1) * n) for r in range(self.num_ranks)]
        return tuple(tuple(head(slot, i) for slot in own for i in range(g)) for own in ranks)

    @cached_property
    def kv(self) -> tuple[tuple[int, ...], ...]:
        """Per rank the KV head of each slot; -1 for a missing one."""
        return tuple(tuple(h // self.group for h in q[:: self.heads_per_slot]) for q in self.q)

    def head_ids(self, rank: int) -> Tensor:
        """Query head [real slots * heads per slot] int64 of each head that ``rank`` computes; one
        that exists stands in for a missing one.
        """
        return torch.tensor(
            self.q[rank][: self.real_slots(rank) * self.heads_per_slot], dtype=torch.int64
        ).clamp(min=0)

    def spread_queries(self, x: Tensor) -> Tensor:
        """[B, s, H, D] to [B, s, p, n g D]: each rank's slots."""
        b, s, _, d = x.shape
        group, g, r = self.group, self.heads_per_slot, self.replicas
        if r * g > group:
            x = F.pad(x.reshape(b, s, self.num_kv_heads, group, d), (0, 0, 0, r * g - group))
        return self._to_ranks(x.reshape(b, s, self.num_kv_heads * r, g * d))

    def collect_queries(self, x: Tensor, width: int) -> Tensor:
        """The inverse of ``spread_queries``."""
        b, s = x.shape[:2]
        group, g, r = self.group, self.heads_per_slot, self.replicas
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
        padding = self.num_ranks * self.slots_per_rank - slots
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        return x.reshape(b, s, self.num_ranks, self.slots_per_rank * w)

    def message_heads(self, num_tensors: int) -> list[int]:
        """Heads, padding included, that a message holds of each of these tensors: the first has
        query heads, the others KV heads.
        """
        n = self.slots_per_rank
        return [self.queries_per_rank] + [n] * (num_tensors - 1)

    def columns(self, widths: Sequence[int]) -> list[int]:
        """Columns of a message that each tensor takes, from the widths of their heads."""
        return [h * w for h, w in zip(self.message_heads(len(widths)), widths)]


# Reference


def send_heads_reference(slots: HeadSlots, tensors: Sequence[Tensor]) -> Tensor:
    """``send_heads`` in plain PyTorch."""
    widths = [x.shape[3] for x in tensors]
    columns = slots.columns(widths)
    b, _, s, _ = tensors[0].shape
    message = tensors[0].new_empty(slots.num_ranks, b, s, sum(columns))
    spread = [slots.spread_queries, *[slots.spread_keys] * (len(tensors) - 1)]
    for place, f, x in zip(message.movedim(0, 2).split(columns, -1), spread, tensors):
        place.copy_(f(x.transpose(1, 2)))
    return message


def receive_tokens_reference(message: Tensor) -> Tensor:
    """``receive_tokens`` in plain PyTorch."""
    p, b, s, w = message.shape
    if p == 1:
        return message[0]
    halves = message.view(p, b, 2, s // 2, w)
    natural = message.new_empty(b, 2 * p, s // 2, w)
    natural[:, :p] = halves[:, :, 0].transpose(0, 1)
    natural[:, p:] = halves[:, :, 1].flip(0).transpose(0, 1)
    return natural.view(b, p * s, w)


def send_tokens_reference(slots: HeadSlots, tensors: Sequence[Tensor]) -> Tensor:
    """``send_tokens`` in plain PyTorch."""
    p, (b, _, n, _) = slots.num_ranks, tensors[0].shape
    heads, s = slots.message_heads(len(tensors)), n // p
    parts = [
        F.pad(x.transpose(1, 2), (0, 0, 0, h - x.shape[1])).flatten(2)
        for x, h in zip(tensors, heads)
    ]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, -1)  # [B, N, W]
    if p == 1:
        return whole[None]
    width = whole.shape[2]
    chunks = whole.view(b, 2 * p, s // 2, width)
    halves = torch.stack([chunks[:, :p], chunks[:, p:].flip(1)], 2)  # [B, p, 2, c, W]
    return halves.transpose(0, 1).reshape(p, b, s, width)


def receive_heads_reference(
    slots: HeadSlots, message: Tensor, widths: Sequence[int]
) -> tuple[Tensor, ...]:
    """``receive_heads`` in plain PyTorch."""
    parts = message.permute(1, 2, 0, 3).split(slots.columns(widths), -1)  # [B, s, p, ..]
    collect = [slots.collect_queries, *[slots.sum_keys] * (len(widths) - 1)]
    return tuple(f(x, w).transpose(1, 2) for f, x, w in zip(collect, parts, widths))


# Public functions


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda and not isinstance(x, FakeTensor)


def send_heads(slots: HeadSlots, tensors: Sequence[Tensor]) -> Tensor:
    """Every rank's heads of this rank's tokens.

    Args:
        tensors: [B, H, s, D] with query heads, then any number up to two of [B, Hk, s, D'] with KV
            heads.
    Returns:
        [p, B, s, W], slice r for rank r: side by side n g heads of the first tensor and n heads of
        each of the others; padding heads are 0.
    """
    if _on_gpu(tensors[0]):
        from paradyse.kernels.triton_exchange import launch_send_heads

        return launch_send_heads(slots, tensors)
    return send_heads_reference(slots, tensors)


def receive_tokens(message: Tensor) -> Tensor:
    """[p, B, s, W], slice r from rank r, to [B, p s, W]: the tokens in the sequence's order."""
    if _on_gpu(message):
        from paradyse.kernels.triton_exchange import launch_receive_tokens

        return launch_receive_tokens(message)
    return receive_tokens_reference(message)


def send_tokens(slots: HeadSlots, tensors: Sequence[Tensor]) -> Tensor:
    """Every rank's tokens of this rank's heads, in the order in which that rank holds them.

    Args:
        tensors: [B, h g, N, D] with this rank's query heads, then any number up to two of
            [B, h, N, D'] with its KV heads; h of its n slots are real, it may be none.
    Returns:
        [p, B, s, W] as of ``send_heads``; padding heads are 0.
    """
    if _on_gpu(tensors[0]):
        from paradyse.kernels.triton_exchange import launch_send_tokens

        return launch_send_tokens(slots, tensors)
    return send_tokens_reference(slots, tensors)


def receive_heads(slots: HeadSlots, message: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """The transpose of ``send_heads``: all heads of this rank's tokens; replicas of a KV head are
    summed, in float32 or better.

    Args:
        message: [p, B, s, W], slice r from rank r. widths: of the heads of each tensor.
    Returns:
        [B, H, s, D], then [B, Hk, s, D'] of each other width.
    """
    if _on_gpu(message):
        from paradyse.kernels.triton_exchange import launch_receive_heads

        return launch_receive_heads(slots, message, widths)
    return receive_heads_reference(slots, message, widths)
