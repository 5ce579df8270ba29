"""Outline the head: the linears that make logits, and what is computed of each token's logits."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import fx

from paradyse.graph.attention_call import ATTENTION
from paradyse.graph.subgraph import is_tensor, read_by_none_but

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Head:
    """Logits and their loss, token by token; nodes in graph order."""

    pre: tuple[fx.Node, ...]
    """What the linears' inputs are made by and nothing else reads, such as the last norm."""
    linears: tuple[fx.Node, ...]
    """What makes the logits: one, or several where adapters are added up."""
    core: tuple[fx.Node, ...]
    """The linears and what follows from them: each token's by itself, or sums over tokens."""
    logits: tuple[fx.Node, ...]
    """Values of the core that are wider than what the linears read, and that the graph returns."""

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return *self.pre, *self.core


def outline_head(gm: fx.GraphModule, ctx: Any) -> int:
    """Group the logits and what comes of them into heads; what a head reads stands before it.

    before: h = norm(x); y = linear(h, w); z = pad(labels); s = loss_sums(y, z); l = s[0] / s[1]
    after:  z = pad(labels); h = norm(x); y = linear(h, w); s = loss_sums(y, z); l = s[0] / s[1]
            ctx.heads = [Head(pre=[norm], linears=[linear], core=[linear, loss_sums], logits=[])]
    Refuses, with a note, logits that are dropped out, or read by what mixes tokens.
    """
    ctx.heads = []
    if ctx.seq is None:
        return 0
    nodes = list(gm.graph.nodes)
    flow = nx.DiGraph((a, n) for n in nodes for a in n.all_input_nodes)
    linears = _linears(nodes, flow, ctx)
    taken = {n for b in ctx.blocks for n in b.nodes}
    for core in _cores(nodes, linears, ctx):
        mine = [n for n in core if n in linears]
        logits = _logits(core, mine, ctx)
        if logits is None:
            continue
        along, apart = ctx.split[mine[0]], _apart(ctx)
        free = {n for n, f in ctx.split.items() if f is along} - taken - set(core) - apart
        pre = read_by_none_but(core, nodes, free)
        head = Head(tuple(pre), tuple(mine), tuple(core), tuple(logits))
        taken.update(head.nodes)
        ctx.heads.append(head)
        behind = set().union(*(nx.descendants(flow, n) for n in mine)) - set(core)
        end = gm.graph.output_node()
        for node in (*head.nodes, *(n for n in list(gm.graph.nodes) if n in behind - {end})):
            end.prepend(node)
    return len(ctx.heads)


def _apart(ctx: Any) -> set[fx.Node]:
    """Split values that ranks cannot compute of their own tokens of one sequence alone, and the
    members of several results in one."""
    roots = {*(n for n, _ in ctx.gathered), *ctx.mixed}
    return roots | {u for n in roots for u in n.users if u.target is operator.getitem}


def _linears(nodes: Sequence[fx.Node], flow: nx.DiGraph, ctx: Any) -> set[fx.Node]:
    """Those wider than what they read, with no block and none of their kind behind them."""
    inside = {n for b in ctx.blocks for n in b.nodes}
    wide = set()
    for node in nodes:
        if node.target == aten.linear.default and node in ctx.split and node not in inside:
            rows, columns = node.args[1].meta["val"].shape
            if rows > columns:
                wide.add(node)
    closed = inside | wide
    return {n for n in wide if closed.isdisjoint(nx.descendants(flow, n))}


def _cores(nodes: Sequence[fx.Node], linears: Collection[fx.Node], ctx: Any) -> list[list[fx.Node]]:
    """``linears`` and what is computed of them on split tokens, what hangs together as one; what
    needs to have seen all tokens before is in none."""
    found: dict[fx.Node, None] = {}
    behind: set[fx.Node] = set()
    links, apart = nx.Graph(), _apart(ctx)
    for node in nodes:
        inputs = node.all_input_nodes
        follows = any(a in found or a in behind for a in inputs)
        if not follows and node not in linears:
            continue
        alone = node in ctx.split and node.target is not ATTENTION and node not in apart
        if alone and behind.isdisjoint(inputs):
            found[node] = None
            links.add_node(node)
            links.add_edges_from((a, node) for a in inputs if a in found)
        else:
            behind.add(node)
    parts = list(nx.connected_components(links))
    return [[n for n in found if n in part] for part in parts]


def _logits(core: Sequence[fx.Node], linears: Sequence[fx.Node], ctx: Any) -> list[fx.Node] | None:
    """What of ``core`` is as wide as logits and returned; None where it is no head, which is noted
    if something is computed of the logits."""
    hidden = max(n.args[1].meta["val"].shape[1] for n in linears)
    inside = set(core)
    readers = {n: [u for u in n.users if u not in inside] for n in core}
    outputs = [n for n in core if readers[n]]
    wide = [n for n in outputs if _width(n, ctx) >= hidden]
    mixing = next((u for n in wide for u in readers[n] if u.op != "output"), None)
    dropout = next((n for n in core if n.target == aten.dropout.default), None)
    narrow = len(wide) < len(outputs)
    why = ""
    if mixing is not None and any(_width(n, ctx) > hidden for n in wide):
        why = f"{mixing.target} mixes tokens"
    elif dropout is not None and narrow:
        why = f"{dropout} drops some of them out"
    if why:
        ctx.note(f"the logits of {linears[0]} are always computed whole: {why}")
    return wide if narrow and mixing is None and not why else None


def _width(node: fx.Node, ctx: Any) -> float:
    """Elements of ``node`` for each token; of several tensors in one, no number is enough."""
    if not is_tensor(node):
        return math.inf
    factors = (f for d in ctx.names.of(node) for f in d)
    tokens = {*ctx.seqs, *ctx.seqs.values(), *ctx.unsplit}
    return math.prod(f.size for f in factors if f.origin()[0] not in tokens)
