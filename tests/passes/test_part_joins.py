"""Joins of a class token and patches: taken apart where attention is over a dim of the patches."""

from __future__ import annotations

from typing import Any

import torch
from pass_graphs import context, operators, run, trace
from torch import Tensor
from torch.nn import functional as F

from paradyse.passes.part_joins import part_joins
from paradyse.passes.simplify import drop_no_ops

BATCH, PATCHES, FRAMES, WIDTH = 2, 3, 5, 8


def attend(x: Tensor) -> Tensor:
    """Attention over dim 1 of [N, tokens, D], with one head."""
    q, none = x[:, None], (None, None, None, None)
    return torch.ops.paradyse.attention(q, q, q, *none, -1, -1, -1, 0.5, 0.0, 0.0)[0][:, 0]


def over_frames(x: Tensor) -> Tensor:
    apart = x.reshape(BATCH * PATCHES, FRAMES, WIDTH)
    return attend(apart).reshape(BATCH, PATCHES * FRAMES, WIDTH)


def model(token: Tensor, patches: Tensor, weight: Tensor) -> Any:
    """A class token joined with patches of all frames; attention over the frames of each patch."""
    x = torch.cat([token, over_frames(patches)], 1)
    x = x + F.linear(F.layer_norm(x, (WIDTH,)), weight)
    patches = x[:, 1:] + over_frames(x[:, 1:])
    x = torch.cat([x[:, 0].unsqueeze(1), patches], 1)
    x = F.gelu(F.linear(x, weight)) + x
    return x[:, 0], x[:, 1:].square(), x[:, -1]


def over_all(token: Tensor, patches: Tensor, weight: Tensor) -> Any:
    x = torch.cat([token, patches], 1)
    return attend(F.linear(x, weight))[:, 1:] + over_frames(x[:, 1:])


def mixing(token: Tensor, patches: Tensor, weight: Tensor) -> Any:
    x = torch.cat([token, over_frames(patches)], 1)
    return F.linear(x, weight).flip(1)


INPUTS = (
    torch.randn(BATCH, 1, WIDTH),
    torch.randn(BATCH, PATCHES * FRAMES, WIDTH),
    torch.randn(WIDTH, WIDTH),
)


def rewritten(fn: Any) -> tuple[int, Any, Any]:
    gm = trace(fn, *INPUTS, weights=1)
    drop_no_ops(gm, context())
    before = operators(gm)
    count = part_joins(gm, context())
    want, got = fn(*INPUTS), run(gm, *INPUTS)
    for x, y in zip(*((v if isinstance(v, tuple) else (v,)) for v in (want, got)), strict=True):
        torch.testing.assert_close(x, y)
    return count, before, operators(gm)


def test_what_each_token_has_by_itself_is_computed_on_the_parts() -> None:
    count, before, after = rewritten(model)
    assert count > 0 and before["cat"] == 2 and after["cat"] == 0
    assert after["linear"] == 2 * before["linear"] == 4
    assert after["attention"] == before["attention"]
    assert after["slice"] < before["slice"]


def test_a_join_that_attention_is_over_stays() -> None:
    count, before, after = rewritten(over_all)
    assert count == 0 and before == after


def test_what_mixes_the_join_reads_it_joined() -> None:
    count, before, after = rewritten(mixing)
    assert count > 0 and after["cat"] == 1 and after["linear"] == 2
    assert after["flip"] == before["flip"] == 1
