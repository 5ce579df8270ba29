"""Convolutions without a bias under autocast: their kernels take one dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Tiny, tokens
from torch import Tensor, nn


class Convolved(Tiny):
    """Has each channel see its neighbours, behind a linear of 16 bits."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__(layers=1)
        self.mix = nn.Linear(32, 32)
        self.near: Any = kind(32, 32, 3, padding=1, groups=32, bias=False)

    def extra(self, x: Tensor) -> Tensor:
        return x + self.near(self.mix(x).transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d])
def test_the_casts_of_convolutions_are_in_the_graph(kind: type[nn.Module]) -> None:
    torch._dynamo.reset()
    model, ids = Convolved(kind), tokens(2, 9)
    compiled: Any = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    found = []
    for call in model, compiled:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(ids, ids)
        loss.backward()
        found.append((loss.detach(), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(found[1], found[0])
