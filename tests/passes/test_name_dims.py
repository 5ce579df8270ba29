"""Which factor is batch and which is sequence: attention says."""

from __future__ import annotations

import re

import pytest
import torch
from pass_graphs import attend, context, toy, toy_inputs, trace
from torch import Tensor
from torch.nn import functional as F

from paradyse.graph.attention_call import ATTENTION
from paradyse.passes.name_dims import name_dims


@pytest.mark.parametrize(("batch", "length"), [(2, 5), (5, 2), (3, 3), (1, 5)])
def test_batch_and_sequence_are_those_of_attention(batch: int, length: int) -> None:
    ctx, gm = context(), trace(toy, *toy_inputs(batch, length), weights=7)
    assert name_dims(gm, ctx) == len(gm.graph.nodes) - 1  # all but the output
    (ids, *_) = gm.graph.nodes
    (core,) = [n for n in gm.graph.nodes if n.target is ATTENTION]
    b, s = ctx.names.of(ids)
    assert (ctx.batch, ctx.seq) == (b[0] if b else None, s[0]) and ctx.seq.size == length
    assert [ctx.names.of(core.args[0])[d] for d in (0, 2)] == [b, s]
    assert not ctx.notes


def test_rows_of_a_fused_weight_are_three_times_heads_times_width() -> None:
    ctx, gm = context(), trace(toy, *toy_inputs(), weights=7)
    name_dims(gm, ctx)
    qkv = [n for n in gm.graph.nodes if n.op == "placeholder"][4]
    assert [f.size for f in ctx.names.of(qkv)[0]] == [3, 4, 2]


def of_two_sequences(x: Tensor, y: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(attend(x, x, x), v), F.linear(attend(y, y, y), w)


X, Y, V, W = torch.randn(2, 4, 5, 3), torch.randn(2, 4, 7, 3), torch.randn(3, 3), torch.randn(4, 3)


@pytest.mark.parametrize(("inputs", "length"), [([X, Y, V, W], 7), ([Y, X, V, W], 5)])
def test_of_several_sequences_the_one_with_the_most_work_for_a_token_is_first(
    inputs: list[Tensor], length: int
) -> None:
    """At any lengths: a program is the same for all."""
    ctx, gm = context(), trace(of_two_sequences, *inputs, weights=2)
    name_dims(gm, ctx)
    assert ctx.seq is not None and ctx.seq.size == length
    assert [f.size for f in ctx.seqs] == [length, 12 - length] and not ctx.notes


def test_a_batch_of_several_dims_goes_by_the_outermost() -> None:
    def fn(x: Tensor) -> Tensor:
        x = x.flatten(0, 1)[:, None]
        return attend(x, x, x)

    ctx, gm = context(), trace(fn, torch.randn(2, 3, 5, 4))
    name_dims(gm, ctx)
    assert ctx.batch is not None and (ctx.batch.size, ctx.seq.size) == (2, 5)


def test_rows_and_columns_of_patches_are_one_sequence() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        patches = F.conv2d(x, w, stride=2).flatten(2)
        return attend(*[patches[:, None].transpose(2, 3)] * 3)

    ctx, gm = context(), trace(fn, torch.randn(2, 3, 6, 8), torch.randn(5, 3, 2, 2), weights=1)
    name_dims(gm, ctx)
    assert (ctx.batch.size, ctx.seq.size) == (2, 12)
    (x, *_) = gm.graph.nodes
    assert ctx.names.of(x)[0] == (ctx.batch,)


UNNAMED = {
    "no attention": (lambda x: x + 1, [X], "no attention and no look-up of token ids"),
    "one token": (lambda x: attend(x, x, x), [X[:, :, :1]], "a sequence of one token"),
}


@pytest.mark.parametrize("name", UNNAMED)
def test_without_a_sequence_nothing_is_split_and_why_is_said(name: str) -> None:
    fn, inputs, text = UNNAMED[name]
    ctx = context()
    name_dims(trace(fn, *inputs), ctx)
    assert ctx.seq is None and ctx.batch is None
    assert re.search(text, ctx.notes[0])
