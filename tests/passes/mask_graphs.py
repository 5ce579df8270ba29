"""What tests of mask recovery ask of a graph."""

from __future__ import annotations

from typing import Any

import torch
from pass_graphs import trace
from torch import Tensor, fx

import paradyse.kernels.attention_op  # noqa: F401  (registers the operator)
from paradyse.passes import mask_domain as d
from paradyse.passes.mask_values import MaskValues

ATTENTION = torch.ops.paradyse.attention.default
TOLERANCE = 1e-5
"""Float32, two orders of summation, values near 1."""


class Notes:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def calls(gm: fx.GraphModule, target: Any = ATTENTION) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.target is target]


def spec(node: fx.Node) -> dict[str, Any]:
    """What the attention node is told of its mask, without what is unset."""
    names = [a.name for a in ATTENTION._schema.arguments]
    found = dict(zip(names, node.args, strict=False))
    out = {n: found[n] for n in ("left", "right", "chunk") if found.get(n, -1) != -1}
    given = ("key_padding", "document_ids", "bias")
    return out | {n: True for n in given if found.get(n) is not None}


def dense_values(gm: fx.GraphModule, length: int) -> list[str]:
    """Nodes with two dims of the sequence."""
    found = []
    for n in gm.graph.nodes:
        values = n.meta.get("val")
        for v in values if isinstance(values, list | tuple) else [values]:
            if isinstance(v, Tensor) and list(v.shape).count(length) > 1:
                found.append(n.name)
    return found


def evaluate(value: Any, at: dict[int, int], known: dict[str, Tensor] | None = None) -> Any:
    """What a formula says at an index, with the tensors of ``known`` (by name) in its lookups."""

    def of(x: Any) -> Any:
        return evaluate(x, at, known)

    match value:
        case d.Lin(const, terms):
            return const + sum(c * of(t) for t, c in terms)
        case d.Var(dim):
            return at[dim]
        case d.Load(node, index):
            assert known is not None
            return known[node.name][tuple(map(of, index))].item()
        case d.FloorDiv(x, divisor):
            return of(x) // divisor
        case d.Abs(x):
            return abs(of(x))
        case d.Where(condition, then, other):
            return of(then) if of(condition) else of(other)
        case d.Le0(x):
            return of(x) <= 0
        case d.Eq0(x):
            return of(x) == 0
        case d.Not(x):
            return not of(x)
        case d.And(parts):
            return all(map(of, parts))
        case d.Or(parts):
            return any(map(of, parts))
    raise AssertionError(value)


def formula_of(fn: Any, *inputs: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """The formula of what ``fn`` gives, and the values of its inputs, by the names of nodes."""
    gm = trace(fn, *inputs)
    given = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    last = gm.graph.output_node().args[0]
    values = dict(zip(given, inputs, strict=True))
    return MaskValues().value(last), values | {last.name: torch.empty(0)}
