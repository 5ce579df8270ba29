"""Whole numbers that a graph gives, such as a length that the model returns, keeps in an attribute
or carries over a graph break: they are made of the sizes of each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx


class OutputSizes:
    """Of one graph of Dynamo's, whose nodes hold symbolic sizes."""

    def __init__(self, gm: fx.GraphModule):
        *_, output = gm.graph.nodes
        given = enumerate(output.args[0] if output.op == "output" else ())
        values = {at: n.meta.get("example_value") for at, n in given if isinstance(n, fx.Node)}
        self._numbers = {at: n.node.expr for at, n in values.items() if _varies(n)}
        """Place among what the graph gives -> what it is made of."""
        self._sources: dict[Any, tuple[int, int | None]] = {}
        """Symbol -> the placeholder, and its dim, that shows it; None: it is a number itself."""
        if not self._numbers:
            return
        for i, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder"):
            value = node.meta.get("example_value")
            if _varies(value):
                self._sources[value.node.expr] = i, None
            for d, n in enumerate(value.shape if isinstance(value, Tensor) else ()):
                if _varies(n):
                    self._sources.setdefault(n.node.expr, (i, d))

    def of_call(self, args: Sequence[Any], out: Sequence[Any]) -> Sequence[Any]:
        """``out``, which was computed of ``args``, with the numbers of this call."""
        if not self._numbers:
            return out
        known = {s: self._size(args, at) for s, at in self._sources.items()}
        own = {at: _number(expr, known) for at, expr in self._numbers.items()}
        return [own.get(at, x) for at, x in enumerate(out)]

    @staticmethod
    def _size(args: Sequence[Any], at: tuple[int, int | None]) -> int:
        i, d = at
        return int(args[i] if d is None else args[i].shape[d])


def _varies(x: Any) -> bool:
    """Whether ``x`` is a whole number that calls may have other ones of."""
    return isinstance(x, torch.SymInt) and x.node.maybe_as_int() is None


def _number(expr: Any, known: Mapping[Any, int]) -> int:
    return int(expr.xreplace(known))
