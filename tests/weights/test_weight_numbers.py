"""Weights are numbered in the order in which they come, tied ones once."""

from __future__ import annotations

import torch
from torch import nn

from paradyse.weights.weight_numbers import WeightNumbers


def test_numbers_follow_the_order_and_last() -> None:
    numbers, weights = WeightNumbers(), [nn.Parameter(torch.ones(n)) for n in (2, 3, 2)]
    numbers.add(weights[:2])
    numbers.add([weights[1], weights[2], weights[0]])
    assert [numbers[w] for w in weights] == [0, 1, 2]
