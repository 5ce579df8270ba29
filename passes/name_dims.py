"""Name dims: find which factor of every value is batch and which is sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import paradyse.strategies.attention.operators  # noqa: F401  registers the attention operators
from paradyse.graph.factors import rule
from paradyse.graph.infer import infer_names
from paradyse.graph.rules import attention_dims

attention = torch.ops.paradyse.attention.default
rule(attention)(attention_dims)


def name_dims(gm: fx.GraphModule, ctx: Any) -> int:
    """Name every dim; the graph itself is unchanged.

    before: q[2, 4, 37, 16]
    after:  ctx.names.of(q) = [(B,), (H,), (S,), (D,)], ctx.seq = S, ctx.batch = B (None for one
            sequence)
    Refuses nothing: ctx.seq is None where no attention says what the sequence is.
    """
    ctx.names = infer_names(gm.graph)
    anchors = [n for n in gm.graph.nodes if n.target == attention]
    seqs = {ctx.names.of(n.args[0])[2] for n in anchors}
    batches = {ctx.names.of(n.args[0])[0] for n in anchors}
    ctx.seq = ctx.batch = None
    if len(seqs) == 1 and len(next(iter(seqs))) == 1:
        ctx.seq = next(iter(seqs))[0]
        if len(batches) == 1 and len(next(iter(batches))) == 1:
            ctx.batch = next(iter(batches))[0]
    elif not anchors:
        ctx.note("no scaled_dot_product_attention in the graph: nothing says what the sequence is")
    elif seqs == {()}:
        ctx.note("a sequence of one token: computed whole on every rank")
    else:
        ctx.note(
            f"attention layers disagree on the sequence dim ({len(seqs)} kinds): nothing is split"
        )
    return len(ctx.names.dims)
