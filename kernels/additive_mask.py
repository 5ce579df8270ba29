"""What is added to the scores of a tile: masks and biases; the gradients of biases.

``q_runs`` and ``kv_runs`` are the positions of the queries and of the keys, ``spec`` the attention
of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from paradyse.kernels.attention_mask import (
    MASKED,
    AttentionSpec,
    Intervals,
    Runs,
    Tile,
    run_positions,
)


def _of_batch(x: Tensor, batch: slice) -> Tensor:
    return x if x.shape[0] == 1 else x[batch]


def bias_planes(spec: AttentionSpec, num_heads: int) -> int:
    """How many numbers the bias of ``spec`` has for a pair of ``num_heads`` heads, over all
    sequences; 0 without a bias.
    """
    if spec.bias is None:
        return 0
    batch, heads = spec.bias.shape[:2] if spec.bias.dim() == 4 else (1, spec.bias.shape[0])
    return batch * min(heads, num_heads)


def join_sides(bias: Tensor) -> Tensor:
    """``bias`` [H, 2, S] by distance as [H, 2 S - 1]: what is added for the key at j of the query
    at i stands at j - i + S - 1.
    """
    return torch.cat([bias[:, 0, 1:].flip(1), bias[:, 1]], 1)


def part_sides(joined: Tensor) -> Tensor:
    """The transpose of ``join_sides``, of ``joined`` [H, 2 S - 1]."""
    length = (joined.shape[1] + 1) // 2
    behind = F.pad(joined[:, : length - 1].flip(1), (1, 0))
    return torch.stack([behind, joined[:, length - 1 :]], 1)


def _bias_tile(
    spec: AttentionSpec, tile: Tile, batch: slice, q_runs: Runs, kv_runs: Runs, num_heads: int
) -> Tensor | None:
    """The bias of a tile, broadcast to [B, H, R, K]; None for none."""
    bias = spec.head_bias(num_heads)
    if bias is None:
        return None
    if bias.dim() == 4:
        bias = select_runs(_of_batch(bias, batch), 2, q_runs, tile.r0, tile.r1)
        return select_runs(bias, 3, kv_runs, tile.k0, tile.k1)
    rows = run_positions(q_runs, bias.device)[tile.rows]
    keys = run_positions(kv_runs, bias.device)[tile.keys]
    # positions of padding may be further apart than any two tokens
    at = (keys - rows[:, None] + (spec.seq_len - 1)).clamp(0, 2 * spec.seq_len - 2)
    return join_sides(bias)[:, at][None]


def additive_mask(
    spec: AttentionSpec,
    tile: Tile,
    intervals: Intervals,
    batch: slice,
    data_mask: bool,
    q_runs: Runs,
    kv_runs: Runs,
    like: Tensor,
) -> Tensor | None:
    """What is added to the tile's scores, broadcast to [B, H, R, K], -inf where hidden; None for
    nothing.

    Args:
        tile: rows and keys.
        batch: the sequences at hand.
        data_mask: key padding and documents are not part of ``intervals``.
        like: gives dtype, device and (dim 1) the number of heads.
    """
    device = like.device
    visible = None
    if tile.kind == MASKED:
        lo, hi = (x[tile.r0 : tile.r1, None] for x in intervals.on(device))
        keys = torch.arange(tile.k0, tile.k1, device=device)
        visible = ((keys >= lo) & (keys < hi))[None, None]
    if data_mask and spec.key_padding is not None:
        padding = select_runs(_of_batch(spec.key_padding, batch), 1, kv_runs, tile.k0, tile.k1)[
            :, None, None
        ]
        visible = padding if visible is None else visible & padding
    if data_mask and spec.document_ids is not None:
        ids = _of_batch(spec.document_ids, batch)
        mine = select_runs(ids, 1, q_runs, tile.r0, tile.r1)[:, None, :, None]
        same = mine == select_runs(ids, 1, kv_runs, tile.k0, tile.k1)[:, None, None]
        visible = same if visible is None else visible & same
    bias = _bias_tile(spec, tile, batch, q_runs, kv_runs, like.shape[1])
    if bias is not None and bias.dtype == torch.bool:
        visible = bias if visible is None else visible & bias
        bias = None
    if visible is None:
        return None if bias is None else bias.to(like.dtype)
    hidden = visible.logical_not()
    if bias is None:
        return torch.zeros(hidden.shape, dtype=like.dtype, device=device).masked_fill_(
            hidden, -torch.inf
        )
    return bias.to(like.dtype).masked_fill(hidden, -torch.inf)


def select_runs(x: Tensor, dim: int, runs: Runs, begin: int, end: int) -> Tensor:
    """Rows of a value that is whole, for tokens that are placed by runs.

    Args:
        x: has one row per global position along ``dim``, or one row for all.
        begin, end: which of the tokens that ``runs`` place.
    Returns:
        ``x`` with the rows of these tokens along ``dim``; a view if it can be.
    """
    if x.shape[dim] == 1:
        return x  # broadcast
    parts, offset = [], 0
    for start, n in runs:
        a, b = max(begin - offset, 0), min(end - offset, n)
        if a < b:
            parts.append(x.narrow(dim, start + a, b - a))
        offset += n
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _stretches(runs: Runs, begin: int, end: int) -> Iterator[tuple[int, slice]]:
    """Of the tokens ``begin`` to ``end`` that ``runs`` place: first position and place of each
    stretch, counted from ``begin``."""
    offset = 0
    for start, n in runs:
        a, b = max(begin - offset, 0), min(end - offset, n)
        if a < b:
            yield start + a, slice(offset + a - begin, offset + b - begin)
        offset += n


def _by_distance(x: Tensor) -> Tensor:
    """Sums [H, R + K - 1] of ``x`` [H, R, K] over pairs of one distance: the last row's first key
    comes first. In a fixed order, as nothing is added atomically.
    """
    h, rows, keys = x.shape
    width = keys + rows - 1
    # in lines one element shorter each row moves on by one
    lines = F.pad(x.flip(1), (0, rows)).reshape(h, rows * (keys + rows))
    return lines[:, : rows * width].view(h, rows, width).sum(1)


def add_bias_gradient(
    total: Tensor,
    ds: Tensor,
    spec: AttentionSpec,
    tile: Tile,
    batch: slice,
    q_runs: Runs,
    kv_runs: Runs,
) -> None:
    """Add to ``total`` what one tile gives.

    Args:
        total: like the bias of ``spec``, or its sides joined.
        ds: [B, H, R, K], gradient of the tile's scores after the bias.
        tile: rows and keys.
        batch: the sequences at hand.
    """
    h, distances = ds.shape[1], total.dim() == 2  # sides joined
    heads_at = 0 if distances else 1
    heads = torch.arange(h, device=ds.device)
    if total.shape[heads_at] not in (1, h) and spec.head_ids is not None:
        heads = spec.head_ids.to(ds.device)
        inside = heads < total.shape[heads_at]  # heads past the end are padding
        ds, heads = ds * inside[:, None, None], heads.clamp(max=total.shape[heads_at] - 1)
    if total.shape[heads_at] == 1:
        ds, heads = ds.sum(1, keepdim=True), heads[:1] * 0
    if distances:
        ds = ds.sum(0)
        for row, rows in _stretches(q_runs, tile.r0, tile.r1):
            for key, keys in _stretches(kv_runs, tile.k0, tile.k1):
                sums = _by_distance(ds[:, rows, keys])
                first = key - (row + rows.stop - rows.start - 1) + spec.seq_len - 1
                a, b = max(first, 0), min(first + sums.shape[1], total.shape[1])
                if a < b:  # beyond are pairs with padding
                    part = torch.zeros_like(total[:, a:b]).index_add_(
                        0, heads, sums[:, a - first : b - first]
                    )
                    total[:, a:b] += part
        return
    for dim in (0, 2, 3):
        if total.shape[dim] == 1:
            ds = ds.sum(dim, keepdim=True)
    places = [torch.arange(n, device=ds.device) for n in ds.shape]
    places[1] = heads
    if total.shape[0] > 1:
        places[0] = places[0] + batch.start
    if total.shape[2] > 1:
        places[2] = run_positions(q_runs, ds.device)[tile.rows]
    if total.shape[3] > 1:
        places[3] = run_positions(kv_runs, ds.device)[tile.keys]
    index = [x.view([-1 if i == j else 1 for j in range(4)]) for i, x in enumerate(places)]
    total.index_put_(tuple(index), ds, accumulate=True)
