"""Biases by distance: equal to those of every pair, from no value of every pair; or none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mask_graphs import Notes, calls, dense_values
from test_recover_masks import trace
from torch import Tensor
from torch.nn import functional as F

from paradyse.kernels.additive_mask import join_sides, part_sides
from paradyse.passes.fold_attention import fold_attention
from paradyse.passes.recover_masks import recover_masks

B, H, S, D = 2, 3, 11, 4


def far() -> Tensor:
    i = torch.arange(S)
    return i[None] - i[:, None]


def bucket() -> Tensor:
    side, n = (far() > 0).to(torch.long) * 4, far().abs()
    large = 2 + (torch.log(n.float() / 2) / math.log(4) * 2).to(torch.long)
    return side + torch.where(n < 2, n, torch.min(large, torch.full_like(large, 3)))


BY_DISTANCE: dict[str, Callable[[Tensor], Tensor]] = {
    "looked up": lambda t: F.embedding(bucket(), t).permute(2, 0, 1)[None],
    "indexed": lambda t: t[bucket()].permute(2, 0, 1)[None],
    "heads moved by transposes": lambda t: (
        F.embedding(bucket(), t).transpose(0, 2).transpose(1, 2)[None]
    ),
    "slopes": lambda t: t[0, :, None, None] * far().abs(),
    "one for all heads": lambda t: far().float().clamp(-3, 2),
    "of the log": lambda t: -torch.log(far().abs() + 1.0) * t[:1, :, None, None].squeeze(0),
    "sum of two": lambda t: t[bucket()].permute(2, 0, 1)[None] + far().abs() * 0.1,
}


def attend(how: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def fn(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        causal = torch.where(far() <= 0, 0.0, -torch.inf)
        scores = torch.matmul(q, k.transpose(2, 3)) + how(table) + causal
        return torch.matmul(torch.softmax(scores, -1), v)

    return fn


def given() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    qkv = [torch.randn(B, H, S, D, generator=g).requires_grad_() for _ in range(3)]
    return [*qkv, torch.randn(8, H, generator=g).requires_grad_()]


def folded(fn: Callable[..., Any]) -> Any:
    gm = trace(fn, *(x.detach() for x in given()))
    list(gm.graph.find_nodes(op="placeholder"))[3].meta["weight"] = True
    assert fold_attention(gm, Notes()) == 1
    recover_masks(gm, Notes())
    gm.recompile()
    return gm


@pytest.mark.parametrize("how", BY_DISTANCE)
def test_equal(how: str) -> None:
    fn, ins = attend(BY_DISTANCE[how]), given()
    gm = folded(fn)
    (node,) = calls(gm)
    assert node.args[5].meta["val"].shape[1:] == (2, S) and node.args[8] == 0
    assert not dense_values(gm, S)
    got, want = gm(*ins), fn(*ins)
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(y, ins, grad, allow_unused=True) for y in (got, want))):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b)


DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "of the product of places": lambda t: torch.arange(S)[:, None] * torch.arange(S) * t[0, 0],
    "looked up by the key": lambda t: F.embedding(torch.arange(S)[None] % 8 + 0 * far(), t)
    .permute(2, 0, 1)[None],
    "of the sum of places": lambda t: (torch.arange(S)[:, None] + torch.arange(S)) * t[0, 0],
}  # fmt: skip


@pytest.mark.parametrize("how", DENSE)
def test_not_by_distance(how: str) -> None:
    fn, ins = attend(DENSE[how]), given()
    gm = folded(fn)
    (node,) = calls(gm)
    assert node.args[5].meta["val"].shape[-2:] == (S, S)
    torch.testing.assert_close(gm(*ins), fn(*ins))


def test_a_bias_by_key_stays_by_key() -> None:
    gm = folded(attend(lambda t: t[0, :, None, None] * torch.arange(S)))
    (node,) = calls(gm)
    assert node.args[5].meta["val"].shape == (1, H, 1, S)


def test_sides() -> None:
    bias = torch.randn(H, 2, 5)
    joined = join_sides(bias)
    assert joined.shape == (H, 9)
    for j in range(5):
        assert torch.equal(joined[:, 4 + j], bias[:, 1, j])
        assert j == 0 or torch.equal(joined[:, 4 - j], bias[:, 0, j])
    other = torch.randn(H, 9)
    torch.testing.assert_close((joined * other).sum(), (bias * part_sides(other)).sum())
