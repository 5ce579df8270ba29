"""A block of experts as three pieces: up to the rows in the order of experts, what an expert
computes of a row, and what follows.

The middle one is the same program for any group of experts and any rows, so it serves each rank's
own experts, on rows of all ranks, and groups that come one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from paradyse.graph.dropouts import has_dropout
from paradyse.graph.expert_rules import ENDS, GROUPED_MM, IN_ORDER
from paradyse.graph.factors import Factor
from paradyse.graph.subgraph import Piece, is_weight, make_piece
from paradyse.strategies.base import Scope
from paradyse.strategies.groups.analyse import closure, factors_of
from paradyse.strategies.groups.model import Unsplittable
from paradyse.weights.slices import Form, Rows

aten = torch.ops.aten

Dealt = tuple[tuple[int, ...], ...]
"""Per rank its experts, equally many for each: -1 for one that is missing."""


def deal_experts(num_experts: int, num_ranks: int) -> Dealt:
    """Experts as evenly as it goes, in order: each rank's are the rows that it holds of a weight
    that rests evenly.

    Args:
        num_experts: of the block.
        num_ranks: of the axis; ranks beyond the number of experts have none.
    """
    ends = [num_experts * r // num_ranks for r in range(num_ranks + 1)]
    most = max(b - a for a, b in zip(ends, ends[1:]))
    return tuple((*range(a, b), *[-1] * (most - b + a)) for a, b in zip(ends, ends[1:]))


@dataclass(frozen=True)
class ExpertGroups:
    """A block of experts in three pieces, with a group of experts for each rank."""

    dealt: Dealt
    before: Piece
    """On the rank's tokens; gives ``rows``, ``ends`` and what ``after`` reads besides."""
    experts: Piece
    """Gives ``result`` of ``rows``."""
    after: Piece
    """On the rank's tokens; reads ``result``."""
    rows: tuple[fx.Node, ...]
    """Values in the order of experts, a row for each of a token's experts."""
    in_order: fx.Node | None
    """The expert of each row, where ``experts`` reads it."""
    ends: fx.Node
    """Where the rows of each expert end."""
    result: fx.Node
    forms: Mapping[fx.Node, Form]
    """Weights of ``experts``, and how a group takes each."""
    sizes: Mapping[Factor, int]
    """Of the factors of experts, and of rows: 1, where the sequence has as many as there are."""

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Per group its first expert and the one behind its last."""
        found, at = [], 0
        for group in self.dealt:
            real = sum(e >= 0 for e in group)
            found.append((at, at + real))
            at += real
        return tuple(found)


def split_experts(scope: Scope, block: Any) -> ExpertGroups:
    """The three pieces of ``block``, for one group of experts for each rank of ``scope``'s axis.

    Raises:
        Unsplittable: experts are not apart in its weights, or something mixes them.
    """
    region, names, down = block.experts, scope.names, block.down
    parts = region.parts
    ends, in_order = parts[ENDS], parts.get(IN_ORDER)
    stops = {*region.takes, *parts.values()}
    nodes = closure(scope, [down], set(region.inside) - stops, stops)
    experts = make_piece("experts", nodes, [down])
    by_row = [n for n in nodes if in_order in n.all_input_nodes]
    of_experts = [ends, *(n.args[0] for n in by_row)]
    dims = {names.of(n)[0] for n in of_experts}
    if any(len(d) != 1 or d[0].size != ends.meta["val"].shape[0] for d in dims):
        raise Unsplittable("it has one expert, or experts of several dims")
    factors = {d[0] for d in dims}
    dealt = deal_experts(ends.meta["val"].shape[0], scope.axis.size)
    for node in nodes:
        picked = node.target is aten.index.Tensor and list(node.args[1]) == [in_order]
        apart = picked or node.target is GROUPED_MM
        if node in by_row and not picked or factors & names.mixed(node) and not apart:
            raise Unsplittable(f"{node.target} mixes experts")
    if has_dropout(experts):
        raise Unsplittable("its experts have dropout, which depends on the place of a row")
    forms = {n: _form(scope, n, factors, dealt) for n in experts.inputs if is_weight(n)}
    rows = tuple(n for n in experts.inputs if n in region.takes)
    if strange := [n for n in experts.inputs if n not in {*rows, *forms, ends, in_order}]:
        raise Unsplittable(f"its experts read {strange[0]}, which is no row of theirs")
    behind = _behind(block.nodes, down)
    after = make_piece("after", closure(scope, [block.output], behind, [down]), [block.output])
    members = set(block.nodes) - behind - set(nodes)
    given = list(dict.fromkeys(n for n in (*rows, ends, *after.inputs) if n in members))
    before = make_piece("before", closure(scope, given, members), given)
    sizes = dict.fromkeys(names.of(rows[0])[0], 1) | dict.fromkeys(factors, len(dealt[0]))
    return ExpertGroups(
        dealt, before, experts, after, rows, in_order if by_row else None, ends, down, forms, sizes
    )


def _form(scope: Scope, weight: fx.Node, experts: set[Factor], dealt: Dealt) -> Form:
    """How a group takes ``weight``, where ``experts`` are the factors that have its experts."""
    if not experts & factors_of(scope, weight):
        return None
    first, *others = scope.names.of(weight)
    if not experts.issuperset(first) or any(f in experts for d in others for f in d):
        raise Unsplittable(f"experts are not the first dim of {weight}")
    return Rows(0, dealt)


def _behind(nodes: Sequence[fx.Node], start: fx.Node) -> set[fx.Node]:
    """Of ``nodes``, in any order, those that depend on ``start``."""
    inside, found, stack = set(nodes), set[fx.Node](), [start]
    while stack:
        for user in stack.pop().users:
            if user in inside and user not in found:
                found.add(user)
                stack.append(user)
    return found
