"""What mixes tokens is computed by heads or channels where nothing mixes these."""

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
from paradyse.passes.outline_blocks import outline_blocks
from paradyse.passes.outline_head import outline_head
from paradyse.passes.place_tokens import place_tokens

B, S, C = 2, 12, 10
TABLE, SQUARE, KERNEL = torch.randn(11, C), torch.randn(C, C), torch.randn(C, 1, 3)


def regions(mix: Callable[..., Tensor]) -> tuple[Any, list[tuple[set[str], int]]]:
    """The context, and for each region of a layer with ``mix`` its operators and its dim's size."""

    def fn(ids: Tensor, table: Tensor, square: Tensor, kernel: Tensor) -> Tensor:
        x = F.embedding(ids, table)
        x = x + F.linear(mix(x, kernel), square)
        return F.linear(x, table)

    ctx, gm = context(), trace(fn, torch.randint(11, (B, S)), TABLE, SQUARE, KERNEL, weights=3)
    ctx.axis = Axis("ranks of a test", 2, 0)
    name_dims(gm, ctx)
    place_tokens(gm, ctx)
    outline_blocks(gm, ctx)
    outline_head(gm, ctx)
    gm.graph.lint()
    assert ctx.mixed.keys().isdisjoint(n for head in ctx.heads for n in head.nodes)
    targets = [
        ({n.target.overloadpacket.__name__ for n in r.nodes}, r.over.size) for r in ctx.mixing
    ]
    return ctx, targets


def conv(x: Tensor, kernel: Tensor) -> Tensor:
    y = F.conv1d(x.transpose(1, 2), kernel, padding=2, groups=C)[:, :, :S]
    return torch.tanh(y.transpose(1, 2))


def chunks(x: Tensor, kernel: Tensor) -> Tensor:
    """Of five heads of width two, one chunk after the other; two ways meet."""
    y = x.unflatten(-1, (5, 2)).reshape(B, 3, 4, 5, 2).cumsum(2)
    first = torch.tanh(y.reshape(B, S, 5, 2)).reshape(B, 3, 4, 5, 2)
    return (y + first.flip(2)).reshape(B, S, C)


def written_out(x: Tensor, kernel: Tensor) -> Tensor:
    q = x.unflatten(-1, (5, 2)).transpose(1, 2)
    return ((q @ q.transpose(2, 3)).softmax(-1) @ q).transpose(1, 2).flatten(2)


BY_HEADS = {
    "conv": (conv, {"conv1d", "slice"}, C),
    "chunks": (chunks, {"reshape", "cumsum", "tanh", "flip", "add"}, 2),  # half of each head
    "written out": (written_out, {"matmul", "softmax"}, 5),
}


@pytest.mark.parametrize("name", BY_HEADS)
def test_by_the_dim_that_is_not_mixed(name: str) -> None:
    """With what lies on a way from the region to itself."""
    mix, operators, size = BY_HEADS[name]
    ctx, found = regions(mix)
    assert found == [(operators, size)] and not ctx.gathered
    (region,) = ctx.mixing
    assert ctx.mixed == dict.fromkeys(region.nodes, ctx.seq) and region.seq is ctx.seq
    assert set(region.nodes) <= ctx.split.keys()


GATHERED = {
    "norm over channels inside": lambda x, kernel: (
        x.reshape(B, 3, 4, C).cumsum(2).softmax(-1).cumsum(1).reshape(B, S, C)
    ),
    "weights of all channels": lambda x, kernel: conv(x, kernel.softmax(0)),
    "transform of both": lambda x, kernel: torch.fft.fftn(x, dim=(1, 2)).real,
    "channels in groups": lambda x, kernel: F.conv1d(
        x.transpose(1, 2), kernel.expand(C, 2, 3), padding=1, groups=5
    ).transpose(1, 2),
    "no tokens left": lambda x, kernel: x.mean(1, keepdim=True) * x,
}


BY_SEQUENCES = {"norm over channels inside", "weights of all channels", "channels in groups"}
"""What has no such dim but the batch."""


@pytest.mark.parametrize("name", GATHERED)
def test_what_is_mixed_too_or_lost_is_no_such_dim(name: str) -> None:
    ctx, found = regions(GATHERED[name])
    assert [size for _, size in found] == ([B] if name in BY_SEQUENCES else [])
    assert bool(ctx.gathered) == (name not in BY_SEQUENCES)


def test_on_one_rank_there_is_none() -> None:
    ctx, gm = context(), trace(lambda x: x.cumsum(1), torch.randn(2, 3))
    name_dims(gm, ctx)
    place_tokens(gm, ctx)
    assert not ctx.mixing and not ctx.mixed
