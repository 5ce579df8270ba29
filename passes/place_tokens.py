"""Place tokens: which values are split along the sequence, and the loss over split tokens."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from paradyse.distributed.replicas import SUM_OVER_REPLICAS
from paradyse.graph.attention_call import ATTENTION, AttentionCall
from paradyse.graph.factors import Factor, Names, resolve
from paradyse.graph.subgraph import is_tensor, is_weight
from paradyse.strategies.loss import loss_sums
from paradyse.strategies.weight_stream import sum_dtype

aten = torch.ops.aten

MEAN, SUM = 1, 2

UNJOINED = (
    "a mean cross entropy of what is not split along the sequence is averaged over replicas with "
    "equal weights, not by their tokens"
)


def place_tokens(gm: fx.GraphModule, ctx: Any) -> int:
    """Decide for every value whether it is replicated or split along the sequence.

    before: x = embedding(w, ids); ..; loss = cross_entropy_loss(logits, labels)
    after:  ctx.split = {x, ..}; sums = loss_sums(logits, labels); loss = div(sums[0], sums[1])
            where ctx.partial = {sums} is to be summed over ranks; with a data-parallel axis
            sums = sum_over_replicas(sums) before a mean
    Where attention would see replicated tokens (patches of images, features that were put between
    the embeddings), they are split as soon as they have the sequence.
    Refuses to split what mixes tokens without a rule: ctx.gathered lists it, and it runs on
            gathered tensors.
    """
    ctx.split, ctx.partial, ctx.gathered = set(), set(), []
    if ctx.seq is None:
        return 0
    _read_tables_by_position(gm, ctx)
    _place_all(gm, ctx, frozenset())
    late = _before_replicated_attention(gm, ctx)
    if late:
        ctx.split, ctx.partial, ctx.gathered = set(), set(), []
        _place_all(gm, ctx, late)
    return len(ctx.split)


def _place_all(gm: fx.GraphModule, ctx: Any, starts: Collection[fx.Node]) -> None:
    """Place every value; of ``starts`` also those of which no input is split."""
    for node in list(gm.graph.nodes):
        if node.op == "placeholder":
            if _is_token_input(node, ctx):
                ctx.split.add(node)
        elif node.op == "call_function":
            if node.target == aten.cross_entropy_loss.default:
                node = _rewrite_loss(gm, node, ctx)
            if node in starts and _may_start(node, ctx):
                ctx.split.add(node)
            else:
                _place(node, ctx)


def _read_tables_by_position(gm: fx.GraphModule, ctx: Any) -> None:
    """Have weights with a row for each token, such as position embeddings, read by an operator of
    their own: what it gives is a value like others, which can be split."""
    first = next(n for n in gm.graph.nodes if n.op != "placeholder")
    for node in list(gm.graph.nodes):
        if not is_weight(node) or not is_tensor(node) or _times(ctx.names.of(node), ctx.seq) != 1:
            continue
        if all(u.target is aten.alias.default for u in node.users):
            continue
        with gm.graph.inserting_before(first if node.op == "placeholder" else node.next):
            table = gm.graph.call_function(aten.alias.default, (node,))
        node.replace_all_uses_with(table, delete_user_cb=lambda user, t=table: user is not t)
        table.meta = {k: v for k, v in node.meta.items() if k != "weight"}
        ctx.names.dims[table] = ctx.names.dims[node]


def _before_replicated_attention(gm: fx.GraphModule, ctx: Any) -> set[fx.Node]:
    """What the queries, keys and values are computed from of attention over the sequence that
    sees replicated tokens."""
    found: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        if node.target is ATTENTION and node not in ctx.split | ctx.whole_attention:
            call = AttentionCall.of(node)
            if _times(ctx.names.of(call.q), ctx.seq) == 1:
                found.update(call.qkv)
        if node in found:
            found.update(node.all_input_nodes)
    return found


def _may_start(node: fx.Node, ctx: Any) -> bool:
    """Whether each rank can compute its rows of ``node`` from rows of replicated values."""
    if not is_tensor(node) or not node.meta["val"].is_floating_point():
        return False
    inputs = [a for a in node.all_input_nodes if is_tensor(a) and not is_weight(a)]
    sliced = any(_times(ctx.names.of(a), ctx.seq) == 1 for a in inputs)
    return sliced and can_split(ctx.names, node, ctx.seq, ctx.split)


def _place(node: fx.Node, ctx: Any) -> None:
    if node.target is loss_sums:
        if node.args[0] in ctx.split:
            ctx.split.add(node)
            ctx.partial.add(node)
    elif node.target is operator.getitem:
        if node.args[0] in ctx.split:
            ctx.split.add(node)
    elif node.target == aten.embedding.default or any(a in ctx.split for a in node.all_input_nodes):
        if any(a in ctx.partial for a in node.all_input_nodes):
            return
        if node not in ctx.whole_attention and can_split(ctx.names, node, ctx.seq, ctx.split):
            ctx.split.add(node)
        elif node.target != aten.embedding.default:
            ctx.gathered.append((node, ctx.names.unnamed.get(node, f"{node.target} mixes tokens")))


def _is_token_input(node: fx.Node, ctx: Any) -> bool:
    """A floating-point input [B, S, ..], such as inputs_embeds."""
    if not is_tensor(node) or is_weight(node) or not node.meta["val"].is_floating_point():
        return False
    return node.meta["val"].ndim >= 3 and _times(ctx.names.of(node), ctx.seq) == 1


def _times(dims: list[Any], factor: Factor) -> int:
    return sum(f is factor for d in dims for f in d)


def can_split(names: Names, node: fx.Node, seq: Factor, split: set[fx.Node]) -> bool:
    """Whether each rank can compute its rows of ``node``, along ``seq``, from its rows of the
    inputs; of attention, whether all its inputs are ``split``.
    """
    if node.target is ATTENTION:
        return all(x in split for x in AttentionCall.of(node).qkv)
    if seq in names.mixed(node):
        return False
    val = node.meta["val"]
    outputs = names.dims[node] if isinstance(val, tuple | list) else [names.dims[node]]
    if any(_times([resolve(d) for d in dims], seq) != 1 for dims in outputs):
        return False
    return all(_times(names.of(a), seq) <= 1 for a in filter(is_tensor, node.all_input_nodes))


def _rewrite_loss(gm: fx.GraphModule, node: fx.Node, ctx: Any) -> fx.Node:
    """The first node of the loss as sums and counts; ``node`` itself where its rows are not summed
    or do not lie split along the sequence.
    """
    args = [*node.args, *(None, MEAN, -100, 0.0)[len(node.args) - 2 :]]
    logits, labels, weight, reduction, ignore_index, smoothing = args
    if reduction not in (MEAN, SUM):
        return node
    dense = labels.meta["val"].is_floating_point()
    dims = ctx.names.of(logits)
    split = logits in ctx.split and len(dims) == 2 and ctx.seq in dims[0]
    if not split or (labels in ctx.split and not dense):
        if reduction == MEAN and ctx.replicas.size > 1:
            ctx.note(UNJOINED)
        return node
    names, val = ctx.names, node.meta["val"]
    with gm.graph.inserting_before(node):
        rows = _ones(gm, logits, ctx) if dense else None
        given = logits, labels, ignore_index, smoothing, weight, rows
        sums = gm.graph.call_function(loss_sums, given)
        new = [sums]
        if reduction == MEAN and ctx.replicas.size > 1:
            name = ctx.replicas.name
            new.append(gm.graph.call_function(SUM_OVER_REPLICAS, (sums, name)))
        pair = new[-1]
        loss = total = gm.graph.call_function(aten.select.int, (pair, 0, 0))
        new.append(total)
        if reduction == MEAN:
            count = gm.graph.call_function(aten.select.int, (pair, 0, 1))
            loss = gm.graph.call_function(aten.div.Tensor, (total, count))
            new += [count, loss]
        wide = val.new_empty([], dtype=sum_dtype(logits.meta["val"]))
        if val.dtype != wide.dtype:
            loss = gm.graph.call_function(aten.to.dtype, (loss, val.dtype))
            new.append(loss)
    for n in new:
        one = wide if n is not loss else val
        n.meta = {**node.meta, "val": wide.new_empty(2) if n in (sums, pair) else one}
        names.dims[n] = names.fresh(n.meta["val"].shape)
    node.replace_all_uses_with(loss)
    gm.graph.erase_node(node)
    if not dense:
        ctx.fills[labels] = ignore_index
    for n in new[1:]:
        _place(n, ctx)
    return sums


def _ones(gm: fx.GraphModule, logits: fx.Node, ctx: Any) -> fx.Node:
    """[rows] ones, whole, of which those past the end are 0 where they are split."""
    like = logits.meta["val"]
    how = {"dtype": sum_dtype(like), "device": like.device}
    node = gm.graph.call_function(aten.ones.default, ([like.shape[0]],), how)
    node.meta["val"] = like.new_ones(like.shape[:1], dtype=how["dtype"])
    ctx.names.dims[node] = ctx.names.of(logits)[:1]
    ctx.fills[node] = 0
    return node
