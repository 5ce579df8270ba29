"""Explain numbers: those among operators' arguments that are a length, or made of one.

A bound of ``clamp``, a class to ignore, where a table is cut: in a graph of plain integers they
look like constants. Two traces at different sizes tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from paradyse.graph.factors import Length
from paradyse.graph.subgraph import is_tensor, is_weight


def explain_numbers(
    traced: fx.GraphModule, other: fx.GraphModule
) -> dict[fx.Node, dict[int, Length]]:
    """The arguments of ``traced`` that differ from those of ``other``, the same graph at other
    sizes, as one size of an input does, or as what a fixed number leaves of it.

    Refuses what two sizes explain that are not equal, and graphs that differ in their operators.
    """
    nodes, others = list(traced.graph.nodes), list(other.graph.nodes)
    if [(n.op, n.target) for n in nodes] != [(n.op, n.target) for n in others]:
        return {}
    sizes: dict[tuple[int, int], tuple[fx.Node, int]] = {}
    for node, twin in zip(nodes, others, strict=True):
        if node.op == "placeholder" and is_tensor(node) and not is_weight(node):
            pairs = zip(node.meta["val"].shape, twin.meta["val"].shape, strict=True)
            for d, pair in enumerate(pairs):
                if pair[0] != pair[1]:
                    sizes.setdefault(pair, (node, d))
    found: dict[fx.Node, dict[int, Length]] = {}
    for node, twin in zip(nodes, others, strict=True):
        for i, (x, y) in enumerate(zip(node.args, twin.args, strict=False)):
            if type(x) is int and type(y) is int and x != y:
                length = _length(x, y, sizes)
                if length is not None:
                    found.setdefault(node, {})[i] = length
    return found


def _length(x: int, y: int, sizes: Mapping[tuple[int, int], tuple[fx.Node, int]]) -> Length | None:
    """What is ``x`` at the first of ``sizes`` and ``y`` at the second."""
    found = [
        Length(*at, x - sign * a, sign)
        for (a, b), at in sizes.items()
        for sign in (1, -1)
        if x - sign * a == y - sign * b
    ]
    exact = [e for e in found if e.start == 0]
    return exact[0] if exact else found[0] if len(found) == 1 else None
