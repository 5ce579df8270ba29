"""More graphs of one function than Dynamo compiles by default: none runs without the backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Tiny, tokens
from torch import Tensor, nn

from paradyse.choice import _Choices
from paradyse.distributed.axis import SINGLE
from paradyse.distributed.session import Recent
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


class Clamped(Tiny):
    """Is given a number."""

    def forward(self, ids: Tensor, labels: Tensor, most: int) -> Any:
        return super().forward(ids, labels).clamp(max=most)


def test_numbers_that_vary_are_told_of_and_forgotten(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recent, "CAPACITY", 10)
    torch._dynamo.reset()
    model = Clamped(layers=1)
    options = {"inner": "eager", "plan": "ulysses_z"}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    ids = tokens(2, 9)
    for most in range(2, 22):
        compiled(ids, ids, most).backward()
    graphs = [len(c.graphs) for c in captures_of(compiled)]
    assert max(graphs) == 10, graphs
    said = [r.getMessage() for r in caplog.records if "differ from call to call" in r.getMessage()]
    assert len(said) == 1 and "give them as tensors" in said[0]
    choices = [len(of) for of in SINGLE.session.of(_Choices).of_weight.values()]
    assert max(choices) <= 10, choices
