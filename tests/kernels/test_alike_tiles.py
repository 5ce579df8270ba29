"""Tiles that are alike, in one call: which they are, and that views and sums are those of each."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import paradyse.kernels.attention_mask as masks
from paradyse.kernels import alike_tiles, attention_core
from paradyse.kernels.alike_tiles import (
    add_keys,
    add_rows,
    in_batches,
    join_alike,
    put_rows,
    stacked_keys,
    stacked_rows,
)
from paradyse.kernels.attention_mask import DIAGONAL, FULL, MASKED, AttentionSpec, Tile

ALIKE = Tile(2, 5, 1, 9, MASKED, count=4)
"""Rows 2..13, three to a tile; keys 1..17, eight to a tile."""


def each(tile: Tile) -> list[Tile]:
    moves = [i * tile.num_rows for i in range(tile.count)]
    return [Tile(tile.r0 + m, tile.r1 + m, tile.k0 + m, tile.k1 + m, tile.kind) for m in moves]


@pytest.mark.parametrize(
    "at", [{"left": 99, "right": 0}, {"left": 60, "right": 70}, {"left": 7, "chunk": 50}]
)
def test_joined_tiles_stand_for_those_that_there_were(at: dict[str, Any]) -> None:
    for runs in (((0, 1000),), ((100, 300), (600, 300))):
        intervals = masks.position_intervals(runs, runs, AttentionSpec(1000, 1.0, **at))
        tiles = masks.segments(intervals, 4)
        joined = join_alike(tiles, intervals)
        back = [t for j in joined for t in (each(j) if j.count > 1 else [j])]
        assert back == list(tiles)
        for j in joined:
            bounds = [intervals.relative_to(t) for t in each(j)]
            assert j.count == 1 or all(torch.equal(b, bounds[0]) for b in bounds)
    assert "chunk" in at or any(j.count > 1 for j in joined)


def test_rows_of_several_tiles_stay_apart() -> None:
    intervals = masks.position_intervals(((0, 6),), ((0, 9),), AttentionSpec(9, 1.0))
    one, two = Tile(0, 2, 0, 2, FULL), Tile(2, 4, 2, 4, FULL)
    more = Tile(2, 4, 4, 6, DIAGONAL, first=False)
    assert join_alike([one, two], intervals) == [Tile(0, 2, 0, 2, FULL, count=2)]
    assert join_alike([one, two, more], intervals) == [one, two, more]
    assert join_alike([], intervals) == []
    assert join_alike([one, replace(two, k1=5)], intervals) == [one, replace(two, k1=5)]


@pytest.mark.parametrize(("n", "diagonals"), [(2, 1), (256, 1), (257, 3), (2048, 8), (2049, 1)])
def test_a_long_diagonal_is_cut_where_that_is_faster(n: int, diagonals: int) -> None:
    intervals = masks.position_intervals(((0, n),), ((0, n),), AttentionSpec(n, 1.0, right=0))
    tiles = masks.segments(intervals, 4)
    of = [t for t in tiles if t.kind == DIAGONAL]
    assert len(of) == diagonals and sum(t.num_rows for t in of) == n
    others = [t for t in tiles if t.kind != DIAGONAL]
    assert [(t.kind, t.k0, t.k1) for t in others] == [(FULL, 0, t.r0) for t in of[1:]]


def test_batches_are_of_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alike_tiles, "TILE_BYTES", 8 * 10 * 3)
    parts = list(in_batches(ALIKE, bytes_per_key=10))
    assert [p.count for p in parts] == [3, 1]
    assert [t for p in parts for t in each(p)] == each(ALIKE)
    assert [p.count for p in in_batches(ALIKE, bytes_per_key=10**9)] == [1] * 4


def test_views_and_sums_are_those_of_each_tile() -> None:
    whole = torch.randn(1, 20, 2, 4).transpose(1, 2)  # as projections lay it out
    for x in (whole, whole.contiguous(), whole[..., 0], whole[:, :1, 1:19]):
        rows, keys = stacked_rows(x, ALIKE), stacked_keys(x, ALIKE)
        got, want = (torch.zeros(x.shape) for _ in range(2))
        for i, tile in enumerate(each(ALIKE)):
            assert torch.equal(rows[i], x[0, :, tile.rows])
            assert torch.equal(keys[i], x[0, :, tile.keys])
            want[0, :, tile.rows] += 3 * x[0, :, tile.rows]
            want[0, :, tile.keys] += x[0, :, tile.keys]
        put_rows(got, 2 * rows, ALIKE)
        add_rows(got, rows, ALIKE)
        add_keys(got, keys, ALIKE)
        torch.testing.assert_close(got, want)


def test_a_gradient_s_share_is_gone_before_the_next_is_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one tile of 3 rows and 2 keys: the share, and what is made of it, are there at once."""
    tile, qkv = Tile(1, 4, 0, 2, FULL), [torch.ones(1, 2, 5, 4) for _ in range(3)]
    shares = [torch.full((1, 2, n, 4), float(n)) for n in (3, 2, 2)]
    alive, there = [weakref.ref(s) for s in shares], list[int]()
    make = attention_core.empty_like_heads

    def note(x: Tensor) -> Tensor:
        there.append(sum(of() is not None for of in alive))
        return make(x)

    monkeypatch.setattr(attention_core, "empty_like_heads", note)
    dq, dk, dv = attention_core.placed(shares, qkv, tile)
    assert there == [3, 2, 1] and not shares
    assert dq[0, 0, :, 0].tolist() == [0, 3, 3, 3, 0]
    assert dk[0, 1, :, 3].tolist() == dv[0, 0, :, 0].tolist() == [2, 2, 0, 0, 0]
