"""What a model writes into its weights before it reads them, such as a clamp: done ahead of each
call, on the weights as they lie, shards included."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.torch_private import data_of

_NUMBERS = (int, float, bool, type(None))


@dataclass(frozen=True)
class WeightWrite:
    """``method`` of the argument ``index`` of a graph, an elementwise operator in place."""

    index: int
    by_data: bool
    """Of ``weight.data``, so that autograd knows nothing of it: backward of an earlier call that
    saved the weight does not complain."""
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def apply_writes(writes: Sequence[WeightWrite], args: Sequence[Any]) -> None:
    """Write into weights.

    Args:
        writes: of a graph, in their order.
        args: of a call of it.
    """
    for write in writes:
        weight = args[write.index]
        with torch.no_grad():
            written = weight.data if write.by_data else weight
            getattr(written, write.method)(*write.args, **write.kwargs)


ELEMENTWISE = {"clamp_", "clamp_min_", "clamp_max_", "clip_", "mul_", "div_", "add_", "sub_"}
"""Methods that write each element by itself, where their arguments are numbers."""


def take_writes(gm: fx.GraphModule, is_weight: Sequence[bool]) -> list[WeightWrite]:
    """Take out of Dynamo's graph ``gm`` the writes into weights that nothing has read before.

    before: d = data_of(w); c = d.clamp_(-1, 1); y = linear(x, w)
    after:  y = linear(x, w)
    Leaves what is written of other values, or read before it is written: such a graph cannot be
    traced.

    Args:
        gm: changed in place.
        is_weight: per placeholder whether it is a parameter or a buffer.
    """
    found = []
    for index, weight in enumerate(gm.graph.find_nodes(op="placeholder")):
        if not is_weight[index] or not isinstance(weight.meta.get("example_value"), Tensor):
            continue
        of_data = {weight: False}  # what shows its memory, and whether by its ``data``
        writes, readers = list[fx.Node](), list[fx.Node]()
        for node in gm.graph.nodes:
            if node.target is data_of and node.args[0] in of_data:
                of_data[node] = True
            elif node.op == "call_method" and _is_write(node) and node.args[0] in of_data:
                of_data[node] = of_data[node.args[0]]
                writes.append(node)
            elif not of_data.keys().isdisjoint(node.all_input_nodes):
                if not writes:
                    break  # read as it was before
                readers.append(node)
                if not {*node.all_input_nodes} & of_data.keys() <= {weight}:
                    break  # read without its gradient
            if readers and node in writes:
                break
        else:
            for node in writes:
                how = of_data[node], str(node.target), node.args[1:], dict(node.kwargs)
                found.append(WeightWrite(index, *how))
            for node in reversed(of_data if writes else ()):
                if node is not weight:
                    gm.graph.erase_node(node)
    if found:
        gm.recompile()
    return found


def may_write(gm: fx.GraphModule) -> bool:
    """Whether an operator of Dynamo's graph ``gm`` writes in place, be it to a weight or not."""
    graphs = (m.graph for m in gm.modules() if isinstance(m, fx.GraphModule))
    return any(_may_write(node) for graph in graphs for node in graph.nodes)


def _may_write(node: fx.Node) -> bool:
    if node.op not in ("call_method", "call_function"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or node.target in _OPERATORS_IN_PLACE or "out" in node.kwargs


_NAMES = "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"
_OPERATORS_IN_PLACE = {operator.setitem, *(getattr(operator, name) for name in _NAMES)}


def _is_write(node: fx.Node) -> bool:
    numbers = all(isinstance(a, _NUMBERS) for a in (*node.args[1:], *node.kwargs.values()))
    return node.target in ELEMENTWISE and numbers
