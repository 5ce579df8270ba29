"""Where rows lie in the order of experts: from the sort of their ids to the way back."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

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
from paradyse.graph.factors import Factor, Names


@dataclass(eq=False)
class ExpertRegion:
    """The operators on rows in the order of experts that one ``ROUTE_ROWS`` gives."""

    route: fx.Node
    inside: list[fx.Node] = field(default_factory=list)
    """In graph order, ``route`` first."""
    ways_back: list[fx.Node] = field(default_factory=list)
    """What puts rows back where they were."""
    seen: str = ""
    """Why ranks cannot sort each its own rows: something sees the order. "" where they can."""

    @property
    def nodes(self) -> list[fx.Node]:
        return [*self.inside, *self.ways_back]

    @property
    def parts(self) -> dict[int, fx.Node]:
        """Which result of ``route`` -> its node, for those that are read."""
        users = (u for u in self.route.users if u.target is operator.getitem)
        return {int(u.args[1]): u for u in users}

    @property
    def matmuls(self) -> list[fx.Node]:
        return [n for n in self.inside if n.target is GROUPED_MM]

    @property
    def takes(self) -> list[fx.Node]:
        """What brings rows into the order of experts."""
        order = self.parts.get(ORDER)
        return [n for n in self.inside if n.target is TAKE_ROWS and n.args[1] is order]


def expert_region(route: fx.Node, names: Names, seq: Factor) -> ExpertRegion:
    """The region of ``route`` in a graph with ``names``, of tokens of the sequence ``seq``.

    Each rank may sort the rows of its own tokens where every operator inside computes row by row,
    or by the expert of a row, and what leaves is put back first: then no value but those inside
    depends on where a row lies among others.
    """
    region = ExpertRegion(route, [route])
    parts = region.parts
    ends, inverse = parts.get(ENDS), parts.get(INVERSE)
    inside = {route}
    for node in route.graph.nodes:
        if node is route or inside.isdisjoint(node.all_input_nodes):
            continue
        if node.target is TAKE_ROWS and node.args[1] is inverse:
            region.ways_back.append(node)
        else:
            inside.add(node)
            region.inside.append(node)
    known = {route, *parts.values()}
    for node in region.nodes:
        if node not in known and not region.seen:
            region.seen = _sees_order(node, inside, ends, parts.get(ORDER), names, seq)
    return region


def _sees_order(
    node: fx.Node,
    inside: set[fx.Node],
    ends: fx.Node | None,
    order: fx.Node | None,
    names: Names,
    seq: Factor,
) -> str:
    """Why ``node`` may depend on how all rows lie; "" where it does not."""
    if node.op != "call_function":
        return "the order of rows is an output of the graph"
    if node.target is torch.ops.aten.dropout.default:
        return f"the dropout of {node.name} depends on where a row lies"
    if seq in names.mixed(node) and node.target not in ROWS:
        return f"{node.target} mixes rows in the order of experts"
    if ends in node.all_input_nodes and not (node.target is GROUPED_MM and node.args[2] is ends):
        return f"{node.target} reads how many rows experts have"
    if node.target is TAKE_ROWS and node.args[1] is order:
        return "" if node.args[0] not in inside else f"{node.name} takes rows that are in order"
    for a in node.all_input_nodes:
        if a not in inside and seq in names.factors(a):
            return f"{node.target} reads {a}, which is not in the order of experts"
    return "" if seq in names.factors(node) else f"{node.target} gives what is of no row"


def expert_regions(
    graph: fx.Graph, names: Names, seq: Factor, split: Mapping[fx.Node, Factor] | None = None
) -> Iterator[ExpertRegion]:
    """The regions of ``graph``, as ``expert_region`` finds them for ``names`` and ``seq``, or
    the sequence that ``split`` has for it."""
    for node in graph.find_nodes(op="call_function", target=ROUTE_ROWS):
        yield expert_region(node, names, (split or {}).get(node, seq))
