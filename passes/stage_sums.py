"""Stage sums: what is summed over tokens and words is summed over the words first."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from paradyse.graph.attention_call import ATTENTION, AttentionCall
from paradyse.graph.edit import call_like
from paradyse.graph.factors import Factor, Names
from paradyse.graph.infer import infer_names
from paradyse.graph.rules import argument, dims_along
from paradyse.strategies.weight_stream import sum_dtype

aten = torch.ops.aten

_BY_DIMS = {
    aten.sum.default: aten.sum.dim_IntList,
    aten.sum.dim_IntList: aten.sum.dim_IntList,
    aten.mean.default: aten.mean.dim,
    aten.mean.dim: aten.mean.dim,
}
"""Reductions that are of some dims what they are of these one after the other, gradients too: that
of a maximum is shared by all places that have it, and a ``logsumexp`` of nothing but -inf, as of a
token that is masked out, has none."""


def stage_sums(gm: fx.GraphModule, ctx: Any) -> int:
    """Reduce over what a token has before tokens are mixed: then ranks do so for their own tokens,
    and one number of each is gathered, not all.

    before: z = sum(x)                      x[B, S, V]
    after:  y = sum(x, [2], True); z = sum(y)
    Tokens are what attention is over, or has a batch of, and what ids are looked up for. Half
    precision is summed up in 32 bits until the end.
    Refuses what is summed over tokens alone, or over no tokens.
    """
    found = [n for n in gm.graph.nodes if n.target in _BY_DIMS and _may_stage(n)]
    if not found:
        return 0
    names, count = infer_names(gm.graph), 0
    tokens = _tokens(gm.graph, names)
    for node in found:
        dims = names.of(node.args[0])
        over = dims_along(node, len(dims))
        has = [any(f.origin()[0] in tokens for f in dim) for dim in dims]
        apart = [d for d in over if dims[d] and not has[d]]
        if apart and any(has[d] for d in over):
            _stage(gm, node, apart)
            count += 1
    return count


def _may_stage(node: fx.Node) -> bool:
    ndim = node.args[0].meta["val"].ndim
    several = len(dims_along(node, ndim)) > 1
    return several and ndim > 1 and bool(node.meta["val"].is_floating_point())


def _tokens(graph: fx.Graph, names: Names) -> set[Factor]:
    """Dims of tokens and of their batches."""
    found: set[Factor] = set()
    for node in graph.nodes:
        if node.target is ATTENTION:
            call = AttentionCall.of(node)
            dims = [d for x in (call.q, call.k) for d in (names.of(x)[0], names.of(x)[2])]
        else:
            looks_up = node.target is aten.embedding.default
            dims = names.of(node.args[1]) if looks_up else []
        found.update(f.origin()[0] for dim in dims for f in dim)
    return found


def _stage(gm: fx.GraphModule, node: fx.Node, apart: list[int]) -> None:
    """Have ``node`` reduce what was reduced over the dims ``apart``."""
    x, val = node.args[0], node.meta["val"]
    wide = argument(node, "dtype") or sum_dtype(x.meta["val"])
    with gm.graph.inserting_before(node):
        first = call_like(node, _BY_DIMS[node.target], (x, apart, True), {"dtype": wide})
    node.replace_input_with(x, first)
    if val.dtype != wide:
        node.meta = {**node.meta, "val": val.new_empty(val.shape, dtype=wide)}
        with gm.graph.inserting_after(node):
            last = gm.graph.call_function(aten.to.dtype, (node, val.dtype))
        last.meta = {**node.meta, "val": val}
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user is not last)
