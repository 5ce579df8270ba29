"""The beginning of a backward: ranks are told, and second derivatives are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from paradyse.distributed.facts import NO_SYNC
from paradyse.runtime.backward import begin_backward
from paradyse.weights.no_sync import GradientSync


class Told(list[tuple[str, dict[str, Any]]]):
    def backward(self, output: str, gradients: dict[str, Any]) -> None:
        self.append((output, gradients))

    def nears_end(self) -> None:
        raise AssertionError("there are no gradients to wait for")


def test_ranks_are_told_which_output_and_whether_gradients_are_kept() -> None:
    told: Any = Told()
    for call in (told, None):  # with one rank there is nobody to tell
        loss = torch.ones((), requires_grad=True) * 2
        loss.register_hook(partial(begin_backward, call, GradientSync(), "loss"))
        loss.backward()
    ((output, gradients),) = told
    assert output == "loss" and gradients.keys() == {NO_SYNC}


def test_a_graph_of_the_backward_is_refused_before_anybody_is_told() -> None:
    told: Any = Told()
    with pytest.raises(
        NotImplementedError, match="create_graph=True.*neither compiled nor sharded"
    ):
        begin_backward(told, GradientSync(), "loss", torch.ones(()))
    assert not told
