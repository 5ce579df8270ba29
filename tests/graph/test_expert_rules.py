"""Names of rows while they are in the order of experts."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from paradyse.graph.expert_rules import (
    ENDS,
    GROUPED_MM,
    INVERSE,
    ORDER,
    ROUTE_ROWS,
    ROWS,
    TAKE_ROWS,
)
from paradyse.graph.factors import Names
from paradyse.graph.infer import infer_names

TOKENS, TOP, EXPERTS, WIDTH, OUT = 6, 2, 4, 3, 5


def graph() -> tuple[dict[str, fx.Node], Names]:
    """x [T, w] to its k experts with weights [E, w, o] and back, and the names of all dims."""
    made = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    def node(name: str, val: Any, target: Any = None, *args: Any) -> fx.Node:
        nodes[name] = made.call_function(target, args) if target else made.placeholder(name)
        nodes[name].meta["val"] = val
        return nodes[name]

    x = node("x", torch.zeros(TOKENS, WIDTH))
    ids = node("ids", torch.zeros(TOKENS, TOP, dtype=torch.int64))
    weight = node("weight", torch.zeros(EXPERTS, WIDTH, OUT))
    flat = node("flat", torch.zeros(12), torch.ops.aten.reshape.default, ids, [12])
    numbers = [torch.zeros(12, dtype=torch.int64)] * 3
    of_experts = torch.zeros(EXPERTS, dtype=torch.int32)
    route = node("route", (*numbers, of_experts), ROUTE_ROWS, flat, EXPERTS)
    parts = [
        node(name, route.meta["val"][i], operator.getitem, route, i)
        for i, name in enumerate(("in_order", "order", "inverse", "ends"))
    ]
    order, inverse, ends = parts[ORDER], parts[INVERSE], parts[ENDS]
    rows = node("rows", torch.zeros(12, WIDTH), TAKE_ROWS, x, order, inverse, TOP)
    y = node("y", torch.zeros(12, OUT), GROUPED_MM, rows, weight, ends)
    node("back", torch.zeros(12, OUT), TAKE_ROWS, y, inverse, order, 1)
    return nodes, infer_names(made)


def test_rows_are_named_by_their_tokens_in_any_order() -> None:
    nodes, names = graph()
    tokens, top = names.of(nodes["ids"])
    assert names.of(nodes["x"])[0] == tokens
    for name in ("in_order", "order", "inverse", "rows", "y", "back"):
        assert names.of(nodes[name])[0] == (*tokens, *top), name


def test_experts_are_one_dim_of_weights_and_counts() -> None:
    nodes, names = graph()
    expert, width, out = names.of(nodes["weight"])
    assert names.of(nodes["ends"]) == [expert]
    assert names.of(nodes["rows"])[1] == width and names.of(nodes["back"])[1] == out


def test_each_operator_alone_mixes_rows() -> None:
    nodes, names = graph()
    (tokens,) = names.of(nodes["x"])[0]
    mixing = {n.target for n in nodes.values() if tokens in names.mixed(n)}
    assert mixing == ROWS
