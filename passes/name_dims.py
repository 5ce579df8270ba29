"""Name dims: find which factor of every value is batch and which is sequence."""

from __future__ import annotations

from typing import Any

from torch import fx

from paradyse.graph.attention_call import ATTENTION, AttentionCall
from paradyse.graph.infer import infer_names


def name_dims(gm: fx.GraphModule, ctx: Any) -> int:
    """Name every dim; the graph itself is unchanged.

    before: q[2, 4, 37, 16]
    after:  ctx.names.of(q) = [(B,), (H,), (S,), (D,)], ctx.seq = S, ctx.batch = B (None for one
            sequence)
    Refuses nothing: ctx.seq is None where no attention says what the sequence is.
    """
    ctx.names = infer_names(gm.graph)
    calls = [AttentionCall.of(n) for n in gm.graph.nodes if n.target is ATTENTION]
    seqs = {ctx.names.of(call.q)[2] for call in calls}
    batches = {ctx.names.of(call.q)[0] for call in calls}
    ctx.seq = ctx.batch = None
    if any(len(batch) > 1 for batch in batches):
        ctx.note("the batch of an attention is several dims in one: nothing is split")
    elif len(seqs) == 1 and len(next(iter(seqs))) == 1:
        ctx.seq = next(iter(seqs))[0]
        if len(batches) == 1 and len(next(iter(batches))) == 1:
            ctx.batch = next(iter(batches))[0]
    elif not calls:
        ctx.note("no scaled_dot_product_attention in the graph: nothing says what the sequence is")
    elif seqs == {()}:
        ctx.note("a sequence of one token: computed whole on every rank")
    else:
        ctx.note(
            f"attention layers disagree on the sequence dim ({len(seqs)} kinds): nothing is split"
        )
    return len(ctx.names.dims)
