"""Part joins: compute what each token has by itself on the parts of a join."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from paradyse.graph.attention_call import ATTENTION, AttentionCall
from paradyse.graph.edit import value_of
from paradyse.graph.factors import RULES, Factor, Names
from paradyse.graph.infer import infer_names
from paradyse.graph.rules import argument, elementwise, normalization
from paradyse.graph.subgraph import is_tensor

aten = torch.ops.aten

_BY_TOKEN = (elementwise, normalization, RULES[aten.linear.default])
"""Rules of operators that may compute each token by itself."""

_SIZED = {aten.expand.default, aten.broadcast_to.default, aten.expand_as.default}
"""Operators that name the size of the join."""


@dataclass(frozen=True)
class _Join:
    """A value that is made of ``parts`` along ``dim``."""

    dim: int
    parts: tuple[fx.Node, ...]

    @property
    def sizes(self) -> list[int]:
        return [p.meta["val"].shape[self.dim] for p in self.parts]


def part_joins(gm: fx.GraphModule, ctx: Any) -> int:
    """Take a join of tokens apart where attention is over a dim of one of its parts, and not over
    the join: as a whole it cannot be split along that dim, and its parts can.

    before: x = cat([c, p], 1); y = add(x, linear(x, w)); q = slice(y, 1, 1); r = select(y, 1, 0)
    after:  q = add(p, linear(p, w)); r = select(add(c, linear(c, w)), 1, 0)
    where c is a class token and p the patches of all frames. What reads the join otherwise gets it
    joined from what was computed of its parts.
    Refuses nothing: other joins stay as they are.
    """
    nodes = list(gm.graph.nodes)
    calls = [AttentionCall.of(n) for n in nodes if n.target is ATTENTION]
    if not calls or not any(_is_join(n) for n in nodes):
        return 0
    names = infer_names(gm.graph)
    over = {f for call in calls for x in (call.q, call.k) for f in names.of(x)[2]}
    joins: dict[fx.Node, _Join] = {}
    for node in nodes:
        if _is_join(node):
            dim = argument(node, "dim") % node.meta["val"].ndim
            whole = {*names.of(node)[dim]}
            inside = {f for part in node.args[0] for f in names.of(part)[dim]}
            if inside & over and not whole & over:
                joins[node] = _Join(dim, tuple(node.args[0]))
        elif any(a in joins for a in node.all_input_nodes):
            _take_apart(gm.graph, node, joins, names)
    if not joins:
        return 0
    count = len(joins)
    for node in reversed(list(joins)):
        if not node.users:
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    return count


def _is_join(node: fx.Node) -> bool:
    """Whether ``node`` joins values [B, .., N, .., D] along another dim than the last, as rotary
    embeddings join halves."""
    if node.target is not aten.cat.default or not is_tensor(node):
        return False
    value, dim = node.meta["val"], argument(node, "dim")
    return (
        value.ndim >= 3
        and dim % value.ndim != value.ndim - 1
        and value.is_floating_point()
        and all(p.meta["val"].ndim == value.ndim for p in node.args[0])
    )


def _take_apart(graph: fx.Graph, node: fx.Node, joins: dict[fx.Node, _Join], names: Names) -> None:
    """Have ``node``, which reads some of ``joins``, read their parts, where it can."""
    if node.target in (aten.slice.Tensor, aten.select.int):
        _pick(graph, node, joins[node.args[0]])
        return
    by_token = any(RULES.get(node.target) is rule for rule in _BY_TOKEN)
    if not by_token or node.target in _SIZED or not is_tensor(node):
        return
    read = {a: joins[a] for a in node.all_input_nodes if a in joins}
    first, join = next(iter(read.items()))
    dims = names.of(node)
    factors = {f for a, j in read.items() for f in names.of(a)[j.dim]}
    at = [d for d, dim in enumerate(dims) if factors & {*dim}]
    alike = all(j.sizes == join.sizes for j in read.values())
    if len(at) != 1 or len(dims[at[0]]) != 1 or not alike or factors & names.mixed(node):
        return
    others = [a for a in node.all_input_nodes if a not in joins and is_tensor(a)]
    if any(_has(names, a, factors) for a in others):
        return
    parts = []
    with graph.inserting_before(node):
        for i in range(len(join.parts)):
            parts.append(_copy(graph, node, {a: j.parts[i] for a, j in read.items()}))
        whole = graph.call_function(aten.cat.default, (parts, at[0]))
    whole.meta = dict(node.meta)
    names.dims[whole] = names.dims[node]
    node.replace_all_uses_with(whole)
    graph.erase_node(node)
    joins[whole] = _Join(at[0], tuple(parts))


def _has(names: Names, node: fx.Node, factors: set[Factor]) -> bool:
    return any(factors & {*dim} for dim in names.of(node))


def _copy(graph: fx.Graph, node: fx.Node, parts: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """``node`` with ``parts`` in place of the inputs that they are of."""
    made = graph.node_copy(node, lambda a: parts.get(a, a))
    made.meta = {**node.meta, "val": value_of(made)}
    return made


def _pick(graph: fx.Graph, node: fx.Node, join: _Join) -> None:
    """Have ``node``, a slice or a row of ``join``, read the one part that has all of it."""
    ndim = join.parts[0].meta["val"].ndim
    if argument(node, "dim") % ndim != join.dim:
        return
    total, start = sum(join.sizes), 0
    if node.target is aten.select.int:
        first = argument(node, "index") % total
        end = first + 1
    else:
        if argument(node, "step") != 1:
            return
        ends = argument(node, "start") or 0, argument(node, "end")
        first, end = slice(*ends).indices(total)[:2]
    for part, size in zip(join.parts, join.sizes, strict=True):
        if start <= first and end <= start + size:
            if node.target is aten.select.int:
                node.args = (part, join.dim, first - start)
            elif (first, end) == (start, start + size):
                node.replace_all_uses_with(part)
                graph.erase_node(node)
            return
        start += size
