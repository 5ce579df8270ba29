"""Shifted logits: the loss of all tokens, of which the last have no label, is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import context, operators, run, trace
from torch import Tensor
from torch.nn import functional as F

from paradyse.passes.pad_labels import pad_labels

Loss = Callable[[Tensor, Tensor], Any]


def flat(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


PADDED: dict[str, Loss] = {
    "shifted by one": lambda y, t: flat(y[:, :-1], t[:, 1:]),
    "by two": lambda y, t: flat(y[..., :-2, :].contiguous(), t[..., 2:], reduction="sum"),
    "cast and scaled": lambda y, t: flat(y[:, :-1].double() / 3, t[:, 1:].int().long()),
    "a class or none": lambda y, t: flat(y[:, :-1], (t[:, 1:] == 4).long()),
    "remainders": lambda y, t: flat(y[:, :-1], t[:, 1:] % 5),
    "no less than one": lambda y, t: F.cross_entropy(
        y[:, :-1].flatten(0, 1), t[:, 1:].flatten().clamp(min=1)
    ),
    "the next class": lambda y, t: flat(y[:, :-1], (t[:, 1:] + 1) % 11, reduction="sum"),
    "viewed": lambda y, t: F.cross_entropy(
        y[:, :-1].reshape(-1, 11), t[:, 1:].reshape(-1), ignore_index=4, label_smoothing=0.1
    ),
}


def arguments() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(11, (2, 5))
    return torch.randn(2, 5, 11), torch.where(labels == 3, 4, labels)


@pytest.mark.parametrize("name", PADDED)
def test_the_loss_is_the_same_and_no_logits_are_cut(name: str) -> None:
    inputs, fn = arguments(), PADDED[name]
    gm = trace(fn, *inputs)
    assert operators(gm)["slice"] >= 2
    assert pad_labels(gm, context()) == 1
    slices = [n for n in gm.graph.nodes if "slice" in n.name]
    assert all(n.meta["val"].ndim == 2 for n in slices) and operators(gm)["constant_pad_nd"] == 1
    torch.testing.assert_close(run(gm, *inputs), fn(*inputs))
    (loss,) = [n for n in gm.graph.nodes if "cross_entropy" in n.name]
    assert [a.meta["val"].shape[0] for a in loss.args[:2]] == [10, 10]


REFUSED: dict[str, Loss] = {
    "infinite where cut": lambda y, t: flat(
        y.masked_fill(torch.arange(5)[:, None] > 3, -torch.inf)[:, :-1], t[:, 1:]
    ),
    "a logarithm": lambda y, t: flat(y[:, :-1].exp().log(), t[:, 1:]),
    "not shifted": lambda y, t: flat(y, t),
    "single tokens": lambda y, t: flat(y[:, :-1], t[:, 1:], reduction="none"),
    "from the middle": lambda y, t: flat(y[:, 1:], t[:, 1:]),
    "other classes": lambda y, t: flat(y[..., :-1], t.clamp(max=9)),
    "a sum before": lambda y, t: flat(y.cumsum(1)[:, :-1].softmax(-1), t[:, 1:]),
    "labels of their own": lambda y, t: flat(y[:, :-1], t.flatten()[:8].view(2, 4)),
    "probabilities": lambda y, t: F.cross_entropy(
        y[:, :-1].flatten(0, 1), y[:, :-1].softmax(-1).flatten(0, 1)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_stays(name: str) -> None:
    gm = trace(REFUSED[name], *arguments())
    before = str(gm.graph)
    assert pad_labels(gm, context()) == 0 and str(gm.graph) == before
