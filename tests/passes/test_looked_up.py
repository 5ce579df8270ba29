"""Without attention token ids say what the sequence is; what follows a gather is split again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import context, trace
from torch import Tensor
from torch.nn import functional as F

from paradyse.distributed.axis import Axis
from paradyse.passes.name_dims import name_dims
from paradyse.passes.place_tokens import place_tokens

TABLE, SQUARE = torch.randn(11, 8), torch.randn(8, 8)


def placed(fn: Callable[..., Any], *inputs: Tensor, weights: int = 2) -> tuple[Any, Any]:
    ctx, gm = context(), trace(fn, *inputs, weights=weights)
    ctx.axis = Axis("ranks of a test", 2, 0)
    name_dims(gm, ctx)
    place_tokens(gm, ctx)
    return ctx, {n.name: n for n in gm.graph.nodes}


def ids(*shape: int) -> Tensor:
    return torch.randint(11, shape)


def mixed(x: Tensor) -> Tensor:
    """Along all dims, so that ranks can share none."""
    return x.flip(tuple(range(x.ndim)))


def looked_up(ids: Tensor, table: Tensor, square: Tensor) -> Tensor:
    x = F.embedding(ids, table)
    return x + F.linear(torch.tanh(mixed(x)), square)


@pytest.mark.parametrize("shape", [(2, 5), (5, 2), (3, 3), (1, 5)])
def test_batch_and_sequence_are_those_of_token_ids(shape: tuple[int, int]) -> None:
    ctx, nodes = placed(looked_up, ids(*shape), TABLE, SQUARE)
    b, s = ctx.names.of(nodes["ids_1"])
    assert (ctx.batch, ctx.seq) == (b[0] if b else None, s[0]) and not ctx.notes
    assert ctx.seqs == {s[0]: ctx.batch} and ctx.seq.size == shape[1]


def test_a_batch_of_several_dims_goes_by_the_outermost() -> None:
    ctx, _ = placed(looked_up, ids(2, 3, 5), TABLE, SQUARE)
    assert (ctx.seq.size, ctx.batch.size) == (5, 2)


def test_what_is_computed_token_by_token_behind_a_gather_is_split() -> None:
    ctx, nodes = placed(looked_up, ids(2, 5), TABLE, SQUARE)
    assert {n.name for n in ctx.split} == {"embedding", "tanh", "linear", "add"}
    assert [n for n, _ in ctx.gathered] == [nodes["flip"]]


def test_what_mixes_tokens_once_more_has_them_gathered_once() -> None:
    def fn(ids: Tensor, table: Tensor, square: Tensor) -> Tensor:
        x = F.embedding(ids, table)
        return x + mixed(x + torch.tanh(mixed(x) + x))

    ctx, nodes = placed(fn, ids(2, 5), TABLE, SQUARE)
    split = {n.name for n in ctx.split}
    assert "tanh" in split and [n for n, _ in ctx.gathered] == [
        nodes["flip"],
        nodes["flip_1"],
    ]

    def gathered(ids: Tensor, table: Tensor, square: Tensor) -> Tensor:
        x = F.embedding(ids, table)
        return x + torch.tanh(mixed(torch.exp(mixed(x))))

    ctx, nodes = placed(gathered, ids(2, 5), TABLE, SQUARE)
    assert {n.name for n in ctx.split} == {"embedding", "tanh", "add"}
    assert [n for n, _ in ctx.gathered] == [nodes["flip"]]


def test_of_gathered_values_that_are_added_up_the_sum_is_cut() -> None:
    """The gradient of each value that is cut is a message."""

    def fn(ids: Tensor, table: Tensor, square: Tensor) -> Tensor:
        x = F.embedding(ids, table)
        y = mixed(x) + mixed(x.neg())
        return x + F.linear(y * torch.sigmoid(x), square)

    ctx, nodes = placed(fn, ids(2, 5), TABLE, SQUARE)
    assert nodes["mul"] in ctx.split and nodes["linear"] in ctx.split
    assert nodes["add"] not in ctx.split and nodes["flip"] not in ctx.split


def test_a_sequence_that_views_cut_into_chunks_stays_one_dim() -> None:
    """Also where the chunks are merged again, and the width of heads is as large as a chunk."""

    def fn(ids: Tensor, table: Tensor, square: Tensor) -> Tensor:
        x = F.embedding(ids, table)
        y = mixed(x.view(2, 3, 4, 2, 4)).reshape(2, 12, 8)
        return x + F.linear(y, square)

    ctx, nodes = placed(fn, ids(2, 12), TABLE, SQUARE)
    assert ctx.seq.size == 12 and {n.name for n in ctx.split} == {"embedding", "linear", "add"}
    chunks = ctx.names.of(nodes["view"])
    assert chunks[0] == (ctx.batch,) and not any(ctx.seq in dim for dim in chunks)
    assert [f.size for d in chunks for f in d] == [2, 3, 4, 2, 4]


NOTHING = {
    "distances": lambda ids, table, w: (
        F.embedding(torch.arange(5) - torch.arange(5)[:, None] + 5, table)
        + F.linear(w[:5], w)[:, None] * ids.sum()
    ),
    "one id": lambda ids, table, w: F.linear(F.embedding(ids[:, 0], table), w),
    "features": lambda ids, table, w: F.linear(table, w) * ids.sum(),
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_is_no_look_up_of_token_ids_says_nothing(name: str) -> None:
    ctx, _ = placed(NOTHING[name], ids(2, 5), TABLE, SQUARE)
    assert ctx.seq is None and not ctx.split
    assert ctx.notes == [
        "no attention and no look-up of token ids: nothing says what the sequence is"
    ]
