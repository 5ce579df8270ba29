"""What tests of mask recovery ask of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

import paradyse.kernels.attention_op  # noqa: F401  (registers the operator)

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
