"""Which dim of its tokens a block's split may be switched to."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paradyse.distributed.axis import SINGLE
from paradyse.passes.name_dims import name_dims
from paradyse.passes.outline_blocks import Block, outline_blocks
from paradyse.passes.pipeline import CaptureContext
from paradyse.passes.place_tokens import place_tokens
from paradyse.torch_private import FakeTensorMode, make_fx

WIDTH, HEADS = 8, 2


def attend(
    x: Tensor, qkv: Tensor, proj: Tensor, values: Callable[[Tensor], Tensor], dropout: float = 0.0
) -> Tensor:
    """Attention over dim 2 of ``x`` [B, O, N, D], with what ``values`` gives of [B, O, N, D]."""
    b, o, n, d = x.shape
    heads = F.linear(x, qkv).reshape(b * o, n, 3, HEADS, d // HEADS)
    q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
    none = (None, None, None, None)
    y, _ = torch.ops.paradyse.attention(q, k, v, *none, -1, -1, -1, 0.5, 0.0, dropout)
    return F.linear(values(y.transpose(1, 2).reshape(b, o, n, d)), proj)


def found(model: Callable[..., Tensor], x: Tensor, weights: list[Tensor]) -> Any:
    """The context after the passes up to blocks, of ``model`` on ``x`` and ``weights``."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        gm = make_fx(model, pre_dispatch=True)(*(mode.from_tensor(t) for t in (x, *weights)))
    for node in [n for n in gm.graph.nodes if n.op == "placeholder"][1:]:
        node.meta["weight"] = True
    ctx = CaptureContext(SimpleNamespace(passes_off=(), on_unsupported="gather"), SINGLE)
    for fn in (name_dims, place_tokens, outline_blocks):
        fn(gm, ctx)
    return ctx


def same(x: Tensor) -> Tensor:
    return x


def turned(x: Tensor) -> Tensor:
    return x.flip(1)


def blocks_of(values: Any = same, dropout: float = 0.0) -> tuple[Any, list[Block]]:
    """What the passes find in attention over time and then over space, and the blocks."""

    def model(x: Tensor, *w: Tensor) -> Tensor:
        y = attend(x.transpose(1, 2), w[0], w[1], values, dropout)
        x = x + y.transpose(1, 2)
        return (x + attend(x, w[2], w[3], same)).square().mean()

    x = torch.randn(2, 5, 7, WIDTH)
    weights = [torch.randn(n * WIDTH, WIDTH) for n in (3, 1, 3, 1)]
    ctx = found(model, x, weights)
    return ctx, ctx.blocks


def test_the_other_dim_that_attention_is_over() -> None:
    ctx, (time, space) = blocks_of()
    assert ctx.seq.size == 5 and [f.size for f in ctx.unsplit] == [7]
    assert time.switch is ctx.unsplit[0] and not time.apart
    assert space.apart and space.over is ctx.unsplit[0] and space.switch is None
    assert "does not mix the dim that is split" in space.no_switch


def test_a_dim_that_is_mixed_inside_gives_way_to_the_batch() -> None:
    ctx, (time, _) = blocks_of(turned)
    assert time.switch is ctx.batch and ctx.batch.size == 2 and not time.no_switch


def test_attention_with_dropout_is_switched_as_without() -> None:
    ctx, (time, space) = blocks_of(dropout=0.5)
    assert time.switch is ctx.unsplit[0] and not time.no_switch
    assert space.apart


def test_one_batch_of_plain_sequences() -> None:
    def model(x: Tensor, *w: Tensor) -> Tensor:
        return (x + attend(x[:, None], *w, same)[:, 0]).square().mean()

    x, weights = torch.randn(4, 7, WIDTH), [torch.randn(n * WIDTH, WIDTH) for n in (3, 1)]
    ctx = found(model, x, weights)
    (block,) = ctx.blocks
    assert block.switch is ctx.batch and not ctx.unsplit
