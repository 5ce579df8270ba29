"""What a forward writes into weights is written, also into shards, and the graph is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import RankPool
from models import whole
from tiny import Tiny, tokens
from torch import Tensor, nn

from paradyse.runtime.registry import captures_of


class Clamped(Tiny):
    """Holds weights within bounds, as Gemma3n does."""

    calls = 2
    """Before backward."""

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        if self.training:
            self.layers[0]["down"].weight.data.clamp_(-0.05, 0.05)
            self.layers[1]["up"].weight.data.mul_(0.9).clamp_(min=-0.2)
        return super().forward(ids, labels)


class ClampedBySteps(Tiny):
    """The same where autograd knows of it: one call for each backward."""

    calls = 1

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        with torch.no_grad():
            self.layers[0]["down"].weight.mul_(0.9).clamp_(-0.05, 0.05)
        return super().forward(ids, labels)


class ReadFirst(Tiny):
    """Reads a weight before it is written, and after."""

    calls = 1

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        before = self.layers[0]["down"].weight.square().sum()
        self.layers[0]["down"].weight.data.clamp_(-0.05, 0.05)
        return super().forward(ids, labels) + before


class Follows(Tiny):
    """A weight that nothing is trained of follows another one, as MoCo's do (arXiv 1911.05722)."""

    calls = 1

    def __init__(self) -> None:
        super().__init__()
        self.follower = nn.Linear(*self.layers[0]["down"].weight.T.shape)
        self.follower.requires_grad_(False)

    def follow(self, mine: Any, other: Any) -> None:
        mine.weight.mul_(0.9).add_(other.weight, alpha=0.1)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        with torch.no_grad():
            self.follow(self.follower, self.layers[0]["down"])
        return super().forward(ids, labels) + self.follower.weight.square().sum()


class FollowsByData(Follows):
    """The same, unseen by autograd."""

    def follow(self, mine: Any, other: Any) -> None:
        mine.weight.data = mine.weight.data * 0.9 + other.weight.data * 0.1
        mine.bias.data[1:].mul_(0.5)


def train(model_type: Any, sharded: bool) -> None:
    import paradyse

    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = model_type().double()
    torch.manual_seed(0)
    model = model_type().double()
    if sharded:
        paradyse.shard(model)
    options = {"inner": "eager", "plan": "ulysses_z"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=3.0) for m in (model, reference)]
    for n in (7, 12, 9):
        for call, optimizer in zip((compiled, reference), optimizers, strict=True):
            optimizer.zero_grad()
            seeds = [n + i for i in range(reference.calls)]
            loss = sum(call(tokens(2, n, seed), tokens(2, n, seed + 50)) for seed in seeds)
            loss.backward()  # of two calls: the second one wrote what the first had read
            optimizer.step()
        for got, want in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(got), want.detach(), rtol=1e-9, atol=1e-12)
    is_split = issubclass(model_type, Clamped | ClampedBySteps)
    assert bool(list(captures_of(compiled))) == is_split
    assert bool(list(captures_of(compiled, whole=True))) != is_split


@pytest.mark.broad(but="ClampedBySteps-False")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("model_type", [Clamped, ClampedBySteps])
def test_weights_that_a_forward_writes(model_type: Any, sharded: bool, pool2: RankPool) -> None:
    pool2.run(train, model_type, sharded, timeout_s=100)


@pytest.mark.broad(but="FollowsByData-True")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("model_type", [Follows, FollowsByData])
def test_weights_that_a_graph_on_every_rank_writes(
    model_type: Any, sharded: bool, pool2: RankPool
) -> None:
    pool2.run(train, model_type, sharded, timeout_s=100)


def test_a_weight_that_is_read_before_is_left_alone(pool2: RankPool) -> None:
    pool2.run(train, ReadFirst, False, timeout_s=100)
