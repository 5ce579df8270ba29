"""Plain vmaps: mapped functions that compute element by element, which need no map."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_OPERATORS = {"add", "sub", "mul", "truediv", "div", "neg", "exp", "log", "maximum", "minimum"}
"""Names of operators and methods that compute each element by itself."""


def plain_vmaps(gm: fx.GraphModule) -> set[fx.Node]:
    """The steps of ``torch.func.vmap`` in Dynamo's graph that change nothing: over the first dim of
    values with as many dims, of a function that computes element by element. So are the steps of
    ``associative_scan`` in its generic mode.

    before: y = add_batch_dim(x, 0); z = add_batch_dim(w, 0); r = remove_batch_dim(y * z, 0)
    after:  r = x * w, if these nodes give what they read

    Args:
        gm: of Dynamo.
    """
    found: set[fx.Node] = set()
    inside: list[fx.Node] | None = None
    for node in gm.graph.nodes:
        step = step_of(node)
        if step == "_vmap_increment_nesting":
            inside = []
        if step == "lazy_load_decompositions":
            found.add(node)
        elif inside is not None:
            inside.append(node)
        if step == "_vmap_decrement_nesting" and inside is not None:
            found.update(_steps(inside))
            inside = None
    return found if any(step_of(n) == "_add_batch_dim" for n in found) else set()


def step_of(node: fx.Node) -> str:
    """The name of the function of PyTorch's transforms that ``node`` calls, or ""."""
    module = getattr(node.target, "__module__", None) or ""
    return str(node.target.__name__) if module.startswith("torch._functorch") else ""


def _steps(nodes: list[fx.Node]) -> set[fx.Node]:
    """The steps among ``nodes``, from the begin of a map to its end, if it is a plain one."""
    steps, mapped, ranks = {n for n in nodes if step_of(n)}, set[fx.Node](), set[int]()
    for node in nodes:
        step = step_of(node)
        if step == "_add_batch_dim":
            value = node.args[0].meta.get("example_value")
            if value is None or node.args[1] != 0:
                return set()
            ranks.add(value.ndim)
            mapped.add(node)
        elif step == "_remove_batch_dim":
            if node.args[0] not in mapped or node.args[3] != 0:
                return set()
        elif not step:
            if not _is_elementwise(node) or not mapped.issuperset(node.all_input_nodes):
                return set()
            mapped.add(node)
    return steps if len(ranks) == 1 and step_of(nodes[0]) else set()


def _is_elementwise(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op == "call_method":
        return target in _OPERATORS
    ours = (getattr(m, getattr(target, "__name__", ""), None) for m in (operator, torch))
    known = node.op == "call_function" and any(target is f for f in ours)
    return known and target.__name__ in _OPERATORS and not node.kwargs
