"""Place tokens: which values are split along the sequence, and the loss over split tokens."""

from __future__ import annotations

import operator
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
    Refuses to split what mixes tokens without a rule: ctx.gathered lists it, and it runs on
            gathered tensors.
    """
    ctx.split, ctx.partial, ctx.gathered = set(), set(), []
    if ctx.seq is None:
        return 0
    for node in list(gm.graph.nodes):
        if node.op == "placeholder":
            if _is_token_input(node, ctx):
                ctx.split.add(node)
        elif node.op == "call_function":
            if node.target == aten.cross_entropy_loss.default:
                node = _rewrite_loss(gm, node, ctx)
            _place(node, ctx)
    return len(ctx.split)


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
