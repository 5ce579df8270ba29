"""What a model on the meta device must be for its program to be known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Tiny
from torch import Tensor

from paradyse.offline.capture import capture_program, fake_world


class Broken(Tiny):
    """Dynamo makes two graphs of it: blocks are in the first, and the head in the second."""

    def extra(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


def test_a_model_of_several_graphs_is_no_program() -> None:
    """Plans for the first graph alone would leave out what the others take."""
    torch._dynamo.reset()
    with torch.device("meta"):
        ids = torch.zeros(1, 16, dtype=torch.int64)
        batch: dict[str, Any] = {"ids": ids, "labels": ids}
        whole, broken = Tiny(layers=1).train(), Broken(layers=1).train()
    with fake_world(2) as axis:
        assert len(capture_program(whole, batch, axis).block_steps) == 2
        with pytest.raises(ValueError, match=r"called with ids, labels: .*graph_break.* one graph"):
            capture_program(broken, batch, axis)
