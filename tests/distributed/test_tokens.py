"""Tokens between ranks and the whole sequence: values, gradients, and rows past the end."""

from __future__ import annotations

import pytest
import torch
from harness import RankPool
from torch import Tensor

from paradyse.distributed.axis import TokenLayout, local_positions, resolve_axis
from paradyse.distributed.collectives import register_block
from paradyse.distributed.tokens import (
    GatherTokens,
    ReduceGrad,
    SplitTokens,
    SumOverRanks,
    natural_order,
    rank_order,
    take_rows,
)


@pytest.mark.parametrize(("p", "seq_len"), [(1, 5), (2, 7), (3, 13), (4, 3)])
@pytest.mark.parametrize("fill", [None, -100])
def test_rows_of_all_ranks_are_the_whole(p: int, seq_len: int, fill: int | None) -> None:
    x = torch.randn(2, seq_len, 3)
    layout = TokenLayout(p, seq_len)
    rows = [take_rows(x, layout, r, 1, fill) for r in range(p)]
    if p > 1:
        whole = natural_order(torch.stack(rows), 1)
        assert torch.equal(whole[:, :seq_len], x)
        past = x[:, -1:] if fill is None else torch.tensor(float(fill))
        assert (whole[:, seq_len:] == past).all()
        padded = rank_order(x, layout, 1)
        real = [local_positions(layout, r) < seq_len for r in range(p)]
        for r in range(p):
            assert torch.equal(padded[r][:, real[r]], rows[r][:, real[r]])


def there_and_back(seq_len: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The whole again after a split; gradients of the replicated value and of one that is summed.

    Each rank computes sum(rows * weights of its rows), whose sum over ranks is one rank's.
    """
    axis = resolve_axis()
    block = register_block(axis, "test")
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(2, seq_len, generator=generator).double() for _ in range(2))
    x.requires_grad_()
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    rows = SplitTokens.apply(x, 1, axis, block)
    back = GatherTokens.apply(rows, 1, seq_len, axis, block)
    weights = rank_order(w, axis.layout(seq_len), 1)[axis.rank]
    part = (rows * weights * ReduceGrad.apply(scale, axis, block)).sum()
    loss = SumOverRanks.apply(part, axis, block)
    loss.backward()
    want = (x.detach() * w).sum()
    assert x.grad is not None and scale.grad is not None
    return back.detach() - x.detach(), x.grad - 3 * w, scale.grad - want, loss.detach() - 3 * want


@pytest.mark.parametrize("seq_len", [1, 7, 12])
def test_values_and_gradients(seq_len: int, pool2: RankPool) -> None:
    for differences in pool2.run(there_and_back, seq_len):
        assert all(d.abs().max() < 1e-12 for d in differences)
