"""Names every dim of every value of a graph, operator by operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import paradyse.graph.rules  # noqa: F401  registers the rules
from paradyse.graph.factors import RULES, Names


def opaque(names: Names, node: fx.Node, reason: str) -> Any:
    """Dims of an operator of which, for a ``reason``, nothing is known: it mixes all inputs."""
    names.unnamed[node] = reason
    for arg in node.all_input_nodes:
        if arg in names.dims and isinstance(arg.meta.get("val"), torch.Tensor):
            names.mix(node, *names.dims[arg])
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return names.fresh(val.shape)
    if isinstance(val, tuple | list):
        return [names.fresh(v.shape) if isinstance(v, torch.Tensor) else [] for v in val]
    return []


def infer_names(graph: fx.Graph) -> Names:
    """Name every dim of every value of ``graph`` (nodes carry fake values in ``meta['val']``)."""
    names = Names()
    for node in graph.nodes:
        val = node.meta.get("val")
        if node.op in ("placeholder", "get_attr"):
            names.dims[node] = names.fresh(val.shape) if isinstance(val, torch.Tensor) else []
        elif node.op == "call_function":
            fn = RULES.get(node.target)
            dims = fn(names, node) if fn else None
            names.dims[node] = (
                opaque(names, node, f"no rule for {node.target}") if dims is None else dims
            )
    return names
