"""Operators that are written into a graph have fake values."""

from __future__ import annotations

import torch
from torch import fx

from paradyse.graph.edit import call_like, compute, value_of

aten = torch.ops.aten


def test_a_call_has_the_value_of_its_operator_and_what_else_is_known() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta = {"val": torch.empty(2, 3, requires_grad=True), "module": "layer"}
    y = call_like(x, aten.sum.dim_IntList, (x, [1]), {"dtype": torch.float64})
    assert y.meta["module"] == "layer"
    assert (y.meta["val"].shape, y.meta["val"].dtype) == ((2,), torch.float64)
    assert value_of(y).shape == (2,) and not value_of(y).requires_grad
    other = compute(y.target, y.args, y.kwargs, {x: torch.empty(5, 3)})
    assert other.shape == (5,)
