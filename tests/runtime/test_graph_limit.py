"""More graphs of one function than Dynamo compiles by default: none runs without the backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paradyse.runtime.graph_limit import make_room_for_graphs
from paradyse.runtime.registry import captures_of
from paradyse.torch_private import dynamo_config


class ByMode(nn.Module):
    """Dynamo makes a graph for each text that ``mode`` is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mode = nn.Linear(4, 4), ""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2 if self.mode == "double" else 1)


def compiled_modes() -> tuple[ByMode, Any]:
    torch._dynamo.reset()
    model = ByMode()
    return model, torch.compile(model, backend="paradyse", options={"inner": "eager"})


def test_each_mode_has_a_graph() -> None:
    with dynamo_config.patch(recompile_limit=2):
        model, compiled = compiled_modes()
        for num in range(12):
            model.mode = str(num)
            compiled(torch.ones(2, 4)).sum().backward()
            assert len([*captures_of(model, whole=True)]) == num + 1


def test_the_last_that_dynamo_compiles_is_refused() -> None:
    with dynamo_config.patch(recompile_limit=2, accumulated_recompile_limit=4):
        model, compiled = compiled_modes()
        for num in range(3):
            model.mode = str(num)
            compiled(torch.ones(2, 4)).sum().backward()
        model.mode = "another"
        with pytest.raises(Exception, match=r"this is graph 4 of one function.*accumulated_recomp"):
            compiled(torch.ones(2, 4))


def test_limits_that_raise_are_left() -> None:
    with dynamo_config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        make_room_for_graphs()
        assert dynamo_config.recompile_limit == 2
