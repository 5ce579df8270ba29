"""Where values of a graph may be infinite, or have no finite gradient.

Of rows that are cut off no gradient comes; where they are read all the same it is 0, and 0 times
infinity is no number.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from paradyse.graph.factors import RULES
from paradyse.graph.rules import elementwise
from paradyse.graph.subgraph import is_tensor
from paradyse.passes.score_terms import number_of

aten = torch.ops.aten

_STEEP = {
    **dict.fromkeys(("log", "log1p", "logit", "sqrt", "rsqrt", "reciprocal", "std"), (0,)),
    **dict.fromkeys(("exp", "exp2", "expm1", "sinh", "cosh"), (0,)),
    **dict.fromkeys(("acos", "asin", "atanh", "pow", "float_power"), (0,)),
    **dict.fromkeys(("div", "divide", "true_divide", "floor_divide"), (1,)),
    **dict.fromkeys(("fmod", "remainder", "xlogy"), (1,)),
    **dict.fromkeys(("atan2", "arctan2", "hypot"), (0, 1)),
    "addcdiv": (2,),
}
"""Operators that have no finite value or gradient at some finite inputs -> those inputs."""

_SAME_ROWS = {
    aten.reshape.default,
    aten.view.default,
    aten.flatten.using_ints,
    aten.unsqueeze.default,
    aten.transpose.int,
    aten.slice.Tensor,
    aten.expand.default,
    aten.log_softmax.int,
    aten.full.default,
    aten.full_like.default,
    aten.new_full.default,
}
"""What holds the infinities of its inputs, or numbers that it is given, beside operators by
elements."""


def steep_inputs(node: fx.Node) -> list[int]:
    """Where among its arguments ``node`` reads what must not be just any number."""
    at = _STEEP.get(getattr(node.target, "overloadpacket", node.target).__name__, ())
    power = node.args[1] if len(node.args) > 1 else 0.0
    if "pow" in str(node.target) and isinstance(power, int | float) and power >= 1:
        return []  # of a number
    return [i for i in at if isinstance(node.args[i], fx.Node)]


def rows_are_finite(node: fx.Node, num_rows: int) -> bool:
    """Whether no infinite number is put in place of elements of some of the ``num_rows`` rows of
    ``node``, along whichever dim: by itself, and by what it is made of element by element.

    Rows that are infinite otherwise, as by a division by zero, are not asked for: without a
    gradient the model as it is written has no number there either.
    """
    seen, left = set[fx.Node](), [node]
    while left:
        made = left.pop()
        if made in seen or made.op != "call_function" or not is_tensor(made):
            continue
        seen.add(made)
        if RULES.get(made.target) is not elementwise and made.target not in _SAME_ROWS:
            continue
        elements = made.meta["val"].numel()
        if elements < num_rows or elements % num_rows:
            continue
        if _gives_infinity(made, num_rows):
            return False
        left += made.all_input_nodes
    return True


def _gives_infinity(node: fx.Node, num_rows: int) -> bool:
    """Whether ``node`` has an infinite number, also as a tensor, for an argument; not if it is to
    stand in the same places of all rows, as where classes are masked that are none."""
    given = (*node.args, *node.kwargs.values())
    numbers = [n for a in given if (n := number_of(a)) is not None]
    if all(map(math.isfinite, numbers)):
        return False
    masks = [a for a in node.all_input_nodes if a.meta["val"].dtype == torch.bool]
    shapes = [a.meta["val"].shape for a in masks]
    return not shapes or any(s[:-1].numel() > 1 or num_rows in s[-1:] for s in shapes)
