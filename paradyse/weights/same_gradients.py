"""Gradients that every rank computes whole: sent only if their bits are not the same.

Where ranks compute the same on devices that repeat their arithmetic, their gradients are equal, and
the message that tells of backward tells that they are. Those that differ are averaged, so that all
ranks go on from the same bits; from then on they are all averaged while backward goes on, as
nothing is saved.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis
from paradyse.distributed.checksums import bit_sums, repeatable
from paradyse.distributed.collectives import REPLICAS
from paradyse.distributed.facts import digest
from paradyse.distributed.replicas import average
from paradyse.weights.gradients import AverageGradients
from paradyse.weights.no_sync import GradientSync
from paradyse.weights.shard_comm import dense, flatten, in_buckets, unflatten

log = logging.getLogger(__name__)


FEW_BYTES = 2**17
"""Gradients of fewer bytes are compared together: to launch what reads one of them takes longer
than to copy it."""


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
    ``sync.replicas`` and averages those that differ, or keeps them as ``sync`` says. It does so
    last of its graph, so that nothing there is left to compute while it waits, and autograd takes
    the gradients as they are."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sync: GradientSync = ctx.sync
        if sync.later:
            return AverageGradients.backward(ctx, *grads)
        grads = dense(grads)
        there = [i for i, g in enumerate(grads) if g is not None]
        given = [grads[i] for i in there]
        out: list[Tensor | None] = [None] * len(grads)
        if given:
            groups = compared_together(given)
            sums = bit_sums([_as_one([given[i] for i in group]) for group in groups])
            if not sync.have_same(digest(sums.tolist())):
                told = collectives.all_gather(sums, sync.replicas, REPLICAS)
                given = averaged_if_other(given, groups, sync.replicas, told)
            for i, grad in zip(there, given, strict=True):
                out[i] = grad
        return None, *out


def compared_together(grads: Sequence[Tensor]) -> list[list[int]]:
    """Indices of those of ``grads`` that are compared as one: small ones of one dtype, and each of
    the others by itself."""
    sizes = [g.nbytes for g in grads]
    small = [i for i, n in enumerate(sizes) if n < FEW_BYTES]
    together = in_buckets([sizes[i] for i in small], [grads[i].dtype for i in small])
    alone = [[i] for i, n in enumerate(sizes) if n >= FEW_BYTES]
    return [[small[k] for k in bucket] for bucket in together] + alone


def _as_one(grads: Sequence[Tensor]) -> Tensor:
    return grads[0] if len(grads) == 1 else flatten(grads)


def averaged_if_other(
    given: Sequence[Tensor], groups: Sequence[Sequence[int]], axis: Axis, sums: Tensor
) -> list[Tensor]:
    """The gradients ``given``, of which those ``groups`` are averaged over ``axis`` of which ranks
    have other ``sums`` [p, groups, 2]."""
    found = list(given)
    differs = (sums != sums[0]).any(2).any(0).tolist()
    other = [i for g, is_other in zip(groups, differs, strict=True) if is_other for i in g]
    if not other:
        return found
    axis.session.of(Differed).once = True
    log.warning(
        "ranks computed other bits of gradients from the same batch: %d of %d are averaged, and "
        "from now on all where every rank computes the whole",
        len(other),
        len(given),
    )
    grads = [given[i] for i in other]
    for bucket in in_buckets([g.nbytes for g in grads], [g.dtype for g in grads]):
        joined = average(flatten([grads[k] for k in bucket]), axis)
        for k, grad in zip(
            bucket, unflatten(joined, [grads[k].shape for k in bucket]), strict=True
        ):
            found[other[k]] = grad
    return found
