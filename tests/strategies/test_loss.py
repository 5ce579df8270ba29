"""Losses as sums over rows: of any parts, they add up to the mean over all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from paradyse.strategies.loss import loss_sums

LABELS = torch.tensor([0, 1, -100, 4, 2, -100, 3])
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"smoothing": 0.2},
    "weights": {"weight": WEIGHT},
    "both": {"weight": WEIGHT, "smoothing": 0.2},
}
PARTS = ((0, 3), (3, 7), (7, 7))


@pytest.mark.parametrize("name", OPTIONS)
def test_sums_of_parts_add_up_to_the_mean(name: str) -> None:
    logits, options = torch.randn(7, 5, requires_grad=True), OPTIONS[name]
    total, weight = sum(loss_sums(logits[a:b], LABELS[a:b], -100, **options) for a, b in PARTS)
    how = {"weight": options.get("weight"), "label_smoothing": options.get("smoothing", 0.0)}
    want = F.cross_entropy(logits, LABELS, **how)
    torch.testing.assert_close(total / weight, want)
    grads = [torch.autograd.grad(loss, logits)[0] for loss in (total / weight, want)]
    torch.testing.assert_close(*grads)
    if name == "plain":
        assert weight == 5


@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_of_probabilities_only_rows_count_that_are_there(weight: Any) -> None:
    logits, labels = torch.randn(7, 5), torch.rand(7, 5).softmax(-1)
    rows = torch.tensor([1.0] * 5 + [0.0] * 2)
    total, count = loss_sums(logits, labels, -100, weight=weight, rows=rows)
    want = F.cross_entropy(logits[:5], labels[:5], weight)
    torch.testing.assert_close(total / count, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_long_sums_and_counts_of_narrow_logits_neither_overflow_nor_round(
    dtype: torch.dtype,
) -> None:
    logits, labels = torch.randn(20_001, 50).to(dtype), torch.randint(50, (20_001,))
    total, count = loss_sums(logits, labels, -100)
    assert count == 20_001
    expected = F.cross_entropy(logits.double(), labels, reduction="sum")
    torch.testing.assert_close(total.double(), expected, rtol=1e-3, atol=0)


def test_double_precision_sums_stay_double() -> None:
    logits, labels = torch.randn(5, 3).double(), torch.randint(3, (5,))
    assert loss_sums(logits, labels, -100).dtype == torch.float64
