"""Vectors that blocks read whole, such as the weights of their norms: one message for all of them.

A block whose own rows of its matrices lie here gathers little else. As messages of their own these
few KiB cost a block two gathers and a scatter, each with a latency and a host that starts it and
waits for it. Instead a call begins with one gather for all such blocks, and its backward ends with
one scatter of their gradients. The vectors stay as long as the call's graph: they are small beside
a block's values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed.collectives import traffic, travel_dtype
from paradyse.weights.cast_shard import CastShard
from paradyse.weights.shard_comm import by_dtype, gather_shards
from paradyse.weights.sharded_tensor import ShardedTensor
from paradyse.weights.unshard import Gathered, Shelf, gather_by

Shard = ShardedTensor | CastShard


class _Kept(Gathered):
    """Whole vectors, which stay.

    Args:
        shards: the vectors.
        block_ids: of the block that each is for.
        between_id: of what is between blocks, which the messages are booked to at first.
        shelf: of the call.
    """

    def __init__(
        self, shards: Sequence[Shard], block_ids: Sequence[int], between_id: int, shelf: Shelf
    ) -> None:
        super().__init__(shards, between_id, True, shelf)
        self.block_ids = block_ids

    def make(self) -> list[Tensor]:
        out = gather_shards(self.shards, self.block_id)
        self._book("all_gather", [*range(len(out))], [x.dtype for x in out])
        return out

    def free(self) -> None:
        """They stay."""

    def scattered(self, grads: Mapping[int, Tensor]) -> None:
        axis = self.shards[0].placement.axis
        pairs = [(self.shards[i], g) for i, g in grads.items()]
        dtypes = [travel_dtype(g.dtype, s.reduce_dtype, axis) for s, g in pairs]
        self._book("reduce_scatter", [*grads], dtypes)

    def _book(self, what: str, places: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
        """Book the messages ``what``, of the vectors at ``places`` in ``dtypes``, to the blocks:
        each has its share of what they hold."""
        axis = self.shards[0].placement.axis
        between = traffic(axis, self.block_id).sent_bytes
        vectors = [torch.empty(0, dtype=dtype, device="meta") for dtype in dtypes]
        for index in by_dtype(vectors, [self.shards[i].reduce_dtype for i in places]):
            group = [places[k] for k in index]
            shards = [self.shards[i] for i in group]
            rows = [[s.placement.numel(s.shape, r) for s in shards] for r in range(axis.size)]
            sent = max(map(sum, rows)) * dtypes[index[0]].itemsize * (axis.size - 1)
            sizes = [s.shape.numel() for s in shards]
            for i, size in zip(group, sizes, strict=True):
                num_bytes = sent * size // sum(sizes)
                between[what] -= num_bytes
                traffic(axis, self.block_ids[i]).sent_bytes[what] += num_bytes


class _Passed(Gathered):
    """Of a block whose weights stay: nothing comes or goes, but backward fetches what is before."""

    def __init__(self, block_id: int, summed: bool, shelf: Shelf) -> None:
        super().__init__([], block_id, summed, shelf)
        self.is_filled = True

    def free(self) -> None:
        """They stay."""

    def release(self, outputs: Sequence[Any], again: Sequence[int] | None = None) -> list[Any]:
        return super().release(outputs, ())


class Vectors:
    """Of one call.

    Args:
        between_id: of what is between blocks.
    """

    def __init__(self, between_id: int) -> None:
        self.between_id = between_id
        self._wholes: dict[int, Tensor] = {}
        """By the identity of their shards."""

    def gather(self, steps: Iterable[tuple[int, Collection[Shard]]], shelf: Shelf) -> None:
        """Bring the vectors of those steps that gather nothing else.

        Args:
            steps: the block id of each step that computes a part of the gradients, and the weights
                that it gathers.
            shelf: of the call.
        """
        found: dict[int, tuple[Any, int]] = {}
        for block_id, shards in steps:
            if all(len(s.shape) < 2 for s in shards):
                found |= {id(s): (s, block_id) for s in shards if id(s) not in found}
        if found:
            shards, block_ids = zip(*found.values(), strict=True)
            wholes, _ = gather_by(_Kept(shards, block_ids, self.between_id, shelf))
            self._wholes = dict(zip(found, wholes, strict=True))

    def have(self, shards: Iterable[Shard], summed: bool) -> bool:
        """Whether all ``shards`` are here, for a step that computes a part of the gradients:
        ``summed``."""
        return summed and all(id(s) in self._wholes for s in shards)

    def take(
        self, shards: Iterable[Shard], block_id: int, summed: bool, shelf: Shelf
    ) -> tuple[list[Tensor], Gathered | None]:
        """What ``unshard.gather`` gives for ``shards``, ``block_id``, ``summed`` and ``shelf``.
        There is nothing to release; backward starts on the weights of the block before."""
        gathered = _Passed(block_id, summed, shelf) if torch.is_grad_enabled() else None
        return [self._wholes[id(s)] for s in shards], gathered
