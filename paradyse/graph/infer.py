"""Names every dim of every value of a graph, operator by operator."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import Any

import torch
from torch import fx

import paradyse.graph.expert_rules
import paradyse.graph.layer_rules
import paradyse.graph.rules
import paradyse.graph.vector_rules  # noqa: F401  registers the rules
from paradyse.graph.factors import RULES, Names
from paradyse.graph.subgraph import is_tensor, is_weight


def _new_dims(names: Names, val: Any) -> Any:
    """Dims that nothing else has, for a tensor or several; none for other values."""
    if isinstance(val, torch.Tensor):
        return names.fresh(val.shape)
    return [_new_dims(names, v) for v in val] if isinstance(val, tuple | list) else []


def infer_names(
    graph: fx.Graph,
    merged: Collection[tuple[fx.Node, int]] = (),
    whole: Collection[tuple[fx.Node, int]] = (),
) -> Names:
    """Name every dim of every value of ``graph`` (nodes carry fake values in ``meta['val']``).

    An operator of which nothing is known mixes all its inputs.

    Args:
        merged: (reshape, dim of its result) that gets a name of its own, not those of the dims that
            it is made of.
        whole: (input, dim of it) that stays one factor where views split it.
    """
    names = Names()
    for node in graph.nodes:
        if node.op == "output":
            continue
        rule = RULES.get(node.target)
        dims = rule(names, node) if rule else None
        if dims is None and node.op == "call_function":
            names.unnamed[node] = f"no rule for {node.target}"
            for a in filter(is_tensor, node.all_input_nodes):
                names.mix(node, *names.dims[a])
        names.dims[node] = _new_dims(names, node.meta.get("val")) if dims is None else dims
        if node.op == "placeholder" and not is_weight(node):
            for factor in chain(*names.dims[node]):
                factor.given = True
        for d in (d for at, d in whole if at is node):
            for factor in names.dims[node][d]:
                factor.whole = True
        for d in (d for at, d in merged if at is node):
            names.mix(node, names.dims[node][d])
            names.dims[node][d] = names.fresh([node.meta["val"].shape[d]])[0]
    return names
