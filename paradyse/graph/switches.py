"""Which dim of a block's tokens its split may be switched to: one that nothing inside mixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from paradyse.graph.attention_call import ATTENTION, AttentionCall
from paradyse.graph.factors import Factor, Names, times
from paradyse.graph.subgraph import is_tensor, is_weight

aten = torch.ops.aten

_REPEATS = {aten.expand.default, aten.broadcast_to.default}
"""Operators that may give a dim to what has none: its elements are alike."""


NO_DIM = "its tokens have no dim besides the one that is split: give a batch of more than one"
"""Why there is none: a dim of one element has no name."""


def find_switch(names: Names, block: Any, first: Sequence[Factor]) -> tuple[Factor | None, str]:
    """The dim of attention's batch that ``block`` can be computed split along, or None and why
    there is none.

    Args:
        names: of the dims of the graph's values.
        block: with an attention, over the dim ``block.seq``.
        first: dims to prefer; the outermost one, which is the batch as a rule, comes last.
    """
    call = AttentionCall.of(block.attention)
    if block.keys is not None:
        return None, "its keys are of another sequence than its queries"
    batch = names.of(call.q)[0]
    if not batch:
        return None, NO_DIM
    order = sorted((*batch[1:], batch[0]), key=lambda f: f not in first)
    reasons = []
    for factor in order:
        if not (why := _mixes(names, block, factor)):
            return factor, ""
        reasons.append(why)
    return None, reasons[0]


_FILLED = {
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
"""Operators that make a value whose elements are alike, of any size."""


def mixes(names: Names, node: fx.Node, factor: Factor) -> bool:
    """Whether ``node`` cannot be computed for a part of ``factor`` as if there was no other.

    Args:
        names: of the dims of the graph's values.
        node: an operator.
        factor: a dim of other tokens or no tokens, such as heads.
    """
    outputs = names.of_each(node)
    read = [dims for a in node.all_input_nodes for dims in names.of_each(a)]
    found, reads = [times(d, factor) for d in outputs], [times(d, factor) for d in read]
    if factor in names.mixed(node) or max((*found, *reads), default=0) > 1:
        return True
    if any(is_shifted(f, factor) for dims in outputs for d in dims for f in d):
        return True
    if any(reads):
        fixed = node.kwargs.get("output_size") is not None  # of ``repeat_interleave``
        return 0 in found or fixed
    return any(found) and node.target not in _REPEATS | _FILLED


def _mixes(names: Names, block: Any, factor: Factor) -> str:
    """Why ``block`` cannot be computed split along ``factor``; "" where it can."""
    inside = set(block.nodes)
    for node in block.nodes:
        if factor in names.mixed(node):
            return f"{node} mixes the other dim of its tokens"
        outputs = names.of_each(node)
        if any(is_shifted(f, factor) for dims in outputs for d in dims for f in d):
            return f"{node} cuts the other dim of its tokens, or adds to it"
        read = [dims for a in node.all_input_nodes for dims in names.of_each(a)]
        reads = any(times(dims, factor) for dims in read)
        counts = [times(dims, factor) for dims in outputs]
        if any(n > 1 for n in counts) or (reads and 0 in counts):
            return f"{node} does not keep the other dim of its tokens"
        if not reads and any(counts) and node.target not in _REPEATS:
            return f"{node} makes the other dim of its tokens"
        if node.target is ATTENTION:
            call = AttentionCall.of(node)
            if any(factor not in names.of(x)[0] for x in call.qkv):
                return f"{node} has no such dim in the batch of its keys"
    for node in dict.fromkeys(a for n in block.nodes for a in n.all_input_nodes):
        if node in inside or not is_tensor(node):
            continue
        found = [f for d in names.of(node) for f in d]
        if any(is_shifted(f, g) for f in found for g in (factor, block.seq)):
            return f"{node} has some tokens more or less"
        if not is_weight(node) and found.count(block.seq) > 1:
            return f"{node} has the dim that is split twice"
    dims = names.of(block.output)
    if times(dims, factor) != 1 or times(dims, block.seq) != 1:
        return f"{block.output} does not have both dims of its tokens"
    return ""


def is_shifted(f: Factor, factor: Factor) -> bool:
    """Whether ``f`` is ``factor`` and some more, or less."""
    return f is not factor and f.origin()[0] is factor
