"""The data-parallel axis: replicas that hold different batches and step together.

What is trained is the mean over replicas of the losses that their calls return. Where the graph
takes the loss as a mean over tokens, every replica returns the mean over the tokens of all
replicas, as one process would for the joined batch, so replicas with more tokens weigh more.
Gradients of weights are averaged over the replicas during backward (``weights/gradients.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis, axis_named
from paradyse.distributed.collectives import REPLICAS, Pending


@torch.library.custom_op("paradyse::sum_over_replicas", mutates_args=())
def sum_over_replicas(x: Tensor, axis: str) -> Tensor:
    """Sum of ``x`` over the axis of replicas named ``axis``. Every replica returns the sum, so
    backward sums their gradients."""
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


def average(flat: Tensor, replicas: Axis, dtype: torch.dtype | None = None) -> Tensor:
    """The mean over ``replicas`` of what each of them holds in ``flat``, which is overwritten.

    Args:
        flat: as many elements on each.
        replicas: the data-parallel axis.
        dtype: in which the values travel and are added up; None: that of ``flat``.
    """
    mean: Tensor = start_average(flat, replicas, dtype).wait()
    return mean


def start_average(flat: Tensor, replicas: Axis, dtype: torch.dtype | None = None) -> Pending:
    """Start ``average`` of ``flat`` over ``replicas``, added up in ``dtype``."""
    if replicas.size == 1:
        return Pending([], flat, "all_reduce", replicas, REPLICAS, None)
    given, total = flat.dtype, flat.to(dtype or flat.dtype)
    message = collectives.start_all_reduce(total, replicas, {REPLICAS: total.nbytes})
    return message.then(lambda total: total.div_(replicas.size).to(given))
