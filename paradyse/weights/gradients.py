"""Gradients of weights: summed over the ranks of an axis, averaged over replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis
from paradyse.distributed.replicas import average
from paradyse.weights.shard_comm import by_dtype
from paradyse.weights.sharded_tensor import ShardedTensor, rows_for_use

BUCKET_BYTES = 64 * 2**20
"""A message of gradients holds about this much: it bounds the copy that a message needs."""


class SumGradients(torch.autograd.Function):
    """Weights unchanged; backward sums their gradients over ranks and averages over replicas.

    One message carries many weights, since latency rules where weights are replicated. Each block
    is booked the bytes of its own weights (``owners``: a block id per weight).
    """

    @staticmethod
    def forward(
        ctx: Any, axis: Axis, replicas: Axis, owners: Sequence[int], *weights: Tensor
    ) -> Any:
        ctx.where = (axis, replicas, owners)
        ctx.set_materialize_grads(False)
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        axis, replicas, owners = ctx.where

        def summed(index: Sequence[int], flat: Tensor) -> Tensor:
            shares: Counter[int] = Counter()
            for i in index:
                shares[owners[i]] += grads[i].nbytes
            return average(collectives.all_reduce_in_place(flat, axis, shares), replicas)

        return None, None, None, *_in_buckets(grads, summed)


class AverageGradients(torch.autograd.Function):
    """Weights, whole or sharded, unchanged; backward averages their gradients over replicas."""

    @staticmethod
    def forward(ctx: Any, replicas: Axis, *weights: Tensor) -> Any:
        ctx.replicas = replicas
        ctx.set_materialize_grads(False)
        return tuple(w.detach() for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        def mean(index: Sequence[int], flat: Tensor) -> Tensor:
            return average(flat, ctx.replicas, _reduce_dtype(grads[index[0]]))

        pairs = zip(grads, _in_buckets(grads, mean), strict=True)
        return None, *(g.with_rows(m) if isinstance(g, ShardedTensor) else m for g, m in pairs)


def _in_buckets(
    grads: Sequence[Any], reduce: Callable[[Sequence[int], Tensor], Tensor]
) -> list[Tensor | None]:
    """What this rank holds of each gradient as ``reduce`` returns it; None where there is none.

    Args:
        grads: gradients, or None.
        reduce: from indices of gradients of one dtype that are added up in one dtype, and their
            elements as one vector, to the vector that replaces it.
    """
    rows = {i: rows_for_use(g) for i, g in enumerate(grads) if g is not None}
    given = list(rows)
    buckets: list[list[int]] = []
    for alike in by_dtype(list(rows.values()), [_reduce_dtype(grads[i]) for i in given]):
        room = 0
        for i in (given[k] for k in alike):
            if rows[i].nbytes > room:
                buckets.append([])
                room = BUCKET_BYTES
            buckets[-1].append(i)
            room -= rows[i].nbytes
    out: list[Tensor | None] = [None] * len(grads)
    for bucket in buckets:
        flat = reduce(bucket, torch.cat([rows[i].reshape(-1) for i in bucket]))
        parts = flat.split([rows[i].numel() for i in bucket])
        for i, part in zip(bucket, parts, strict=True):
            out[i] = part.view(rows[i].shape)
    return out


def _reduce_dtype(grad: Tensor) -> torch.dtype:
    return grad.reduce_dtype if isinstance(grad, ShardedTensor) else grad.dtype
