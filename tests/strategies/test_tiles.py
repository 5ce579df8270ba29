"""Stretches of a rank's tokens as sequences of their own, and their results put together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from paradyse.distributed.axis import Axis, local_positions
from paradyse.graph.factors import Factor, Names
from paradyse.graph.lower import Dims, dim_size
from paradyse.strategies import tiles
from paradyse.strategies.base import Common
from paradyse.strategies.tiles import (
    make_tiles,
    over_tiles,
    tile_lengths,
    tile_tokens,
    untileable,
)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_TOKENS", 6)
    monkeypatch.setattr(tiles, "MIN_TILE_TOKENS", 4)


def step_of(axis: Axis, seq_len: int) -> tuple[dict[str, int], Common]:
    """Sizes and tables of a step with two sequences of ``seq_len`` tokens."""
    layout, whole = axis.layout(seq_len), torch.arange(seq_len)
    sizes = {"B": 2, "S": seq_len} | ({"s": layout.local_len} if axis.size > 1 else {})
    local = local_positions(layout, axis.rank) if axis.size > 1 else whole
    info = torch.tensor([seq_len, 0])
    return sizes, (whole, local, torch.empty(2), info, torch.zeros((), dtype=torch.int64))


def test_a_tile_has_4096_tokens_of_a_batch_and_1024_of_a_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    assert [tile_tokens(b) for b in (1, 2, 4, 64)] == [4096, 2048, 1024, 1024]


@pytest.mark.parametrize("num_tokens", range(1, 60))
def test_tiles_are_few_and_even(num_tokens: int) -> None:
    lengths = tile_lengths(num_tokens, 1)
    assert sum(lengths) == num_tokens
    assert len(lengths) == max(1, min(-(-num_tokens // 6), num_tokens // 2))
    assert all(n % 2 == 0 for n in lengths[:-1])
    assert max(lengths) - min(lengths) <= 3
    assert min(lengths) > 1 or num_tokens == 1


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("seq_len", [1, 5, 23])
def test_tiles_of_all_ranks_hold_every_position_once(p: int, seq_len: int) -> None:
    mine: list[Tensor] = []
    for rank in range(p):
        axis = Axis(f"of {p}", p, rank)
        found = make_tiles(axis, *step_of(axis, seq_len))
        mine += [tile.common[1] for tile in found]
        for tile in found:
            held = p * tile.num_tokens if len(found) > 1 else seq_len
            assert tile.sizes["S"] == held == tile.common[0].shape[0]
            assert tile.common[3][0] == seq_len
        everyone = torch.cat([tile.common[0] for tile in found])
        places = torch.arange(p * axis.layout(seq_len).local_len)
        assert torch.equal(everyone.unique(), places if len(found) > 1 else places[:seq_len])
    assert torch.equal(torch.cat(mine).sort()[0], places)


ONE = torch.tensor(1.0)

DIMS: dict[str, tuple[Dims, Tensor]] = {
    "tokens": ((("B",), ("s",), (3,)), ONE),
    "tokens last": (((3,), ("B",), ("s",)), ONE),
    "sequences joined": ((("B", "s"), (3,)), ONE),
    "of all ranks": ((("B",), ("S",)), torch.tensor([1.0] * 20 + [4.0])),
    "of no token": (((3,), (5,)), torch.tensor(3.0)),
}
"""Dims, and how often a tile has each element: padding is the last token once more."""


@pytest.mark.parametrize(("dims", "times"), DIMS.values(), ids=DIMS)
def test_parts_are_put_where_they_were_cut(dims: Dims, times: Tensor) -> None:
    axis = Axis("of 2", 2, 1)
    sizes, common = step_of(axis, 21)
    x = torch.randn([dim_size(d, sizes) for d in dims])
    found = make_tiles(axis, sizes, common)
    assert len(found) == 3
    (back,) = over_tiles(found, lambda sizes, common, parts: parts, [(x, dims)], [dims])
    torch.testing.assert_close(back, x * times)


def test_sums_of_16_bit_values_have_32_bits() -> None:
    axis = Axis("of 1", 1, 0)
    found = make_tiles(axis, *step_of(axis, 1800))
    one = torch.ones(1, dtype=torch.bfloat16)
    total, nothing = over_tiles(found, lambda *_: [one, None], [], [((1,),), ((1,),)])
    assert len(found) > 256  # where a bfloat16 no longer counts
    assert (total.dtype, nothing) == (torch.bfloat16, None)
    assert total.item() == torch.tensor(len(found)).bfloat16().item()


SEQ, WIDTH = Factor(7), Factor(3)


@pytest.mark.parametrize(
    ("reads", "gives", "why"),
    [
        ((SEQ, WIDTH), (SEQ,), ""),
        ((WIDTH,), (SEQ,), ""),
        ((SEQ.shifted(1), WIDTH), (SEQ,), "reads x, which has another number of tokens"),
        ((SEQ, WIDTH), (WIDTH,), "gives relu, which is not of single tokens"),
    ],
)
def test_blocks_that_cannot_be_tiled_say_why(
    reads: tuple[Factor, ...], gives: tuple[Factor, ...], why: str
) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2)
    y = graph.call_function(torch.relu, (x,))
    y.meta["val"] = torch.empty(2)
    graph.output(y)
    names = Names()
    names.dims |= {x: [reads], y: [gives]}
    scope: Any = SimpleNamespace(names=names, seq=SEQ)
    found = untileable(scope, SimpleNamespace(nodes=[y], attention=None))
    assert why in found and bool(why) == bool(found)
    assert untileable(scope, SimpleNamespace(nodes=[y], attention=y)) == "attention mixes tokens"
