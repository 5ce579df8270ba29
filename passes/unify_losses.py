"""Unify losses: one spelling of each, by rows and by elements, that ranks can compute in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from paradyse.graph.edit import call_like, value_of
from paradyse.graph.rules import BY_ELEMENT, argument
from paradyse.passes.pad_labels import way_to_cut
from paradyse.passes.place_tokens import UNJOINED
from paradyse.strategies.loss import MEAN, NONE, SUM
from paradyse.torch_private import schema_of

aten = torch.ops.aten

_CROSS_ENTROPY = aten.cross_entropy_loss.default
_PICK_ROWS = {aten.reshape.default, aten.flatten.using_ints, aten.slice.Tensor}
_SUMS = {MEAN: aten.mean.default, SUM: aten.sum.default}


def unify_losses(gm: fx.GraphModule, ctx: Any) -> int:
    """Spell losses so that what is computed of each token stands apart from the sum over tokens.

    before: a = nll_loss_nd(log_softmax(y, 1), t); b = kl_div(x, z, None, SUM)
            c = cross_entropy_loss(transpose(y, 1, 2), t)    y[B, S, C], t[B, S]
    after:  a = cross_entropy_loss(y, t); b = sum(kl_div(x, z, None, NONE))
            c = cross_entropy_loss(reshape(y, [B S, C]), reshape(t, [B S]))
    Probabilities in place of labels are apart where the logits of some tokens were cut off: no
            label says there that it does not count.
    Refuses nll_loss_nd of what is no log_softmax over the classes, and losses of one sample.
    """
    count = 0
    for node in list(gm.graph.nodes):
        if node.target == aten.nll_loss_nd.default:
            count += _from_likelihoods(gm, node)
        elif node.target in BY_ELEMENT and argument(node, "reduction") != NONE:
            _sum_apart(gm, node)
            count += 1
    for node in gm.graph.find_nodes(op="call_function", target=_CROSS_ENTROPY):
        count += _to_rows(gm, node)
    for node in gm.graph.find_nodes(op="call_function", target=_CROSS_ENTROPY):
        dense = node.args[1].meta["val"].is_floating_point()
        reduction = argument(node, "reduction")
        if dense and reduction != NONE and way_to_cut(node.args[0]):
            if reduction == MEAN and ctx.replicas.size > 1:
                ctx.note(UNJOINED)
            _sum_apart(gm, node)
            count += 1
    if count:
        gm.graph.eliminate_dead_code()
    return count


def _from_likelihoods(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Make ``node``, a loss of log likelihoods, a cross entropy of the logits."""
    way: list[fx.Node] = []
    source = node.args[0]
    rows = source.meta["val"].ndim == 2
    while rows and source.target in _PICK_ROWS and _keeps_classes(source):
        way.insert(0, source)
        source = source.args[0]
    ndim = source.meta["val"].ndim
    classes = ndim - 1 if way else min(1, ndim - 1)
    if source.target != aten.log_softmax.int or source.args[1] % ndim != classes:
        return False
    x, dtype = source.args[0], source.meta["val"].dtype
    options = [argument(node, name) for name in ("weight", "reduction", "ignore_index")]
    with gm.graph.inserting_before(node):
        if x.meta["val"].dtype != dtype:
            x = call_like(source, aten.to.dtype, (x, dtype))
        for step in way:
            x = call_like(step, step.target, (x, *step.args[1:]))
        loss = call_like(node, _CROSS_ENTROPY, (x, node.args[1], *options))
    node.replace_all_uses_with(loss)
    gm.graph.erase_node(node)
    return True


def _keeps_classes(node: fx.Node) -> bool:
    """Whether ``node`` gives rows [.., C] that it reads, in the same order."""
    before, after = node.args[0].meta["val"].shape, node.meta["val"].shape
    return len(before) > 1 and len(after) > 1 and before[-1] == after[-1]


def _sum_apart(gm: fx.GraphModule, node: fx.Node) -> None:
    """Have ``node`` give its losses one by one, and an operator behind it their mean or sum."""
    reduce = _SUMS[argument(node, "reduction")]
    names = [arg.name for arg in schema_of(node.target).arguments]
    at, kwargs = names.index("reduction"), dict(node.kwargs)
    before = [*node.args, *(argument(node, name) for name in names[len(node.args) : at])]
    node.args = (*before[:at], NONE, *before[at + 1 :])
    node.kwargs = {name: x for name, x in kwargs.items() if name not in names[: at + 1]}
    total = node.meta
    node.meta = {**total, "val": value_of(node)}
    with gm.graph.inserting_after(node):
        summed = gm.graph.call_function(reduce, (node,))
    summed.meta = total
    node.replace_all_uses_with(summed, delete_user_cb=lambda user: user is not summed)


def _to_rows(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Have ``node``, a cross entropy of logits [N, C, d, ..], read them as rows [N d .., C]."""
    logits, labels = node.args[:2]
    shape = logits.meta["val"].shape
    if len(shape) < 3:
        return False
    dense = labels.meta["val"].is_floating_point()
    rows, classes = shape.numel() // shape[1], shape[1]
    with gm.graph.inserting_before(node):
        y = _flat(_classes_last(logits), (rows, classes))
        t = _flat(_classes_last(labels) if dense else labels, (rows, classes)[: 1 + dense])
        reduction = argument(node, "reduction")
        if reduction == NONE:
            flat = call_like(node, _CROSS_ENTROPY, (y, t, *node.args[2:]), dict(node.kwargs))
            loss = call_like(node, aten.reshape.default, (flat, list(node.meta["val"].shape)))
    if reduction == NONE:
        node.replace_all_uses_with(loss)
        gm.graph.erase_node(node)
    else:
        node.args = (y, t, *node.args[2:])
    return True


def _classes_last(x: fx.Node) -> fx.Node:
    """``x`` [N, C, d, ..] as [N, d, .., C]: what it was transposed from, where it was."""
    ndim = x.meta["val"].ndim
    order = [0, *range(2, ndim), 1]
    if x.target == aten.transpose.int:
        swapped = list(range(ndim))
        a, b = (d % ndim for d in x.args[1:3])
        swapped[a], swapped[b] = b, a
    else:
        swapped = [d % ndim for d in x.args[1]] if x.target == aten.permute.default else []
    if swapped and [swapped[d] for d in order] == list(range(ndim)):
        return x.args[0]
    return call_like(x, aten.permute.default, (x, order))


def _flat(x: fx.Node, shape: Sequence[int]) -> fx.Node:
    return call_like(x, aten.reshape.default, (x, list(shape)))
