"""Name dims: find which factor of every value is batch and which is sequence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from paradyse.distributed.axis import GroupMesh
from paradyse.graph.attention_call import ATTENTION, AttentionCall
from paradyse.graph.dropouts import number_dropouts
from paradyse.graph.factors import Dim, Factor, Names
from paradyse.graph.infer import infer_names
from paradyse.passes.looked_up import cut_sequences, inputs_of, looked_up_sequences
from paradyse.types import BATCH, other_dim

aten = torch.ops.aten

_MERGES = (aten.reshape.default, aten.view.default, aten.flatten.using_ints)


def name_dims(gm: fx.GraphModule, ctx: Any) -> int:
    """Name every dim, and number the dropouts; the graph itself is unchanged.

    before: q[2, 4, 37, 16]
    after:  ctx.names.of(q) = [(B,), (H,), (S,), (D,)], ctx.seq = S, ctx.batch = B (None for one
            sequence; the outermost factor where the batch is several dims in one)
    A sequence that is made of several dims, such as rows and columns of patches, has a name of its
    own. Where attention is over several sequences, as in encoder and decoder, ctx.seqs has all, and
    S is the one of whose tokens each has the most work in linears. Where the same tokens have
    several dims that attention is over in turn, such as time and space, one of them is in ctx.seqs
    and is split, and the others are in ctx.unsplit: the one whose split leaves the most attention
    as it is, of equal ones the first. (Sizes say nothing here: programs serve all of them.)
    Where ``ctx.at_rest`` says so another dim than that is split: the batch, or one of ctx.unsplit.
    Where several ranks train, without any attention, the sequence is that of the token ids that are
    looked up. It stays one dim where views cut it into chunks, or merge these again.
    Refuses nothing: ctx.seq is None where neither says what the sequence is.
    """
    number_dropouts(gm.graph)
    ctx.names = infer_names(gm.graph)
    calls = [AttentionCall.of(n) for n in gm.graph.nodes if n.target is ATTENTION]
    heads = [x for call in calls for x in (call.q, call.k)]
    compound = {dim for dim in (ctx.names.of(x)[2] for x in heads) if len(dim) > 1}
    by_ids = not calls and _trains_together(ctx)
    cut = cut_sequences(gm.graph, ctx.names) if by_ids else set()
    merged = _merged_sequences(gm.graph, ctx.names, compound | cut)
    if merged or cut:
        ctx.names = infer_names(gm.graph, merged, inputs_of(gm.graph, ctx.names, cut))
    ctx.names.lengths = ctx.lengths
    over: dict[Factor, dict[Dim, None]] = defaultdict(dict)
    dims = {x: ctx.names.of(x) for x in heads}
    for batch, _, seq, _ in dims.values():
        if len(seq) == 1:
            over[seq[0]][batch] = None
    ctx.seq, ctx.batch, ctx.sequences, ctx.seqs, ctx.unsplit = None, None, (), {}, ()
    if by_ids:
        over.update(looked_up_sequences(gm.graph, ctx.names))
    for factor in [f for f in over if f.origin()[0] is not f and f.origin()[0] in over]:
        del over[factor]  # another sequence with some tokens more
    if over:
        turns = {f: [g for g in over if g is not f and _in_turn(f, g, over)] for f in over}

        def preference(f: Factor) -> tuple[int, int]:
            kept = [_kept(f, ctx.names.of(call.q)) for call in calls] if turns[f] else []
            return -_work(gm.graph, ctx.names, f), -sum(kept)

        order: list[Factor] = []
        for factor in sorted(over, key=preference):
            if any(f in turns[factor] for f in order):
                ctx.unsplit = (*ctx.unsplit, factor)
            else:
                order.append(factor)
        batches = {f: next(iter(over[f])) if len(over[f]) == 1 else () for f in order}
        ctx.seqs = {f: next(iter(batches[f]), None) for f in order}
        ctx.seq = order[0]
        ctx.batch, ctx.sequences = ctx.seqs[ctx.seq], batches[ctx.seq]
        if ctx.at_rest:
            _split_another(ctx)
    elif not calls:
        ctx.note("no attention and no look-up of token ids: nothing says what the sequence is")
    elif not any(seq for _, _, seq, _ in dims.values()):
        ctx.note("a sequence of one token: computed whole on every rank")
    else:
        ctx.note("the sequence of an attention is several dims in one: nothing is split")
    return len(ctx.names.dims)


def _split_another(ctx: Any) -> None:
    """Have tokens lie split along the dim that ``ctx.at_rest`` names in place of the sequence,
    which is one of ``ctx.unsplit`` then; along none, with a note, where they have no such dim."""
    seq, dims = ctx.seq, {BATCH: ctx.batch}
    dims |= {other_dim(i): f for i, f in enumerate(ctx.unsplit, 1)}
    found, several = dims.get(ctx.at_rest), len(ctx.seqs) > 1
    ctx.seqs, ctx.seq, ctx.batch = {}, None, None
    if several or found is None:
        what = "tokens of several sequences" if several else "tokens that lack this dim"
        ctx.note(f"{what} are not split along {ctx.at_rest!r}")
        return
    batch = [dims[BATCH]] if found is not dims[BATCH] and dims[BATCH] is not None else []
    ctx.unsplit = (seq, *(f for f in ctx.unsplit if f is not found), *batch)
    ctx.sequences = (*(f for f in ctx.sequences if f is not found), seq)
    ctx.seq, ctx.seqs = found, {found: None}


def _trains_together(ctx: Any) -> bool:
    """Whether other ranks train the same weights; else a graph without attention is left whole."""
    in_group = isinstance(getattr(ctx.options, "mesh", None), GroupMesh)
    return ctx.axis.size > 1 or ctx.replicas.size > 1 or in_group


def _in_turn(f: Factor, g: Factor, over: Mapping[Factor, Iterable[Dim]]) -> bool:
    """Whether the same tokens have both ``f`` and ``g``: the batch of attention ``over`` one of
    them has the other."""
    return any(g in dim for dim in over[f]) or any(f in dim for dim in over[g])


def _kept(factor: Factor, queries: Sequence[Dim]) -> bool:
    """Whether attention of ``queries`` [B, H, S, D] may be split along ``factor``."""
    return factor in queries[0] or factor in queries[2]


def _merged_sequences(
    graph: fx.Graph, names: Names, compound: Collection[Dim]
) -> list[tuple[fx.Node, int]]:
    """Where dims become a sequence, such as rows and columns of patches: reshapes, and the dims
    that they make of several, which are one of ``compound``."""
    return [
        (node, d)
        for node in graph.nodes
        if node.target in _MERGES and names.mixed(node) == set()
        for d, dim in enumerate(names.of(node))
        if dim in compound and dim not in names.of(node.args[0])
    ]


def _work(graph: fx.Graph, names: Names, seq: Factor) -> int:
    """Multiplications of linears for a token of ``seq``, whatever lengths are traced at."""
    return sum(
        n.args[1].meta["val"].numel()
        for n in graph.nodes
        if n.target == aten.linear.default and any(seq in dim for dim in names.of(n))
    )
