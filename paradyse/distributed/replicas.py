"""The data-parallel axis: replicas that hold different batches and step together.

What is trained is the mean over replicas of the losses that their calls return. A loss that the
graph takes as a mean over tokens is first joined: every replica returns the mean over the tokens of
all of them, as one process would for the joined batch, so replicas with more tokens weigh more.
Gradients are averaged over the replicas when a step's backward is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis, axis_named

REPLICAS = collectives.register_block("data parallel")
"""Block id of messages between replicas."""

BUCKET_BYTES = 64 * 2**20
"""A message of gradients holds about this much: it bounds the copy that a message needs."""


@torch.library.custom_op("paradyse::sum_over_replicas", mutates_args=())
def sum_over_replicas(x: Tensor, axis: str) -> Tensor:
    """Sum of ``x`` over the replicas. Each returns it, so backward sums their gradients."""
    return collectives.all_reduce(x, axis_named(axis), REPLICAS)


@sum_over_replicas.register_fake
def _(x: Tensor, axis: str) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.axis = inputs[1]


sum_over_replicas.register_autograd(
    lambda ctx, g: (sum_over_replicas(g, ctx.axis), None), setup_context=_save
)


SUM_OVER_REPLICAS = torch.ops.paradyse.sum_over_replicas.default


def buckets(tensors: Sequence[Tensor | None]) -> list[list[int]]:
    """Indices of the tensors there are, by dtype, in messages of about ``BUCKET_BYTES``."""
    found: list[list[int]] = []
    for dtype in dict.fromkeys(t.dtype for t in tensors if t is not None):
        room = 0
        for i, t in enumerate(tensors):
            if t is None or t.dtype != dtype:
                continue
            size = t.numel() * t.element_size()
            if size > room:
                found.append([])
                room = BUCKET_BYTES
            found[-1].append(i)
            room -= size
    return found


def average(flat: Tensor, replicas: Axis) -> Tensor:
    """Mean over replicas of ``flat``, in place."""
    if replicas.size > 1:
        size = flat.numel() * flat.element_size()
        collectives.all_reduce_in_place(flat, replicas, {REPLICAS: size}).div_(replicas.size)
    return flat
