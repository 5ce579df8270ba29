"""Messages between shards and whole tensors: one for all tensors of a dtype.

A message holds, for each rank, that rank's rows of one tensor after the other. Ranks may hold
different numbers of rows, so each rank's part is as long as the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.held import Coming, hold
from paradyse.distributed.lanes import GATHERS, GRADIENTS, lane_of
from paradyse.weights.layout import Shard, copy_all

Messages = list[tuple[list[int], collectives.Pending]]
"""Indices of tensors, and the message that brings them."""

Gathers = Sequence[tuple[list[int], Coming]]
"""The same of weights, which may be held back."""


def by_dtype(
    tensors: Sequence[Any], others: Sequence[torch.dtype] | None = None
) -> list[list[int]]:
    """Indices of ``tensors`` by their dtype, and by that of ``others``."""
    found: dict[Any, list[int]] = {}
    for i, x in enumerate(tensors):
        found.setdefault((x.dtype, others and others[i]), []).append(i)
    return list(found.values())


BUCKET_BYTES = 64 * 2**20
"""A message of gradients holds about this much: it bounds the copy that a message needs."""


def in_buckets(sizes: Sequence[int], kinds: Sequence[Any]) -> list[list[int]]:
    """Indices of gradients that share a message: of one kind, and ``BUCKET_BYTES`` together or one
    that is larger.

    Args:
        sizes: bytes of each.
        kinds: of each, what those of one message have in common.
    """
    alike: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(i)
    buckets: list[list[int]] = []
    for indices in alike.values():
        room = 0
        for i in indices:
            if sizes[i] > room:
                buckets.append([])
                room = BUCKET_BYTES
            buckets[-1].append(i)
            room -= sizes[i]
    return buckets


def split_rows(flat: Tensor, shards: Sequence[Shard], rank: int) -> list[Tensor]:
    """Views of a message's part for one rank, a tensor each.

    Args:
        flat: at least the elements of all rows of ``shards`` that ``rank`` holds, [n].
        shards: the tensors, in the order of the message.
        rank: whose rows they are.
    """
    sizes = [s.placement.numel(s.shape, rank) for s in shards]
    parts = flat[: sum(sizes)].split(sizes)
    return [x.view(s.placement.shape(s.shape, rank)) for x, s in zip(parts, shards, strict=True)]


def _num_elements(shards: Sequence[Shard]) -> list[int]:
    """Elements that each rank holds of all ``shards``."""
    ranks = range(shards[0].placement.axis.size)
    return [sum(s.placement.numel(s.shape, r) for s in shards) for r in ranks]


def start_gather(shards: Sequence[Shard], block_id: int, held: bool = False) -> Gathers:
    """Start bringing the rows of ``shards`` together; ``gather_shards`` waits for them.

    Args:
        shards: of one axis.
        block_id: of the block that the bytes are booked to.
        held: start behind a block's own next message.
    """
    out: list[tuple[list[int], Coming]] = []
    rows = [s.for_use for s in shards]
    for index in by_dtype(rows):
        group = [shards[i] for i in index]
        axis = lane_of(group[0].placement.axis, GATHERS)
        flat = [rows[i].reshape(-1) for i in index]
        totals = _num_elements(group)
        short = max(totals) - totals[axis.rank]
        if short:
            flat.append(flat[0].new_zeros(short))
        mine = flat[0] if len(flat) == 1 else torch.cat(flat)
        start = partial(collectives.start_all_gather, mine, axis, block_id)
        out.append((index, hold(start, axis) if held else start()))
    return out


def gather_shards(
    shards: Sequence[Shard],
    block_id: int,
    out: Sequence[Tensor] | None = None,
    coming: Gathers | None = None,
) -> list[Tensor]:
    """The whole tensors, on every rank.

    Args:
        shards: of one axis.
        block_id: of the block that the bytes are booked to.
        out: tensors of the whole shapes to write into; None makes them.
        coming: from ``start_gather`` of the same ``shards``; None starts it now.
    """
    wholes = list(out) if out is not None else [s.new_whole() for s in shards]
    for index, pending in coming if coming is not None else start_gather(shards, block_id):
        group, every = [shards[i] for i in index], pending.wait()
        copy_all(
            place
            for rank, part in enumerate(every)
            for i, rows in zip(index, split_rows(part, group, rank), strict=True)
            for place in shards[i].placement.places(wholes[i], rank, rows)
        )
    return wholes


def scatter_gradients(
    grads: Sequence[Tensor], shards: Sequence[Shard], block_id: int
) -> list[Tensor]:
    """Sums over ranks of ``grads``, of which each rank gets the rows that it holds: added up in the
    dtype that the tensor asks for, and given in that in which it is trained.

    Args:
        grads: what this rank computed of the gradients of the whole tensors.
        shards: the tensors, of one axis.
        block_id: of the block that the bytes are booked to.
    """
    out: list[Any] = [None] * len(grads)
    for index, message in start_scatter(grads, shards, block_id):
        for i, rows in zip(index, message.wait(), strict=True):
            out[i] = rows
    return out


def start_scatter(grads: Sequence[Tensor], shards: Sequence[Shard], block_id: int) -> Messages:
    """Start ``scatter_gradients`` of ``grads``, ``shards`` and ``block_id``: the result of each
    message is a list of sums."""
    out: Messages = []
    for index in by_dtype(grads, [s.reduce_dtype for s in shards]):
        group, totals = [shards[i] for i in index], _num_elements([shards[i] for i in index])
        axis, dtype = lane_of(group[0].placement.axis, GRADIENTS), group[0].reduce_dtype
        travels = collectives.travel_dtype(grads[index[0]].dtype, dtype, axis)
        sent = grads[index[0]].new_empty(axis.size, max(totals), dtype=travels)
        if min(totals) < max(totals):
            sent[:, min(totals) :].zero_()
        copy_all(
            (to, of)
            for rank, part in enumerate(sent)
            for i, rows in zip(index, split_rows(part, group, rank), strict=True)
            for of, to in shards[i].placement.places(grads[i], rank, rows)
        )
        message = collectives.start_reduce_scatter(sent, axis, block_id, dtype)
        out.append((index, message.then(partial(_own_rows, shards=group))))
    return out


def _own_rows(flat: Tensor, shards: Sequence[Shard]) -> list[Tensor]:
    """This rank's rows of all ``shards``, from the part of a message that is its own."""
    rank = shards[0].placement.axis.rank
    pairs = zip(split_rows(flat, shards, rank), shards, strict=True)
    return [rows.to(s.trained_dtype) for rows, s in pairs]


def dense(grads: Sequence[Any]) -> tuple[Any, ...]:
    """``grads`` of whole weights, those of look-ups with ``sparse=True`` as dense tensors, which
    ranks add up."""
    strided = torch.strided
    return tuple(g if g is None or g.layout is strided else g.to_dense() for g in grads)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of all ``tensors``, of one dtype, as one vector, [n]."""
    return torch.cat([x.reshape(-1) for x in tensors])


def unflatten(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views of ``flat`` [n] of these ``shapes``, one behind the other."""
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
