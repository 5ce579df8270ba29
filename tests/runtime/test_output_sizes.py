"""Whole numbers that models return, keep or carry over a graph break are those of each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import RankPool
from torch import Tensor, nn
from torch.nn import functional as F

LENGTHS = (13, 22, 17, 40)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(11, 16), nn.Linear(16, 48)
        self.out, self.head = nn.Linear(16, 16), nn.Linear(16, 11)
        self.longest, self.breaks = 0, False

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        q, k, v = (z.unflatten(-1, (4, -1)).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        self.longest = ids.shape[1]
        loss = F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten(), reduction="sum")
        if self.breaks:
            half = x.shape[1] // 2 + 1
            torch._dynamo.graph_break()
            return loss / half
        return loss, ids.numel(), {"half": x.shape[1] // 2 + 1}


def told(breaks: bool) -> list[tuple[Any, Any]]:
    """At each length what the model says, and what it says without the backend."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, found = Counting().double(), []
    model.breaks = breaks
    compiled: Any = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    for n in LENGTHS:
        ids = torch.arange(2 * n).view(2, n) % 11
        of = []
        for run in (model, compiled):
            out = run(ids)
            loss, *more = out if isinstance(out, tuple) else (out,)
            model.zero_grad()
            loss.backward()
            assert model.head.bias.grad is not None
            sums = [round(x, 9) for x in (loss.item(), model.head.bias.grad.square().sum().item())]
            of.append((sums, more, model.longest))
        found.append((of[0], of[1]))
    return found


@pytest.mark.parametrize("breaks", [False, True], ids=["given", "behind a break"])
def test_numbers_are_of_each_call(breaks: bool, pool1: RankPool, pool2: RankPool) -> None:
    for pool in (pool1, pool2):
        for found in pool.run(told, breaks, timeout_s=100):
            for plain, compiled in found:
                assert compiled == plain
