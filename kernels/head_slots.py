"""The heads that each rank computes where heads are split instead of tokens.

Every rank takes the same number of *slots*, a slot being one KV head with (a part of) its query
heads. KV heads are replicated where that spreads the work better, as it must where p exceeds them;
what is left over is padding, sent but not computed.

Methods take tensors ``x`` of tokens by heads, where s counts tokens, p ranks, n ``slots_per_rank``
and g ``heads_per_slot``. A ``width`` is that of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from paradyse.kernels.kept import Kept

_HEAD_IDS = Kept()


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

    def head_ids(self, rank: int, device: torch.device, first: int = 0) -> Tensor:
        """Query head [real slots * heads per slot] int64 of each head that ``rank`` computes, on
        ``device``, the same tensor at each call; one that exists stands in for a missing one.

        Args:
            first: the number of the first of all these heads, where there are others before them.
        """

        def make() -> Tensor:
            ids = self.q[rank][: self.real_slots(rank) * self.heads_per_slot]
            numbers = [first + max(0, i) for i in ids]
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        return _HEAD_IDS.get((self, rank, device, first), make)

    def spread_queries(self, x: Tensor) -> Tensor:
        """[B, s, H, D] to [B, s, p, n g D]: each rank's slots."""
        b, s, _, d = x.shape
        group, g, r = self.group, self.heads_per_slot, self.replicas
        if r * g > group:
            x = F.pad(x.reshape(b, s, self.num_kv_heads, group, d), (0, 0, 0, r * g - group))
        return self._to_ranks(x.reshape(b, s, self.num_kv_heads * r, g * d))

    def collect_queries(self, x: Tensor, width: int) -> Tensor:
        """The inverse of ``spread_queries``: [B, s, p, n g D] to [B, s, H, D]."""
        b, s = x.shape[:2]
        group, g, r = self.group, self.heads_per_slot, self.replicas
        slots = self.num_ranks * self.slots_per_rank
        x = x.reshape(b, s, slots, g * width)[:, :, : self.num_kv_heads * r]
        x = x.reshape(b, s, self.num_kv_heads, r * g, width)[:, :, :, :group]
        return x.reshape(b, s, self.num_heads, width)

    def spread_keys(self, x: Tensor) -> Tensor:
        """[B, s, Hk, D] to [B, s, p, n D], replicated."""
        return self._to_ranks(x if self.replicas == 1 else x.repeat_interleave(self.replicas, 2))

    def sum_keys(self, x: Tensor, width: int) -> Tensor:
        """The transpose of ``spread_keys``, to [B, s, Hk, D]: replicas are summed."""
        b, s = x.shape[:2]
        x = x.reshape(b, s, -1, width)[:, :, : self.num_kv_heads * self.replicas]
        if self.replicas == 1:
            return x
        return x.reshape(b, s, self.num_kv_heads, self.replicas, width).sum(3)

    def _to_ranks(self, x: Tensor) -> Tensor:
        b, s, slots, w = x.shape
        padding = self.num_ranks * self.slots_per_rank - slots
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        return x.reshape(b, s, self.num_ranks, self.slots_per_rank * w)

    def message_heads(self, num_tensors: int) -> list[int]:
        """Heads, padding included, that a message holds of each of ``num_tensors`` tensors: the
        first has query heads, the others KV heads.
        """
        n = self.slots_per_rank
        return [self.queries_per_rank] + [n] * (num_tensors - 1)

    def columns(self, widths: Sequence[int]) -> list[int]:
        """Columns of a message that each tensor takes, from the ``widths`` of their heads."""
        return [h * w for h, w in zip(self.message_heads(len(widths)), widths)]
