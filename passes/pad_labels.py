"""Pad labels: a loss of all tokens but the last ones as one of all tokens, some without a label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from paradyse.graph.factors import RULES
from paradyse.graph.rules import argument, elementwise
from paradyse.passes.finite import rows_are_finite, steep_inputs

aten = torch.ops.aten

_FLATTENS = {aten.reshape.default, aten.flatten.using_ints}


def pad_labels(gm: fx.GraphModule, ctx: Any) -> int:
    """Have cross entropies read logits of all tokens, as models cut off the last one's.

    before: y = flatten(slice(x, 1, 0, -1), 0, 1); t = flatten(slice(labels, 1, 1), 0, 1)
            loss = cross_entropy_loss(y, t)
    after:  y = flatten(x, 0, 1); t = flatten(pad(slice(labels, 1, 1), [0, 1], -100), 0, 1)
            loss = cross_entropy_loss(y, t)
    Refuses losses of single tokens or of every second, labels that are probabilities or were not
            cut from as many tokens, logits that are more than scaled and flattened in between,
            and those that may be infinite where they were cut off.
    """
    count = 0
    for node in gm.graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default):
        reduces = node.meta["val"].ndim == 0
        logits, labels = (way_to_cut(a) for a in node.args[:2])
        if not reduces or logits is None or labels is None:
            continue
        cut, whole = logits[0], logits[0].args[0].meta["val"].shape
        dim, length = argument(cut, "dim") % len(whole), cut.meta["val"].shape[1]
        from_start = not argument(cut, "start") and (argument(cut, "end") or 0) < 0
        from_start &= argument(cut, "step") == 1
        alike = labels[0].args[0].meta["val"].shape == whole[:2]
        if dim != 1 or not from_start or not alike or labels[0].meta["val"].shape[1] != length:
            continue
        if any(map(steep_inputs, logits)) or not rows_are_finite(cut.args[0], whole[1]):
            continue
        with gm.graph.inserting_before(node):
            # What is computed of labels is computed first, as it would be of the padding too.
            made = _replay(gm, [n for n in labels if n.target not in _FLATTENS], labels[0])
            pad = [0, whole[1] - length], argument(node, "ignore_index")
            padded = gm.graph.call_function(aten.constant_pad_nd.default, (made, *pad))
            padded.meta = {**made.meta, "val": made.meta["val"].new_empty(whole[:2])}
            flat = gm.graph.call_function(aten.flatten.using_ints, (padded, 0, 1))
            flat.meta = {**made.meta, "val": made.meta["val"].new_empty(whole[0] * whole[1])}
            ways = _replay(gm, logits, cut.args[0]), flat
        node.args = (*ways, *node.args[2:])
        count += 1
    if count:
        gm.graph.eliminate_dead_code()
    return count


def way_to_cut(node: Any) -> list[fx.Node] | None:
    """A slice of [B, S, ..], and by what ``node`` is made of it: elementwise, then flattened to
    [B S, ..]; None for another node."""
    way = [node]
    while way[0].target != aten.slice.Tensor:
        inputs = way[0].all_input_nodes
        simple = way[0].target in _FLATTENS or RULES.get(way[0].target) is elementwise
        if not simple or len(inputs) != 1:
            return None
        way.insert(0, inputs[0])
    shape = way[0].meta["val"].shape
    if len(shape) < 2:
        return None
    flat = (shape[0] * shape[1], *shape[2:])
    kinds = [
        n.meta["val"].shape == (flat if n.target in _FLATTENS else p.meta["val"].shape)
        for p, n in zip(way, way[1:])
    ]
    return way if all(kinds) and node.meta["val"].shape == flat else None


def _replay(gm: fx.GraphModule, way: Sequence[fx.Node], source: fx.Node) -> fx.Node:
    """``source``, of any number of tokens, made into what ``way`` makes of a slice."""
    made, (batch, tokens, *rest) = source, source.meta["val"].shape
    shape = (batch, tokens, *rest)
    for node in way[1:]:
        args = fx.map_arg(node.args, lambda a, made=made: made)  # each has one input
        if node.target in _FLATTENS:
            shape = (batch * tokens, *rest)
        if node.target == aten.reshape.default:
            args = (args[0], list(shape))
        made = gm.graph.call_function(node.target, args, dict(node.kwargs))
        made.meta = {**node.meta, "val": node.meta["val"].new_empty(shape)}
    return made
