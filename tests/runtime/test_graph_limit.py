"""More graphs of one function than Dynamo compiles by default: none runs without the backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paradyse.runtime.graph_limit import make_room_for_graphs
from paradyse.runtime.registry import captures_of
from paradyse.torch_private import dynamo_config

LAYERS = 12


def compiled_layers() -> tuple[nn.Sequential, Any]:
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS))).requires_grad_(False)
    options = {"inner": "eager"}
    return model, torch.compile(model, backend="paradyse", options=options)


def test_each_set_of_trained_weights_has_a_graph() -> None:
    with dynamo_config.patch(recompile_limit=2):
        model, compiled = compiled_layers()
        for num, layer in enumerate(reversed(model)):
            layer.requires_grad_(True)
            compiled(torch.ones(2, 4)).sum().backward()
            assert len([*captures_of(model, whole=True)]) == num + 1


def test_the_last_that_dynamo_compiles_is_refused() -> None:
    with dynamo_config.patch(recompile_limit=2, accumulated_recompile_limit=4):
        model, compiled = compiled_layers()
        for layer in [*reversed(model)][:3]:
            layer.requires_grad_(True)
            compiled(torch.ones(2, 4)).sum().backward()
        model[0].requires_grad_(True)
        with pytest.raises(Exception, match=r"this is graph 4 of one function.*accumulated_recomp"):
            compiled(torch.ones(2, 4))


def test_limits_that_raise_are_left() -> None:
    with dynamo_config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        make_room_for_graphs()
        assert dynamo_config.recompile_limit == 2
