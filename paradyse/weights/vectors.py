"""Vectors that blocks read whole, such as the weights of their norms: one message for all of them.

A block whose own rows of its matrices lie here gathers little else. As messages of their own these
few KiB cost a block two gathers and a scatter, each with a latency and a host that starts it and
waits for it. Instead a call begins with one gather for all such blocks, and its backward ends with
one scatter of their gradients. In between the vectors stay: they are small beside a block's values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed.collectives import traffic, travel_dtype
from paradyse.weights.sharded_tensor import CastShard, ShardedTensor
from paradyse.weights.unshard import Gathered, Shelf, gather_by

Shard = ShardedTensor | CastShard


class _Vectors(Gathered):
    """Whole vectors, which stay until backward has their gradients.

    Args:
        shards: the vectors.
        block_ids: of the block that each is for.
        shelf: of the call.
    """

    def __init__(self, shards: Sequence[Shard], block_ids: Sequence[int], shelf: Shelf) -> None:
        super().__init__(shards, block_ids[0], True, shelf)
        self.block_ids = block_ids

    def make(self) -> list[Tensor]:
        out = super().make()
        self._book("all_gather", {i: s.dtype for i, s in enumerate(self.shards)})
        return out

    def free(self) -> None:
        """They stay."""

    def scattered(self, grads: Mapping[int, Tensor]) -> None:
        at = self.shards[0].placement.axis
        of = {i: travel_dtype(g.dtype, self.shards[i].reduce_dtype, at) for i, g in grads.items()}
        self._book("reduce_scatter", of)

    def _book(self, what: str, dtypes: Mapping[int, torch.dtype]) -> None:
        """Have each block answer for its own bytes of the messages ``what``, which were booked to
        the first one: of vectors that travelled in ``dtypes``."""
        axis = self.shards[0].placement.axis
        first = traffic(axis, self.block_id).sent_bytes
        for i, dtype in dtypes.items():
            shard, own = self.shards[i], traffic(axis, self.block_ids[i]).sent_bytes
            most = max(shard.placement.numel(shard.shape, r) for r in range(axis.size))
            num_bytes = most * dtype.itemsize * (axis.size - 1)
            first[what] -= num_bytes
            own[what] += num_bytes


def gather_vectors(
    steps: Iterable[tuple[int, Collection[Shard]]], shelf: Shelf
) -> dict[int, Tensor]:
    """The whole vectors, by the identity of their shards, of those steps that gather nothing else.

    Args:
        steps: the block id of each step that computes a part of the gradients, and the weights that
            it gathers.
        shelf: of the call.
    """
    found: dict[int, tuple[Any, int]] = {}
    for block_id, shards in steps:
        if all(len(s.shape) < 2 for s in shards):
            found |= {id(s): (s, block_id) for s in shards if id(s) not in found}
    if not found:
        return {}
    shards, block_ids = zip(*found.values(), strict=True)
    wholes, _ = gather_by(_Vectors(shards, block_ids, shelf))
    return dict(zip(found, wholes, strict=True))
