"""Models as people write them, with numbers that are none, or of other kinds, on the way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import RankPool
from own_models import VOCAB, WHOLE, Decoder, compared
from torch import Tensor
from torch.nn import functional as F


class ValuesOfAllHeads(Decoder):
    """Heads share their values, as in a temporal fusion transformer."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v.mean(1, keepdim=True), is_causal=True)


class KeysOfOneHead(Decoder):
    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k[:, :1], v, is_causal=True)


class WeightedFromTheSecond(Decoder):
    """What weighs a token is infinite at the one that is cut off."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        w = torch.arange(ids.shape[1]).to(x).rsqrt()[None, :, None]
        return (self.head(x)[:, 1:] * w[:, 1:]).logsumexp(-1).mean()


class LabelsBehindTheEnd(Decoder):
    """A label that is no class belongs to the token that is cut off."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        labels = F.pad(ids[:, 1:], (0, 1), value=-100).unsqueeze(-1)
        return -self.head(x)[:, :-1].log_softmax(-1).gather(-1, labels[:, :-1]).mean()


class NoClassAtTheEnd(Decoder):
    """All classes are masked where logits are cut off, so that they have no softmax there."""

    def logits(self, x: Tensor) -> Tensor:
        last = torch.arange(x.shape[1], device=x.device)[:, None] > x.shape[1] - 2
        return self.head(x).masked_fill(last, -math.inf)[:, :-1]

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x).flatten(0, 1), ids[:, 1:].flatten())


class NoClassByATensor(NoClassAtTheEnd):
    def logits(self, x: Tensor) -> Tensor:
        last = torch.arange(x.shape[1], device=x.device)[:, None] > x.shape[1] - 2
        y = self.head(x)
        return torch.where(last, torch.tensor(-math.inf, dtype=y.dtype), y)[:, :-1]


class LikelihoodsWithoutTheEnd(NoClassAtTheEnd):
    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.logits(x).logsumexp(-1).mean()


class LogarithmsAtTheEnd(Decoder):
    """Probabilities that are cut off are zero."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        last = torch.arange(x.shape[1], device=x.device)[:, None] > x.shape[1] - 2
        p = self.head(x).softmax(-1).masked_fill(last, 0.0)
        return F.cross_entropy(p[:, :-1].log().flatten(0, 1), ids[:, 1:].flatten())


class LabelsTurned(Decoder):
    """Labels go with the logits of other tokens, whatever for."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.t().flatten() % VOCAB)


class LeastAlike(Decoder):
    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[2]
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        return (q @ k.mT * -0.5).masked_fill(hidden, -math.inf).softmax(-1) @ v


class ScoresInWords(Decoder):
    """Scores are divided by a whole number, and by a root that was cut to one."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / torch.tensor(math.sqrt(20.0)).long()).softmax(-1) @ v


class ProductsWidened(Decoder):
    """Scores and their product with the values are of a wider type than what they are made of."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (z.float() for z in (q, k, v))
        return ((q @ k.mT).double() * 0.5).softmax(-1) @ v.double()


ALONE: dict[str, type[Decoder]] = {
    of.__name__: of
    for of in (
        ValuesOfAllHeads,
        KeysOfOneHead,
        WeightedFromTheSecond,
        LabelsBehindTheEnd,
        NoClassAtTheEnd,
        NoClassByATensor,
        LikelihoodsWithoutTheEnd,
        LogarithmsAtTheEnd,
        LeastAlike,
        ScoresInWords,
    )
}


def compare(name: str, strategies: list[Any]) -> list[str]:
    return compared(ALONE.get(name, LabelsTurned), (13, 22), strategies)


@pytest.mark.parametrize("name", ALONE)
def test_on_one_rank_they_are_as_without_the_backend(name: str) -> None:
    assert compare(name, ["auto"]) == []


@pytest.mark.broad(but="ValuesOfAllHeads")
@pytest.mark.parametrize("name", ALONE)
def test_on_two_ranks_too(name: str, pool2: RankPool) -> None:
    for off in pool2.run(compare, name, [*WHOLE, "auto"], timeout_s=100):
        assert off == []


def test_labels_in_another_order_than_logits(pool2: RankPool) -> None:
    for off in pool2.run(compare, LabelsTurned.__name__, ["megatron_cz"], timeout_s=100):
        assert off == []


def test_attention_has_the_type_of_its_product() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = ProductsWidened().double()
    ids = torch.randint(VOCAB, (2, 13))
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    loss, want = compiled(ids), model(ids)
    assert loss.dtype == want.dtype == torch.float64
    assert abs((loss - want).item()) < 1e-6
