"""Losses in one spelling: rows of classes, logits instead of log likelihoods, sums apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import context, operators, run, trace
from torch import Tensor
from torch.nn import functional as F

from paradyse.passes.unify_losses import unify_losses

Loss = Callable[[Tensor, Tensor, Tensor], Any]
CLASSES = 7


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    """Logits [2, 5, C], labels [2, 5], and others' logits."""
    torch.manual_seed(0)
    labels = torch.randint(CLASSES, (2, 5))
    return torch.randn(2, 5, CLASSES), labels, torch.randn(2, 5, CLASSES)


def unified(fn: Loss, count: int) -> Any:
    inputs = arguments()
    gm = trace(fn, *inputs)
    assert unify_losses(gm, context()) == count
    torch.testing.assert_close(run(gm, *inputs), fn(*inputs))
    return gm


BY_ROWS: dict[str, Loss] = {
    "transposed": lambda y, t, z: F.cross_entropy(y.transpose(1, 2), t),
    "transposed from the end": lambda y, t, z: F.cross_entropy(y.transpose(-1, -2), t),
    "permuted": lambda y, t, z: F.cross_entropy(y.permute(0, 2, 1), t, reduction="sum"),
    "soft": lambda y, t, z: F.cross_entropy(y.mT, z.softmax(-1).transpose(1, 2)),
    "one by one": lambda y, t, z: F.cross_entropy(y.transpose(1, 2), t, reduction="none"),
    "options": lambda y, t, z: F.cross_entropy(
        y.transpose(1, 2), t, z[0, 0].sigmoid(), ignore_index=3, label_smoothing=0.1
    ),
    "two dims": lambda y, t, z: F.cross_entropy(
        torch.stack([y, z], 2).permute(0, 3, 1, 2), torch.stack([t, t.flip(1)], 2)
    ),
    "sequences as classes": lambda y, t, z: F.cross_entropy(y, t[:, :1].expand(2, CLASSES) % 5),
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_classes_come_last(name: str) -> None:
    gm = unified(BY_ROWS[name], 1)
    (loss,) = [n for n in gm.graph.nodes if "cross_entropy" in n.name]
    dense = loss.args[1].meta["val"].is_floating_point()
    assert [a.meta["val"].ndim for a in loss.args[:2]] == [2, 1 + dense]


def test_a_transpose_is_undone_not_repeated() -> None:
    gm = unified(BY_ROWS["transposed"], 1)
    assert not {"transpose", "permute"} & operators(gm).keys()


LIKELIHOODS: dict[str, Loss] = {
    "rows": lambda y, t, z: F.nll_loss(y.flatten(0, 1).log_softmax(-1), t.flatten()),
    "flattened after": lambda y, t, z: F.nll_loss(y.log_softmax(2).flatten(0, 1), t.flatten()),
    "cut after": lambda y, t, z: F.nll_loss(
        y.log_softmax(-1)[:, :-1].reshape(-1, CLASSES), t[:, 1:].flatten(), reduction="none"
    ),
    "cast": lambda y, t, z: F.nll_loss(
        y.flatten(0, 1).log_softmax(-1, dtype=torch.float64), t.flatten(), ignore_index=2
    ),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_likelihood_of_logits_is_their_cross_entropy(name: str) -> None:
    found = operators(unified(LIKELIHOODS[name], 1))
    assert found["cross_entropy_loss"] == 1
    assert not {"nll_loss_nd", "log_softmax"} & found.keys()


def test_classes_second_are_both() -> None:
    found = operators(unified(lambda y, t, z: F.nll_loss(y.mT.log_softmax(1), t), 2))
    assert found["cross_entropy_loss"] == 1 and "log_softmax" not in found


APART: dict[str, Loss] = {
    "divergence": lambda y, t, z: F.kl_div(
        y.log_softmax(-1), z.log_softmax(-1), log_target=True, reduction="sum"
    ),
    "by batch": lambda y, t, z: F.kl_div(y.log_softmax(-1), z.softmax(-1), reduction="batchmean"),
    "squares": lambda y, t, z: F.mse_loss(y, z),
    "smooth": lambda y, t, z: F.smooth_l1_loss(y, z, beta=0.3, reduction="sum"),
    "Huber": lambda y, t, z: F.huber_loss(y, z, delta=0.7),
    "binary": lambda y, t, z: F.binary_cross_entropy_with_logits(
        y, z.sigmoid(), weight=z[0].abs(), pos_weight=z[0, 0].exp()
    ),
    "soft targets of some tokens": lambda y, t, z: F.cross_entropy(
        y[:, :-1].flatten(0, 1), z[:, 1:].softmax(-1).flatten(0, 1), label_smoothing=0.2
    ),
}


@pytest.mark.parametrize("name", APART)
def test_the_sum_stands_apart(name: str) -> None:
    gm = unified(APART[name], 1)
    sums = [n for n in gm.graph.nodes if n.name.startswith(("mean", "sum"))]
    assert len(sums) == 1 and sums[0].meta["val"].ndim == 0
    assert sums[0].args[0].meta["val"].ndim > 0


STAY: dict[str, Loss] = {
    "rows": lambda y, t, z: F.cross_entropy(y.flatten(0, 1), t.flatten()),
    "soft rows": lambda y, t, z: F.cross_entropy(y.flatten(0, 1), z.softmax(-1).flatten(0, 1)),
    "no log_softmax": lambda y, t, z: F.nll_loss(y.flatten(0, 1).tanh(), t.flatten()),
    "of other classes": lambda y, t, z: F.nll_loss(y.log_softmax(1).flatten(0, 1), t.flatten()),
    "no longer the same rows": lambda y, t, z: F.nll_loss(
        y.log_softmax(-1).transpose(1, 2).reshape(-1, 5), t[0].repeat(3)[:14] % 5
    ),
    "one by one": lambda y, t, z: F.mse_loss(y, z, reduction="none"),
    "one sample": lambda y, t, z: F.cross_entropy(y[0, 0], t[0, 0]),
}


@pytest.mark.parametrize("name", STAY)
def test_others_stay(name: str) -> None:
    gm = trace(STAY[name], *arguments())
    before = str(gm.graph)
    assert unify_losses(gm, context()) == 0 and str(gm.graph) == before
