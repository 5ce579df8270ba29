"""Gradients that every rank computes whole: sent only if their bits are not the same.

Where ranks compute the same on devices that repeat their arithmetic, their gradients are equal, and
a small message tells that they are. Those that differ are averaged, so that all ranks go on from
the same bits; from then on they are all averaged while backward goes on, as nothing is saved.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis
from paradyse.distributed.checksums import bit_sums, repeatable
from paradyse.distributed.collectives import REPLICAS
from paradyse.distributed.replicas import average
from paradyse.weights.gradients import AverageGradients
from paradyse.weights.no_sync import GradientSync
from paradyse.weights.shard_comm import flatten, in_buckets, unflatten

log = logging.getLogger(__name__)


class Differed:
    """Of an axis: whether its ranks had other gradients where they were to be the same."""

    def __init__(self) -> None:
        self.once = False


def may_be_same(axis: Axis, device: torch.device) -> bool:
    """Whether gradients that all ranks of ``axis`` compute whole on ``device`` are worth to be
    compared; the same on every rank."""
    return repeatable(device) and not axis.session.of(Differed).once


class SameGradients(AverageGradients):
    """Whole weights unchanged; backward compares their gradients over the ranks of
    ``sync.replicas`` and averages those that differ, or keeps them as ``sync`` says."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sync: GradientSync = ctx.sync
        if sync.later:
            return AverageGradients.backward(ctx, *grads)
        there = [i for i, g in enumerate(grads) if g is not None]
        given = [grads[i] for i in there]
        out: list[Tensor | None] = [None] * len(grads)
        if given:
            message = collectives.start_all_gather(bit_sums(given), sync.replicas, REPLICAS)
            message.then(partial(averaged_if_other, given, sync.replicas))
            nodes = [ctx.next_functions[i][0] for i in there]
            for i, grad in zip(there, sync.arrive(message, given, nodes), strict=True):
                out[i] = grad
        return None, *out


def averaged_if_other(given: Sequence[Tensor], axis: Axis, sums: Tensor) -> list[Tensor]:
    """The gradients ``given``, those averaged over ``axis`` of which ranks have other ``sums``
    [p, n, 2]."""
    found = list(given)
    differs = (sums != sums[0]).any(2).any(0).tolist()
    other = [g for g, is_other in zip(given, differs, strict=True) if is_other]
    if not other:
        return found
    axis.session.of(Differed).once = True
    log.warning(
        "ranks computed other bits of %d of %d gradients from the same batch: from now on all are "
        "averaged where every rank computes the whole",
        len(other),
        len(given),
    )
    at = [i for i, is_other in enumerate(differs) if is_other]
    for bucket in in_buckets([g.nbytes for g in other], [g.dtype for g in other]):
        grads = [other[k] for k in bucket]
        joined = unflatten(average(flatten(grads), axis), [g.shape for g in grads])
        for k, grad in zip(bucket, joined, strict=True):
            found[at[k]] = grad
    return found
