"""The beginning of a backward: ranks are told, and second derivatives are refused."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from paradyse.distributed.facts import NO_SYNC
from paradyse.runtime.backward import begin_backward
from paradyse.weights.no_sync import GradientSync, no_sync


class Told(list[tuple[str, dict[str, Any], bool]]):
    def backward(self, output: str, gradients: dict[str, Any], at_once: bool) -> None:
        self.append((output, gradients, at_once))

    def nears_end(self) -> None:
        raise AssertionError("there are no gradients to wait for")


def test_ranks_are_told_which_output_and_whether_gradients_are_kept() -> None:
    told: Any = Told()
    for call in (told, None):  # with one rank there is nobody to tell
        loss = torch.ones((), requires_grad=True) * 2
        loss.register_hook(partial(begin_backward, call, GradientSync(), "loss"))
        loss.backward()
    ((output, gradients, at_once),) = told
    assert output == "loss" and gradients.keys() == {NO_SYNC} and at_once


def test_what_compares_gradients_tells_with_them_unless_they_are_kept_back() -> None:
    told: Any = Told()
    weight = nn.Parameter(torch.ones(2))
    for kept in (True, False):
        loss = weight.sum()
        begin = partial(begin_backward, told, GradientSync([weight]), "loss", compares=True)
        loss.register_hook(begin)
        with no_sync(nn.ParameterList([weight])) if kept else nullcontext():
            loss.backward()
        weight.grad = None
    assert [at_once for *_, at_once in told] == [True, False]


def test_a_graph_of_the_backward_is_refused_before_anybody_is_told() -> None:
    told: Any = Told()
    with pytest.raises(
        NotImplementedError, match="create_graph=True.*neither compiled nor sharded"
    ):
        begin_backward(told, GradientSync(), "loss", torch.ones(()))
    assert not told
