"""Small models that cut, pad and pick tokens, or columns, in ways of their own: each as without the
backend, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from harness import RankPool
from own_models import HEADS, VOCAB, WIDTH, Decoder, check_on_ranks, compared, in_tiers
from torch import Tensor, nn
from torch.nn import functional as F


class LogOfCut(Decoder):
    """A logarithm, and a quotient, of what is made of tokens behind the cut."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        p = self.head(x).softmax(-1)[:, :-1]
        seen = F.one_hot(ids[:, 1:], VOCAB).to(p) * 0.5 + 0.25
        return (p / seen).sum(-1).square().mean() - (p * seen).log().sum(-1).mean()


class ClassOrNone(Decoder):
    """Labels computed from tokens behind the cut."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        labels = (ids[:, 1:] == 3).long()
        return F.cross_entropy(self.head(x)[:, :-1].reshape(-1, VOCAB), labels.reshape(-1))


class TwoLosses(Decoder):
    """Of the same labels, of which each ignores others."""

    ignored: Sequence[int] = (-100, 0)

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        flat, logits = ids.flatten(), self.head(x)
        one, other = (
            F.cross_entropy(y.flatten(0, 1), flat, ignore_index=i)
            for y, i in zip((logits, 2 * logits), self.ignored, strict=True)
        )
        return one + other


class TwoLossesTurned(TwoLosses):
    ignored = (0, -100)


class LastTokens(Decoder):
    """The last 40 tokens count, of as many as there are at least; a share of all."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = self.head(x)[:, -40:-1]
        summed = F.cross_entropy(logits.flatten(0, 1), ids[:, -39:].flatten(), reduction="sum")
        return summed / ids.shape[1]


class Pieces(Decoder):
    """A loss of 16 rows at a time, of which there are as many at several lengths."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        rows, labels = x[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        pairs = zip(rows.split(16), labels.split(16), strict=True)
        losses = [F.cross_entropy(self.head(a), b, reduction="sum") for a, b in pairs]
        return torch.stack(losses).sum() / ids.numel()


class InThrees(Decoder):
    """Zeros in front, up to a multiple of three."""

    def hidden(self, ids: Tensor) -> Tensor:
        x, n = super().hidden(ids), ids.shape[1]
        padded = torch.cat([x.new_zeros(x.shape[0], -n % 3, WIDTH), x], 1)
        return x + padded.cumsum(1)[:, :n] / 10


class OneRowWritten(Decoder):
    """Words of one token are told from logits of the first."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = self.head(x).scatter(-1, ids[:, 3:4, None], -3.0)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class ExpOfCut(Decoder):
    """Exponentials, of which those of the last token would overflow."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        last = torch.where(torch.arange(n) == n - 1, 1e5, 1.0).double()[:, None]
        e = (self.head(x) * last)[:, :-1].exp()
        return (e / e.sum(-1, keepdim=True)).square().sum(-1).mean()


class EverySecond(Decoder):
    """Every second token is told."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        logits, labels = self.head(x)[:, :-1:2], ids[:, 1::2]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class CutTwice(Decoder):
    """The last token and the first word are cut off in one go."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = self.head(x)[:, :-1, 1:]
        return F.cross_entropy(logits.flatten(0, 1), (ids[:, 1:] % (VOCAB - 1)).flatten())


class CutTwiceAhead(Decoder):
    """The first token and half of the columns are cut off ahead of a layer."""

    def hidden(self, ids: Tensor) -> Tensor:
        x = super().hidden(ids)
        return x + F.pad(x[:, :-1, WIDTH // 2 :].sigmoid(), (0, WIDTH // 2, 1, 0))


class StridedTable(Decoder):
    """Places of a table 8 apart, as many as there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(256, WIDTH))

    def hidden(self, ids: Tensor) -> Tensor:
        return super().hidden(ids) + self.table[: 8 * ids.shape[1] : 8]


class StridedWrite(Decoder):
    """Tokens are written to every second place, and read with their neighbours."""

    def hidden(self, ids: Tensor) -> Tensor:
        x, n = super().hidden(ids), ids.shape[1]
        spread = x.new_zeros(x.shape[0], 2 * n + 2, WIDTH)
        spread[:, 1 : 2 * n : 2] = x
        return x + spread[:, : 2 * n : 2] + spread[:, 3 : 2 * n + 3 : 2]


class FewHeads(Decoder):
    """Every head is scaled by a column of its own of the first two heads."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(2 * x.shape[1]).view(1, 2, -1, 1).expand(x.shape[0], -1, -1, -1) % 3
        two = q.gather(-1, at).repeat_interleave(HEADS // 2, 1)
        return super().attend(layer, x, q, k, v * two)


MODELS: dict[str, tuple[Callable[[], Decoder], Sequence[int]]] = {
    "labels made behind the cut": (ClassOrNone, (13, 22)),
    "a logarithm of cut tokens": (LogOfCut, (13, 22)),
    "two losses of the same labels": (TwoLosses, (13, 22)),
    "two losses, turned": (TwoLossesTurned, (13, 22)),
    "a loss of the last tokens": (LastTokens, (44, 50, 61)),
    "a loss in pieces": (Pieces, (20, 22, 24)),
    "padding to threes": (InThrees, (13, 22, 17)),
    "exponentials of cut tokens": (ExpOfCut, (13, 22)),
    "one row is written": (OneRowWritten, (13, 22)),
    "every second token": (EverySecond, (13, 22, 17)),
    "tokens and words are cut": (CutTwice, (13, 22)),
    "tokens and columns are cut": (CutTwiceAhead, (13, 22)),
    "a table with a stride": (StridedTable, (5, 7, 16, 13)),
    "written with a stride": (StridedWrite, (13, 22, 17)),
    "columns of few heads": (FewHeads, (13, 22)),
}


def compare(name: str, strategies: Sequence[Any]) -> list[str]:
    """Of one of ``MODELS``: see ``compared``."""
    return compared(*MODELS[name], strategies)


QUICK = ("two losses of the same labels",)


@pytest.mark.parametrize("name", in_tiers(MODELS, QUICK))
def test_loss_and_gradients_are_those_of_the_model(
    name: str, pool1: RankPool, pool2: RankPool
) -> None:
    check_on_ranks(compare, name, pool1, pool2)
