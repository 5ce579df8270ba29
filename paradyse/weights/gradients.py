"""Gradients of weights: summed over the ranks of an axis, averaged over replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.collectives import Pending
from paradyse.distributed.lanes import GRADIENTS, lane_of
from paradyse.distributed.replicas import start_average
from paradyse.weights.no_sync import GradientSync
from paradyse.weights.partial_gradient import PartialGradient, own_part, rest_part
from paradyse.weights.shard_comm import dense, flatten, in_buckets, unflatten
from paradyse.weights.sharded_tensor import ShardedTensor, reduce_dtype_of, rows_for_use

TOGETHER_BYTES = 25 * 2**20
"""Gradients of replicated weights are summed as soon as so many are there, as
DistributedDataParallel does (arXiv 2006.15704, section 3.2.2)."""

NUM_SUMS = 8
"""Where all gradients together are few, they are summed in so many parts: what is left for the end
of backward, where nothing hides it, is one of them. Where messages hide less, as where they need
the processors that compute, it is that share of so many: each part costs time of its own."""

LEAST_BYTES = 2**20
"""Parts are no smaller, as latency rules then."""


def joined_by_use(
    uses: Sequence[int], sizes: Sequence[int], hidden: float = 1.0
) -> dict[int, list[int]]:
    """Which gradients are summed together: by the step before which their weights pass through
    ``SumGradients``, the indices of weights, so that backward has ``TOGETHER_BYTES`` of gradients
    when it comes there, or a part of all, of ``NUM_SUMS`` times ``hidden``.

    Args:
        uses: per weight, the first step that reads it; backward has its gradient after that one.
        sizes: bytes of each.
        hidden: share of a message that computations hide, from 0 to 1.
    """
    found: dict[int, list[int]] = {}
    num_parts = max(1, round(NUM_SUMS * hidden))
    enough = min(TOGETHER_BYTES, max(LEAST_BYTES, sum(sizes) // num_parts))
    together, num_bytes = list[int](), 0
    last_first = sorted(range(len(uses)), key=lambda i: -uses[i])
    for at, i in enumerate(last_first):
        together.append(i)
        num_bytes += sizes[i]
        is_last = at + 1 == len(last_first)
        ends = is_last or uses[last_first[at + 1]] < uses[i]
        if ends and (is_last or num_bytes >= enough):
            found[uses[i]] = sorted(together)
            together, num_bytes = [], 0
    return found


class SumGradients(torch.autograd.Function):
    """Weights unchanged; backward starts to sum their gradients over ranks and to average them over
    replicas, or keeps them as ``sync`` says.

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
        (sync, owners), grads = ctx.of, dense(grads)
        if sync.later:
            return None, None, *(g if g is None else own_part(g, g) for g in grads)
        lane, replicas = lane_of(sync.axis, GRADIENTS), sync.replicas

        def start(index: Sequence[int], flat: Tensor) -> Pending:
            shares: Counter[int] = Counter()
            for i in index:
                shares[owners[i]] += grads[i].nbytes
            message = collectives.start_all_reduce(flat, lane, shares)
            return start_average(message.wait(), replicas) if replicas.size > 1 else message

        return None, None, *_in_buckets(ctx, sync, grads, start)


class AverageGradients(torch.autograd.Function):
    """Weights, whole or sharded, unchanged; backward starts to average their gradients over
    replicas, or keeps them as ``sync`` says."""

    @staticmethod
    def forward(ctx: Any, sync: GradientSync, *weights: Tensor) -> Any:
        ctx.sync = sync
        ctx.set_materialize_grads(False)
        return tuple(w.detach() for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sync: GradientSync = ctx.sync
        grads = dense(grads)
        if sync.later:
            as_they_are = type(None), PartialGradient
            return None, *(g if isinstance(g, as_they_are) else rest_part(g, g) for g in grads)

        def start(index: Sequence[int], flat: Tensor) -> Pending:
            return start_average(flat, sync.replicas, reduce_dtype_of(grads[index[0]]))

        return None, *_in_buckets(ctx, sync, grads, start)


def _in_buckets(
    ctx: Any,
    sync: GradientSync,
    grads: Sequence[Any],
    start: Callable[[Sequence[int], Tensor], Pending],
) -> list[Tensor | None]:
    """The gradients of the weights that ``ctx`` was given, as ``start`` brings them; None where
    there is none.

    Args:
        sync: of the call.
        grads: what this rank has of each gradient, or None.
        start: from indices of gradients of one dtype that are added up in one dtype, and their
            elements as one vector, to the message that brings the vector that replaces it.
    """
    out: list[Tensor | None] = [None] * len(grads)
    for bucket in _buckets(grads):
        given = [grads[i] for i in bucket]
        rows = [rows_for_use(g) for g in given]
        message, shapes = start(bucket, flatten(rows)), [x.shape for x in rows]
        del rows
        shards = [g if isinstance(g, ShardedTensor) else None for g in given]
        message.then(partial(_as_they_were, shapes, shards))
        nodes = [ctx.next_functions[i][0] for i in bucket]
        for i, grad in zip(bucket, sync.arrive(message, given, nodes), strict=True):
            out[i] = grad
    return out


def _buckets(grads: Sequence[Any]) -> Iterator[list[int]]:
    """Indices of those of ``grads`` that are there, by message."""
    given = [i for i, g in enumerate(grads) if g is not None]
    rows = [rows_for_use(grads[i]) for i in given]
    kinds = [(x.dtype, reduce_dtype_of(grads[i])) for i, x in zip(given, rows, strict=True)]
    for bucket in in_buckets([x.nbytes for x in rows], kinds):
        yield [given[k] for k in bucket]


def _as_they_were(
    shapes: Sequence[torch.Size], shards: Sequence[ShardedTensor | None], flat: Tensor
) -> list[Tensor]:
    """The gradients whose rows are in ``flat`` [n]."""
    pairs = zip(unflatten(flat, shapes), shards, strict=True)
    return [rows if shard is None else shard.with_rows(rows) for rows, shard in pairs]
