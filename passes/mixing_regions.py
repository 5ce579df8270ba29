"""Where tokens are mixed by heads or channels: parts of a graph that ranks can share by these."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import fx

from paradyse.distributed.switch import rows_per_rank
from paradyse.graph.expert_rules import ROUTE_ROWS
from paradyse.graph.factors import Dim, Factor, times
from paradyse.graph.subgraph import is_tensor, is_weight
from paradyse.graph.switches import is_shifted, mixes
from paradyse.strategies.loss import loss_sums

aten = torch.ops.aten

_APART = {loss_sums, ROUTE_ROWS, aten.cross_entropy_loss.default, aten.embedding.default}
"""Operators that are no part of such a region."""


@dataclass(frozen=True, eq=False)
class MixingRegion:
    """Operators that mix tokens and keep another dim: a rank computes them for all tokens and a
    part of that dim."""

    nodes: tuple[fx.Node, ...]
    """In graph order."""
    seq: Factor
    """The sequence along which tokens are split around it."""
    over: Factor
    """The dim that is split inside: heads, channels, or the batch."""


def mixing_regions(
    gm: fx.GraphModule, ctx: Any, alone: Callable[[fx.Node], bool]
) -> list[MixingRegion]:
    """The parts of ``gm`` that were placed on gathered tokens and have a dim that they do not mix.

    before: ctx.gathered = [(conv1d, ..)]; y = conv1d(x)[.., :S]; z = softmax(q @ k) @ v
    after:  [MixingRegion([conv1d, slice], S, channels), MixingRegion([q @ k, ..], S, heads)]
    Refuses what gives values without tokens or without that dim: sums over tokens, their first one.

    Args:
        gm: named and placed.
        ctx: of the passes.
        alone: whether ranks could compute an operator for their own tokens, were it split.
    """
    behind: dict[fx.Node, None] = {}
    roots = {node for node, _ in ctx.gathered}
    for node in gm.graph.nodes:
        follows = any(a in behind for a in node.all_input_nodes)
        if node in roots or (follows and node not in ctx.split and node.op == "call_function"):
            behind[node] = None
    flow = nx.DiGraph((a, n) for n in gm.graph.nodes for a in n.all_input_nodes)
    mixing = [n for n in behind if not alone(n)]
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    found: list[MixingRegion] = []
    for part in _convex(nx.connected_components(_links(mixing)), flow):
        nodes = tuple(sorted(part, key=order.__getitem__))
        seq = next((ctx.split[a] for n in nodes for a in n.all_input_nodes if a in ctx.split), None)
        over = _kept_dim(nodes, seq, ctx) if seq is not None and part & roots else None
        if seq is not None and over is not None:
            found.append(MixingRegion(nodes, seq, over))
            _bring_together(nodes, flow)
    return found


def _links(nodes: Sequence[fx.Node]) -> nx.Graph:
    links, inside = nx.Graph(), set(nodes)
    links.add_nodes_from(nodes)
    links.add_edges_from((a, n) for n in nodes for a in n.all_input_nodes if a in inside)
    return links


def _convex(parts: Iterable[set[fx.Node]], flow: nx.DiGraph) -> list[set[fx.Node]]:
    """``parts`` with what lies on ways from one of their nodes to another, and the members of
    several results; those that then overlap are one."""
    done: list[set[fx.Node]] = []
    todo = [set(p) for p in parts]
    while todo:
        part = todo.pop()
        while True:
            behind = set().union(*(nx.descendants(flow, n) for n in part))
            ahead = set().union(*(nx.ancestors(flow, n) for n in part))
            several = {u for n in part for u in n.users if u.target is operator.getitem}
            more = ((behind & ahead) | several) - part
            if not more:
                break
            part |= more
        if touching := next((d for d in done if d & part), None):
            done.remove(touching)
            todo.append(part | touching)
        else:
            done.append(part)
    return done


def _kept_dim(nodes: Sequence[fx.Node], seq: Factor, ctx: Any) -> Factor | None:
    """The dim that ``nodes`` can be computed split along: that which leaves a rank the least;
    the batch, of which a call may have less than there are ranks, only if there is no other."""
    inside = set(nodes)
    if any(n.target in _APART or n in ctx.whole_attention for n in nodes):
        return None
    if any(n in ctx.split and ctx.split[n] is not seq for n in nodes):
        return None
    given = [n for n in nodes if any(u not in inside for u in n.users)]
    if not given or any(not is_tensor(n) for n in given):
        return None
    read = [a for n in nodes for a in n.all_input_nodes if a not in inside]
    if any(_has_tokens_twice(dims, seq) for n in (*given, *read) for dims in ctx.names.of_each(n)):
        return None
    closed = [*nodes, *_from_weights(nodes)]
    common = [f for d in ctx.names.of(given[0]) for f in d if f is not seq and f.size > 1]
    tokens = {*ctx.seqs, *ctx.unsplit}

    def work(over: Factor) -> tuple[bool, int]:
        return over is ctx.batch, sum(_elements(ctx, n, over) for n in nodes)

    for over in sorted(dict.fromkeys(common), key=work):
        if over in tokens or any(mixes(ctx.names, n, over) for n in closed):
            continue
        ends = (dims for n in given for dims in ctx.names.of_each(n))
        if all(times(d, over) == 1 and times(d, seq) == 1 for d in ends):
            return over
    return None


def _has_tokens_twice(dims: Sequence[Dim], seq: Factor) -> bool:
    """Whether ``dims`` have the tokens of ``seq``, and these and some more, or less, in another
    dim: the other one is of all tokens where the first is split."""
    return times(dims, seq) > 0 and any(is_shifted(f, seq) for d in dims for f in d)


def _elements(ctx: Any, node: fx.Node, over: Factor) -> int:
    """Those of ``node`` that a rank computes where ``over`` is split."""
    val = node.meta["val"]
    several = val if isinstance(val, tuple | list) else [val]
    share = rows_per_rank(over.size, ctx.axis.size)
    pairs = zip(several, ctx.names.of_each(node), strict=True)
    return sum(x.numel() // over.size * share if times(d, over) else x.numel() for x, d in pairs)


def _from_weights(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Operators that ``nodes`` read and that are computed from weights alone, maybe inside."""
    found: dict[fx.Node, None] = {}
    known: dict[fx.Node, bool] = {}
    for node in nodes[0].graph.nodes:
        inputs = node.all_input_nodes
        known[node] = is_weight(node) or bool(inputs) and all(known[a] for a in inputs)
    stack = [a for n in nodes for a in n.all_input_nodes]
    while stack:
        node = stack.pop()
        if known[node] and node.op == "call_function" and node not in found:
            found[node] = None
            stack += node.all_input_nodes
    return list(found)


def _bring_together(nodes: Sequence[fx.Node], flow: nx.DiGraph) -> None:
    """Move ``nodes``, which are in graph order, behind all that they are computed from and before
    all else that is between them."""
    inside, between = set(nodes), [nodes[0]]
    while between[-1] is not nodes[-1]:
        between.append(between[-1].next)
    behind = set().union(*(nx.descendants(flow, n) for n in nodes)) - inside
    end = nodes[-1].next
    for node in (
        *(n for n in between if n not in inside and n not in behind),
        *nodes,
        *(n for n in between if n in behind),
    ):
        end.prepend(node)
