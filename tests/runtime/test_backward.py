"""The hook that begins a backward: ranks are told what it is; second derivatives are refused."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

from paradyse.distributed.facts import NO_SYNC
from paradyse.runtime.backward import begin_backward
from paradyse.weights.no_sync import AT_ONCE, GradientSync


class Told:
    """A call that notes what ranks are told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Mapping[str, Any]]] = []

    def backward(self, output: str, common: Mapping[str, Any]) -> None:
        self.heard.append((output, common))


def run(call: Any, create_graph: bool = False) -> torch.Tensor:
    x = torch.ones(2, requires_grad=True)
    loss = x.exp().sum()
    loss.register_hook(partial(begin_backward, call, GradientSync(), "loss"))
    loss.backward(create_graph=create_graph)
    assert x.grad is not None
    return x.grad


def test_ranks_are_told_how_gradients_come_together() -> None:
    call = Told()
    torch.testing.assert_close(run(call), torch.ones(2).exp())
    assert call.heard == [("loss", {NO_SYNC: AT_ONCE})]


def test_without_other_ranks_nobody_is_told() -> None:
    torch.testing.assert_close(run(None), torch.ones(2).exp())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_second_derivatives_are_refused_before_anything_is_told() -> None:
    call = Told()
    with pytest.raises(NotImplementedError, match=r"double backward \(create_graph=True\)"):
        run(call, create_graph=True)
    assert not call.heard
