"""Number inputs: Python numbers that a call is given, and that only scale tensors, are inputs.

A loss's coefficient or a count of tokens changes from step to step. As a constant of the graph each
value would need a program of its own; as a tensor of one number it is an input like any other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

_SCALE: Mapping[Any, Callable[[Any, Any], Any]] = {
    **{op: op for op in (operator.add, operator.sub, operator.mul, operator.truediv)},
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    torch.add: operator.add,
    torch.sub: operator.sub,
    torch.mul: operator.mul,
    torch.div: operator.truediv,
    torch.true_divide: operator.truediv,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
}
"""Functions and methods of Dynamo's graphs -> what they compute of a tensor and a number."""

_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)

_SAME = (torch.sym_float, operator.pos)
"""Functions of a number that leave it as it is."""

Numbers = dict[fx.Node, type]
"""Node of Dynamo's graph that is a number -> ``int`` or ``float``."""


def numbers_made_of(placeholder: fx.Node, kind: type) -> Numbers | None:
    """The numbers that are made of ``placeholder``, itself among them; None where one is used for
    more than to scale tensors, as a size or in a choice.

    Args:
        placeholder: a number, or a tensor of one that is read by ``item()``.
        kind: what it is.
    """
    found: Numbers = {placeholder: kind}
    ahead = [placeholder]
    while ahead:
        node = ahead.pop()
        for user in node.users:
            if user in found:
                continue
            if user.op == "call_method" and user.target == "item" or user.target in _SAME:
                found[user] = float if user.target is torch.sym_float else kind
            elif user.target not in _SCALE or len(user.args) != 2 or user.kwargs:
                return None
            elif isinstance(user.meta.get("example_value"), Tensor):
                continue
            else:
                made = user.meta.get("example_value")
                found[user] = int if isinstance(made, int | torch.SymInt) else float
            ahead.append(user)
    return found


def scale(node: fx.Node, args: tuple[Any, ...], numbers: Mapping[fx.Node, type]) -> Any:
    """The value of ``node``, which is one of ``numbers`` or a tensor that one scales.

    Args:
        node: of Dynamo's graph.
        args: values of its arguments; a number is a float64 tensor of one element.
        numbers: those of the graph.
    """
    if node.target in _SAME or node.op == "call_method" and node.target == "item":
        return args[0]
    compute = _SCALE[node.target]
    if node in numbers:
        return compute(*args)
    in_place = node.target in _IN_PLACE and node.args[0] not in numbers
    pair = list(zip(node.args, args, strict=True))
    (x,) = (value for arg, value in pair if arg not in numbers)
    ((at, number),) = ((arg, value) for arg, value in pair if arg in numbers)
    assert isinstance(at, fx.Node)
    if compute is operator.truediv and node.args[0] is at:  # what Tensor.__rtruediv__ computes
        x, compute = x.reciprocal(), operator.mul
        pair = [(None, x), (at, number)]
    if x.dtype.itemsize < 4 and x.is_floating_point() and not x.ndim:
        # as where one is a Python number: it is not rounded to so few bits, what comes of it is
        pair = [(arg, value.to(torch.float32)) for arg, value in pair]
        made = compute(*(value for _, value in pair)).to(x.dtype)
        return x.copy_(made) if in_place else made
    if not (x.is_floating_point() and x.ndim):  # beside more elements one counts as a number
        whole = numbers[at] is int and compute is not operator.truediv
        number = number.to(_dtype_beside(x.dtype, whole))
    if in_place:
        compute = node.target  # what else reads the tensor sees what is written
    return compute(*(number if arg in numbers else value for arg, value in pair))


def _dtype_beside(dtype: torch.dtype, whole: bool) -> torch.dtype:
    """What PyTorch takes a Python number for beside a tensor of ``dtype``; of two tensors of one
    element each the larger dtype would win."""
    if dtype.is_floating_point or dtype.is_complex:
        return dtype
    if not whole:
        return torch.get_default_dtype()
    return torch.int64 if dtype == torch.bool else dtype
