"""Tiles that are alike, computed in one call of a kernel: the blocks of a sliding window.

A call of few rows costs as much to start as to compute, most of all where threads wait for each
other. Blocks of a window have the same shape and the same mask, each so many rows and keys behind
the one before, so they are one batch: queries as views, and keys as views that overlap.

``at`` is the first row or key of the first tile, ``size`` how many a tile has, ``step`` how far
apart tiles are, and ``count`` how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paradyse.kernels.attention_core import Backward
from paradyse.kernels.attention_mask import MASKED, TILE_BYTES, Intervals, Tile


def join_alike(tiles: Sequence[Tile], intervals: Intervals) -> list[Tile]:
    """``tiles`` of ``intervals``, with one in place of several that are alike and have their rows
    to themselves."""
    found: list[Tile] = []
    for i, tile in enumerate(tiles):
        is_last = i + 1 == len(tiles) or tiles[i + 1].first  # no later one goes on with the rows
        if found and is_last and _follows(found[-1], tile, intervals):
            found[-1] = replace(found[-1], count=found[-1].count + 1)
        else:
            found.append(tile)
    return found


def _follows(before: Tile, tile: Tile, intervals: Intervals) -> bool:
    if not tile.first or tile != replace(before.moved(before.count), count=1):
        return False
    if tile.kind != MASKED:
        return True
    return torch.equal(intervals.relative_to(before), intervals.relative_to(tile))


def in_batches(tile: Tile, bytes_per_key: int) -> Iterator[Tile]:
    """The tiles that ``tile`` stands for, as many together as have ``TILE_BYTES`` of keys.

    Args:
        bytes_per_key: of a key, a value or their gradients, of all heads.
    """
    most = max(1, TILE_BYTES // max(1, tile.num_keys * bytes_per_key))
    for i in range(0, tile.count, most):
        part = tile.moved(i)
        yield replace(part, count=min(most, tile.count - i))


def stacked(x: Tensor, at: int, size: int, step: int, count: int) -> Tensor:
    """Views of ``x`` [1, H, S, ..] as a batch [count, H, size, ..], which overlap where ``step`` is
    less than ``size``."""
    _, heads, _, *rest = x.shape
    (_, of_head, of_token, *others) = x.stride()
    strides = step * of_token, of_head, of_token, *others
    start = x.storage_offset() + at * of_token
    return x.as_strided((count, heads, size, *rest), strides, start)


def stacked_rows(x: Tensor, tile: Tile) -> Tensor:
    """``stacked`` of ``x`` at the rows of ``tile``."""
    return stacked(x, tile.r0, tile.num_rows, tile.num_rows, tile.count)


def stacked_keys(x: Tensor, tile: Tile) -> Tensor:
    """``stacked`` of ``x`` at the keys of ``tile``."""
    return stacked(x, tile.k0, tile.num_keys, tile.num_rows, tile.count)


def cut_alike(given: Backward, tile: Tile) -> Backward:
    """``Backward.cut`` of ``given``, of one sequence, for all that ``tile`` stands for."""
    grad_out, q, k, v, out, lse = given
    rows, keys = (grad_out, q, out, lse), (k, v)
    grad_out, q, out, lse = (stacked_rows(x, tile) for x in rows)
    k, v = (stacked_keys(x, tile) for x in keys)
    return Backward(grad_out, q, k, v, out, lse)


def put_rows(x: Tensor, rows: Tensor, tile: Tile) -> None:
    """Write ``rows`` [count, H, R, ..], of the rows of ``tile``, into ``x`` [1, H, S, ..]."""
    stacked_rows(x, tile).copy_(rows)


def add_rows(x: Tensor, rows: Tensor, tile: Tile) -> None:
    """Add ``rows`` [count, H, R, ..], of the rows of ``tile``, to ``x`` [1, H, S, ..]."""
    stacked_rows(x, tile).add_(rows)


def add_keys(x: Tensor, keys: Tensor, tile: Tile) -> None:
    """Add ``keys`` [count, H, K, ..], of the keys of ``tile``, which overlap, to ``x``
    [1, H, S, ..]: in turns that do not."""
    step = tile.num_rows
    for begin in range(0, tile.num_keys, step):
        size = min(step, tile.num_keys - begin)
        target = stacked(x, tile.k0 + begin, size, step, tile.count)
        target.add_(keys[:, :, begin : begin + size])
