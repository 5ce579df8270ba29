"""Gradients of weights: summed over the ranks of an axis, averaged over replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.lanes import GRADIENTS, lane_of
from paradyse.distributed.replicas import average
from paradyse.weights.no_sync import GradientSync
from paradyse.weights.partial_gradient import PartialGradient, own_part, rest_part
from paradyse.weights.shard_comm import in_buckets
from paradyse.weights.sharded_tensor import ShardedTensor, rows_for_use


class SumGradients(torch.autograd.Function):
    """Weights unchanged; backward sums their gradients over ranks and averages over replicas, or
    keeps them as ``sync`` says.

    One message carries many weights, since latency rules where weights are replicated. Each block
    is booked the bytes of its own weights (``owners``: a block id per weight).
    """

    @staticmethod
    def forward(ctx: Any, sync: GradientSync, owners: Sequence[int], *weights: Tensor) -> Any:
        ctx.of = sync, owners
        ctx.set_materialize_grads(False)
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sync, owners = ctx.of
        if sync.later:
            return None, None, *(g if g is None else own_part(g, g) for g in grads)
        lane, replicas = lane_of(sync.axis, GRADIENTS), sync.replicas

        def summed(index: Sequence[int], flat: Tensor) -> Tensor:
            shares: Counter[int] = Counter()
            for i in index:
                shares[owners[i]] += grads[i].nbytes
            return average(collectives.all_reduce_in_place(flat, lane, shares), replicas)

        return None, None, *_in_buckets(grads, summed)


class AverageGradients(torch.autograd.Function):
    """Weights, whole or sharded, unchanged; backward averages their gradients over replicas, or
    keeps them as ``sync`` says."""

    @staticmethod
    def forward(ctx: Any, sync: GradientSync, *weights: Tensor) -> Any:
        ctx.sync = sync
        ctx.set_materialize_grads(False)
        return tuple(w.detach() for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sync: GradientSync = ctx.sync
        if sync.later:
            as_they_are = type(None), PartialGradient
            return None, *(g if isinstance(g, as_they_are) else rest_part(g, g) for g in grads)

        def mean(index: Sequence[int], flat: Tensor) -> Tensor:
            return average(flat, sync.replicas, _reduce_dtype(grads[index[0]]))

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
    given, sizes = list(rows), [x.nbytes for x in rows.values()]
    kinds = [(x.dtype, _reduce_dtype(grads[i])) for i, x in rows.items()]
    out: list[Tensor | None] = [None] * len(grads)
    for bucket in ([given[k] for k in at] for at in in_buckets(sizes, kinds)):
        flat = reduce(bucket, torch.cat([rows[i].reshape(-1) for i in bucket]))
        parts = flat.split([rows[i].numel() for i in bucket])
        for i, part in zip(bucket, parts, strict=True):
            out[i] = part.view(rows[i].shape)
    return out


def _reduce_dtype(grad: Tensor) -> torch.dtype:
    return grad.reduce_dtype if isinstance(grad, ShardedTensor) else grad.dtype
