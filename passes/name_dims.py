"""Name dims: find which factor of every value is batch and which is sequence."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from paradyse.graph.attention_call import ATTENTION, AttentionCall
from paradyse.graph.factors import Factor, Names
from paradyse.graph.infer import infer_names

aten = torch.ops.aten

_MERGES = (aten.reshape.default, aten.view.default, aten.flatten.using_ints)


def name_dims(gm: fx.GraphModule, ctx: Any) -> int:
    """Name every dim; the graph itself is unchanged.

    before: q[2, 4, 37, 16]
    after:  ctx.names.of(q) = [(B,), (H,), (S,), (D,)], ctx.seq = S, ctx.batch = B (None for one
            sequence; the outermost factor where the batch is several dims in one)
    A sequence that is made of several dims, such as rows and columns of patches, has a name of its
    own. Where attention is over several sequences, S is the one whose tokens have the most work in
    linears; a note says what is over another one and stays whole.
    Refuses nothing: ctx.seq is None where no attention says what the sequence is.
    """
    ctx.names = infer_names(gm.graph)
    queries = {n: AttentionCall.of(n).q for n in gm.graph.nodes if n.target is ATTENTION}
    merged = _merged_sequences(gm.graph, ctx.names, list(queries.values()))
    if merged:
        ctx.names = infer_names(gm.graph, merged)
    over: dict[Factor, list[fx.Node]] = defaultdict(list)
    dims = {n: ctx.names.of(q)[2] for n, q in queries.items()}
    for node, dim in dims.items():
        if len(dim) == 1:
            over[dim[0]].append(node)
    ctx.seq, ctx.batch, ctx.sequences = None, None, ()
    if over:
        ctx.seq = max(over, key=lambda f: _work(gm.graph, ctx.names, f))
        batches = {ctx.names.of(queries[n])[0] for n in over[ctx.seq]}
        if len(batches) == 1:
            (ctx.sequences,) = batches
            ctx.batch = next(iter(ctx.sequences), None)
        _note_others([n for n in queries if n not in over[ctx.seq]], ctx)
    elif not queries:
        ctx.note("no scaled_dot_product_attention in the graph: nothing says what the sequence is")
    elif not any(dims.values()):
        ctx.note("a sequence of one token: computed whole on every rank")
    else:
        ctx.note("the sequence of an attention is several dims in one: nothing is split")
    return len(ctx.names.dims)


def _merged_sequences(
    graph: fx.Graph, names: Names, queries: list[fx.Node]
) -> list[tuple[fx.Node, int]]:
    """Where dims become a sequence, such as rows and columns of patches: reshapes, and the dims
    that they make of several."""
    compound = {dim for dim in (names.of(q)[2] for q in queries) if len(dim) > 1}
    return [
        (node, d)
        for node in graph.nodes
        if node.target in _MERGES and names.mixed(node) == set()
        for d, dim in enumerate(names.of(node))
        if dim in compound and dim not in names.of(node.args[0])
    ]


def _work(graph: fx.Graph, names: Names, seq: Factor) -> int:
    """Multiplications of linears for tokens of ``seq``."""
    return sum(
        n.meta["val"].numel() * n.args[1].meta["val"].shape[-1]
        for n in graph.nodes
        if n.target == aten.linear.default and any(seq in dim for dim in names.of(n))
    )


def _note_others(attentions: list[fx.Node], ctx: Any) -> None:
    if attentions:
        first = attentions[0].meta.get("module") or attentions[0].name
        ctx.note(
            f"attention over another sequence than the one that is split is computed whole on "
            f"every rank: {len(attentions)} of them, the first in {first}"
        )
