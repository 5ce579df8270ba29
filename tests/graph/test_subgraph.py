"""Parts of a graph as functions: at other sizes, and as text that equal parts share."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from paradyse.graph import subgraph
from paradyse.graph.factors import Names
from paradyse.graph.infer import infer_names
from paradyse.torch_private import make_fx

B, S, H, D = 2, 5, 3, 4


def block(x: Tensor, w: Tensor) -> Tensor:
    """Sizes everywhere: of a view, of new tensors, of indices, of the end of a slice."""
    b, s, _ = x.shape
    heads = torch.nn.functional.linear(x, w).reshape(b, s, H, D)
    places = torch.arange(1, s + 1) + torch.arange(0, 2 * s, 2) + x.new_ones(s).long()
    table = places[0:s].view(s, 1).expand(s, D)
    return (heads + table[:, None]).unflatten(2, (1, -1)).flatten(2) * torch.ones(b, s, 1)


def traced(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[fx.GraphModule, Names]:
    gm = make_fx(fn, pre_dispatch=True)(*(torch.randn(n) for n in shapes))
    return gm, infer_names(gm.graph)


def whole(gm: fx.GraphModule) -> subgraph.Piece:
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    return subgraph.make_piece("whole", nodes, nodes[-1:])


@pytest.mark.parametrize("sizes", [(B, S), (3, 8), (1, 2)])
def test_a_piece_runs_at_other_sizes(sizes: tuple[int, int]) -> None:
    gm, names = traced(block, (B, S, 7), (H * D, 7))
    piece = whole(gm)
    (batch,), (seq,), _ = names.of(piece.inputs[0])
    b, s = sizes
    x, w = torch.randn(b, s, 7), torch.randn(H * D, 7)
    (got,) = subgraph.run(piece, [x, w], names, {batch: b, seq: s})
    torch.testing.assert_close(got, block(x, w))


def test_a_piece_runs_on_some_of_the_heads() -> None:
    gm, names = traced(block, (B, S, 7), (H * D, 7))
    piece = whole(gm)
    heads = names.of(piece.inputs[1])[0][0]
    x, w = torch.randn(B, S, 7), torch.randn(H * D, 7)
    (got,) = subgraph.run(piece, [x, w[D : 3 * D]], names, {heads: 2})
    torch.testing.assert_close(got, block(x, w)[..., D : 3 * D])


def test_a_value_is_let_go_of_when_it_was_last_read() -> None:
    gm, names = traced(lambda x: (x + 1).sin().cos() + x, (3,))
    piece = whole(gm)
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def watched(node: fx.Node, *args: Any) -> Tensor:
        alive.append(sum(ref() is not None for ref in made))
        out: Tensor = node.target(*args)
        made.append(weakref.ref(out))
        return out

    overrides = {n: partial(watched, n) for n in piece.nodes}
    subgraph.run(piece, [torch.ones(3)], names, {}, overrides)
    assert alive == [0, 1, 1, 1]


def test_an_operator_is_replaced() -> None:
    gm, names = traced(lambda x: x.sin() + x.cos(), (3,))
    piece = whole(gm)
    (sin,) = [n for n in piece.nodes if n.target == torch.ops.aten.sin.default]
    (got,) = subgraph.run(piece, [torch.zeros(3)], names, {}, {sin: lambda x: x + 5})
    assert got.tolist() == [6, 6, 6]


def test_what_nothing_needs_is_left_out() -> None:
    gm, _ = traced(lambda x: (x.sin().exp(), x.cos()), (3,))
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    live = subgraph.live_nodes(nodes, [nodes[1]])
    assert [n.name for n in live] == ["sin", "exp"]
    piece = subgraph.make_piece("part", live[1:], live[1:])
    assert [n.name for n in piece.inputs] == ["sin"]


def text(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> str:
    gm, names = traced(fn, *shapes)
    piece = whole(gm)
    (batch,), (seq,), *_ = names.of(piece.inputs[0])
    return subgraph.structure(piece, names, subgraph.Labels({batch: "B", seq: "S"}))


def test_pieces_that_differ_in_lengths_alone_have_one_text() -> None:
    at = text(block, (B, S, 7), (H * D, 7))
    assert at == text(block, (3, 9, 7), (H * D, 7))
    assert "[B, S, 7]" in at and "(1, '1+1*S')" in at and "(0, '0+2*S', 2)" in at
    assert at != text(block, (B, S, 6), (H * D, 6))
    assert at != text(lambda x, w: block(x, w).sin(), (B, S, 7), (H * D, 7))


def test_weights_and_data_are_told_apart() -> None:
    gm, names = traced(block, (B, S, 7), (H * D, 7))
    before = subgraph.structure(whole(gm), names, subgraph.Labels())
    weight = whole(gm).inputs[1]
    assert not subgraph.is_weight(weight)
    weight.meta["weight"] = True
    assert subgraph.is_weight(weight)
    assert subgraph.structure(whole(gm), names, subgraph.Labels()) != before


def test_a_number_on_the_host_does_not_say_where_a_graph_computes() -> None:
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("number", "size", "tokens", "mask")]
    values = torch.tensor(0.5), 7, torch.empty(2, 7, device="meta"), torch.empty(2, device="meta")
    for node, value in zip(inputs, values, strict=True):
        node.meta["val"] = value
    assert subgraph.device_of(inputs).type == "meta"
    assert subgraph.device_of(inputs[:2]).type == "cpu"
