"""Which operators of a graph drop out elements, and the place of each among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from paradyse.graph.attention_call import ATTENTION, AttentionCall
from paradyse.graph.subgraph import Piece

DROPOUT = torch.ops.aten.dropout.default


def is_dropout(node: fx.Node) -> bool:
    """Whether ``node`` drops out elements: of a value, or attention's probabilities."""
    if node.target is ATTENTION:
        return bool(AttentionCall.of(node).dropout_p > 0)
    return node.target == DROPOUT


def has_dropout(piece: Piece) -> bool:
    """Whether ``piece`` drops out any."""
    return any(map(is_dropout, piece.nodes))


def number_dropouts(graph: fx.Graph) -> None:
    """Note the place of each dropout of ``graph`` among them, before nodes are moved."""
    for i, node in enumerate(filter(is_dropout, graph.nodes)):
        node.meta["dropout"] = i


def first_place(nodes: Iterable[fx.Node]) -> int:
    """The place in the graph of the first dropout among ``nodes``; 0 where there is none."""
    return min((n.meta["dropout"] for n in nodes if is_dropout(n)), default=0)


def dropout_places(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The dropouts among ``nodes`` -> their places in the graph, counted on from the first one's:
    both add up to the same however many ranks cut the graph into pieces."""
    first = first_place(nodes)
    return {n: n.meta["dropout"] - first for n in nodes if is_dropout(n)}
