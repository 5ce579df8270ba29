"""Gradients of weights: summed over the ranks of an axis, averaged over replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis
from paradyse.distributed.replicas import average, buckets
from paradyse.weights.sharded_tensor import ShardedTensor


class SumGradients(torch.autograd.Function):
    """Weights as they are; backward sums what each rank computed of their gradients, and averages
    the sums over replicas.

    One message for many weights, since latency rules where weights are replicated; each block is
    booked the bytes of its own (``owners``: a block id per weight).
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
        out: list[Tensor | None] = [None] * len(grads)
        for bucket in buckets(grads):
            flat = torch.cat([grads[i].reshape(-1) for i in bucket])
            shares: dict[int, int] = {}
            for i in bucket:
                size = grads[i].numel() * grads[i].element_size()
                shares[owners[i]] = shares.get(owners[i], 0) + size
            total = average(collectives.all_reduce_in_place(flat, axis, shares), replicas)
            for i, part in zip(
                bucket, total.split([grads[i].numel() for i in bucket]), strict=True
            ):
                out[i] = part.view(grads[i].shape)
        return None, None, None, *out


class AverageGradients(torch.autograd.Function):
    """Weights, whole or sharded, as they are; backward averages their gradients over replicas."""

    @staticmethod
    def forward(ctx: Any, replicas: Axis, *weights: Tensor) -> Any:
        ctx.replicas = replicas
        ctx.set_materialize_grads(False)
        return tuple(w.detach() for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        held = [g.local if isinstance(g, ShardedTensor) else g for g in grads]
        out = list(grads)
        for bucket in buckets(held):
            flat = average(torch.cat([held[i].reshape(-1) for i in bucket]), ctx.replicas)
            parts = flat.split([held[i].numel() for i in bucket])
            for i, part in zip(bucket, parts, strict=True):
                rows, g = part.view(held[i].shape), grads[i]
                if isinstance(g, ShardedTensor):
                    rows = ShardedTensor(rows, g.placement, g.shape)
                out[i] = rows
        return None, *out
