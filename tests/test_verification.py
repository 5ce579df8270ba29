"""Which gradient ``verify`` finds furthest off, and what it leaves behind."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import Tiny, tokens
from torch import Tensor

import paradyse
from paradyse.verification import verify, worst_gradient


class WithLoss(Tiny):
    """Its output has a loss, as those of transformers do."""

    def forward(self, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        return SimpleNamespace(loss=super().forward(ids, labels, mask))


WANT = {"weight": torch.ones(3), "norm": torch.full((3,), 1e-3), "k_proj.bias": torch.zeros(3)}


def test_each_is_held_against_its_own_norm_but_for_what_is_zero() -> None:
    noise = torch.full((3,), 1e-9)
    name, error = worst_gradient(WANT, WANT | {"k_proj.bias": noise})
    assert name == "k_proj.bias" and 0 < error < 2e-9
    name, error = worst_gradient(WANT, WANT | {"norm": torch.full((3,), 1.1e-3)})
    assert name == "norm" and math.isclose(error, 0.1, rel_tol=1e-5)


def test_what_is_no_number_is_worst_wherever_it_stands() -> None:
    wrong = {"norm": torch.full((3,), 2e-3), "k_proj.bias": torch.ones(3)}
    for nan in WANT:
        got = WANT | wrong | {nan: torch.tensor([0.0, math.nan, 0.0])}
        name, error = worst_gradient(WANT, got)
        assert name == nan and math.isnan(error)


def test_a_gradient_that_is_missing_is_named() -> None:
    got = {name: grad for name, grad in WANT.items() if name != "norm"}
    assert worst_gradient(WANT, got) == ("norm (in one only)", math.inf)


def test_each_module_is_in_its_own_mode_afterwards() -> None:
    model = Tiny(layers=1).train()
    model.head.eval()  # frozen by hand
    with pytest.raises(ValueError, match="returned no loss"):
        verify(model, {"ids": tokens(1, 8)})
    assert model.training and model.embed.training and not model.head.training


def test_a_compiled_model_is_taken_and_one_that_compiled_itself_is_not() -> None:
    model, batch = WithLoss(layers=1), {"ids": tokens(1, 8), "labels": tokens(1, 8)}
    options = {"inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    assert verify(compiled, batch, options).ok
    model.compile(backend="paradyse", options=options)
    with pytest.raises(ValueError, match=r"model.compile\(\) was called: verify the model before"):
        verify(model, batch, options)


def test_a_sharded_model_is_refused() -> None:
    """Eagerly its operators are not computed on shards, such as one rank has on the host."""
    model = paradyse.shard(WithLoss(layers=1), offload="optimizer")
    with pytest.raises(ValueError, match="the plain model, before paradyse.shard, or a copy of"):
        verify(model, {"ids": tokens(1, 8), "labels": tokens(1, 8)})
