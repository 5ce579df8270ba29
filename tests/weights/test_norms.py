"""Norms put together from those of rows: of every order, of no rows, in 16 bits."""

from __future__ import annotations

import math

import pytest
import torch

from paradyse.weights.norms import joined_norms, local_norms

ORDERS = (2.0, 1.0, 3.0, 0.5, math.inf, -math.inf, 0.0, -1.0)


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("cuts", [(2, 5), (0, 5), (7, 7)])
def test_of_three_ranks(ord: float, cuts: tuple[int, int]) -> None:
    """Some ranks have no rows."""
    x = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x.flip(0).square() + 0.1
    y[2] = 0 if ord >= 0 else 1
    parts = zip(x.tensor_split(cuts), y.tensor_split(cuts), strict=True)
    every = torch.stack([torch.stack(local_norms(rows, ord, x.dtype)) for rows in parts])
    want = [torch.linalg.vector_norm(t, ord) for t in (x, y)]
    torch.testing.assert_close(joined_norms(every, ord), torch.stack(want), rtol=1e-14, atol=0)


def test_a_nan_of_one_rank_stays() -> None:
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([math.nan, 0.0])]
    for ord in ORDERS[:6]:
        every = torch.stack([torch.stack(local_norms([x], ord, torch.float32)) for x in rows])
        assert joined_norms(every, ord).isnan().all(), ord


def test_sixteen_bits_are_added_up_in_32() -> None:
    x = torch.full((4096,), 1.01, dtype=torch.bfloat16)
    (norm,) = local_norms([x], 2.0, torch.float32)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(x.double().norm().item(), rel=1e-6)
