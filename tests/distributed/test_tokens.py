"""Tokens between ranks and the whole sequence: values, gradients, and rows past the end."""

from __future__ import annotations

import pytest
import torch
from harness import RankPool
from torch import Tensor
from torch.nn.functional import pad

from paradyse.distributed.axis import local_positions, resolve_axis
from paradyse.distributed.collectives import register_block
from paradyse.distributed.tokens import GatherTokens, ReduceGrad, SplitTokens, SumOverRanks


def there_and_back(seq_len: int) -> dict[str, Tensor]:
    """Differences that must be 0: of the rows, of the whole made of them, and of what is computed
    from rows on every rank and added up, with its gradients."""
    axis = resolve_axis()
    block = register_block(axis, "test")
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(2, seq_len, generator=generator).double() for _ in range(2))
    x.requires_grad_()
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    layout = axis.layout(seq_len)
    positions = local_positions(layout, axis.rank)
    rows = SplitTokens.apply(x, 1, axis, block)
    filled = SplitTokens.apply(x.detach(), 1, axis, block, -100)
    whole = GatherTokens.apply(rows, 1, seq_len, axis, block)
    num_past = axis.size * layout.local_len - seq_len
    mine = pad(w, (0, num_past))[:, positions]  # rows past the end count nothing
    loss = SumOverRanks.apply(
        (rows * mine * ReduceGrad.apply(scale, axis, block)).sum(), axis, block
    )
    (gathered,) = torch.autograd.grad((whole * w).sum(), x, retain_graph=True)
    read = GatherTokens.apply(rows, 1, seq_len, axis, block, True)
    (parts,) = torch.autograd.grad((read * w * (axis.rank + 1)).sum(), x, retain_graph=True)
    loss.backward()
    assert x.grad is not None and scale.grad is not None
    want, past = (x.detach() * w).sum(), positions >= seq_len
    everywhere = torch.arange(seq_len)
    info = torch.tensor([seq_len, block])
    told = positions, everywhere, info, 1, axis.name
    from_all = torch.ops.paradyse.exchange_tokens(x * (axis.rank + 1), *told)
    scattered = torch.ops.paradyse.reduce_scatter_tokens(x, *told)
    of_gradient = torch.ops.paradyse.reduce_scatter_tokens(x.detach(), *told, True)
    (from_parts,) = torch.autograd.grad((scattered * mine).sum(), x)
    numbers = torch.arange(1, axis.size + 1)
    (exchanged,) = torch.autograd.grad(
        (from_all * mine[..., None] * numbers * (axis.rank + 1)).sum(), x
    )
    owners = torch.zeros(axis.size * layout.local_len, dtype=torch.int64)
    for rank in range(axis.size):
        owners[local_positions(layout, rank)] = rank + 1
    return {
        "rows, of which those past the end are the last": rows.detach()
        - x.detach()[:, positions.clamp(max=seq_len - 1)],
        "rows past the end, filled": filled[:, past] + 100,
        "whole": (whole - x).detach(),
        "sum": loss.detach() - 3 * want,
        "gradient of what is split": x.grad - 3 * w,
        "gradient of what is gathered": gathered - w,
        "gradient of what each rank reads": parts - w * sum(range(1, axis.size + 1)),
        "gradient of what is used for a part": scale.grad - want,
        "sums over ranks, of which those past the end are the last": scattered.detach()
        - axis.size * x.detach()[:, positions.clamp(max=seq_len - 1)],
        "sums of gradients, of which those past the end are 0": of_gradient
        - axis.size * pad(x.detach(), (0, num_past))[:, positions],
        "gradient of what is summed and split": from_parts - w,
        "what every rank has": from_all.detach()
        - pad(x.detach(), (0, num_past))[:, positions, None] * numbers,
        "gradient of what every rank has": exchanged - w * owners[:seq_len] * (axis.rank + 1) ** 2,
    }


@pytest.mark.parametrize("seq_len", [1, 7, 12])
def test_values_and_gradients(seq_len: int, pool2: RankPool, pool3: RankPool) -> None:
    for pool in (pool2, pool3):
        for differences in pool.run(there_and_back, seq_len):
            for what, d in differences.items():
                assert (d.abs() < 1e-12).all(), what
