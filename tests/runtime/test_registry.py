"""Captures are found by the parameters of their model, for as long as they live."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from paradyse.distributed.axis import SINGLE
from paradyse.runtime.call_weights import CallWeights
from paradyse.runtime.registry import captures_of, register


class Capture(SimpleNamespace):
    axis = SINGLE


def capture_of(model: nn.Module, fallback: Any = None) -> Capture:
    found = Capture(weights=CallWeights(list(model.parameters())), fallback=fallback)
    register(found)
    return found


def test_each_model_finds_its_own() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    first, whole, other = capture_of(one), capture_of(one, lambda: None), capture_of(two)
    assert list(captures_of(one)) == [first] and list(captures_of(one, whole=True)) == [whole]
    assert list(captures_of(two)) == [other]
    assert list(captures_of(nn.Sequential(one, two))) == [first, other]
    del first
    gc.collect()
    assert list(captures_of(one)) == []


def test_only_models_have_captures() -> None:
    with pytest.raises(ValueError, match="give the compiled model, not int"):
        list(captures_of(3))
