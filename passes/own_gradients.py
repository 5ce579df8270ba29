"""Elementwise functions whose gradient is a function of its own, as operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.graph.factors import RULES
from paradyse.graph.rules import elementwise
from paradyse.torch_private import FakeTensorMode, make_fx

aten = torch.ops.aten

_FACTORS = {aten.mul.Tensor, aten.mul.Scalar}
_QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}
_SUMS = {aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.clone.default}


def why_no_slope(fwd: fx.GraphModule, bwd: fx.GraphModule, given: Sequence[Any]) -> str:
    """Why ``apply_with_slope`` cannot stand for a custom autograd function; "" where it can.

    Args:
        fwd: its forward, which gives (outputs, what is saved). With PyTorch up to 2.11 values of
            its inside are outputs too; only the first is read.
        bwd: its backward, of the outputs' gradients and what is saved.
        given: its arguments: a tensor of any sizes, and numbers for sizes.
    """
    tensors = [i for i, x in enumerate(given) if isinstance(x, Tensor)]
    if len(tensors) != 1:
        return "it is not a function of one tensor"
    (at,) = tensors
    if given[at].is_complex():
        return "it is of complex numbers"
    traced = []
    for size in (2, 5):
        with FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.empty([*range(size, size + given[at].ndim)], dtype=given[at].dtype)
            args = [x if i == at else size for i in range(len(given))]
            outputs, saved = fwd(*args)
            if not all(isinstance(y, Tensor) for y in outputs) or outputs[0].shape != x.shape:
                return "it gives a tensor of another shape, or what is none"
            behind = [torch.empty_like(y) for y in outputs]  # which may be saved themselves
            traced.append((make_fx(fwd)(*args).graph, make_fx(bwd)(*behind, *saved).graph))
    if len({_text(graphs) for graphs in traced}) > 1:
        return "it depends on sizes"
    forward, backward = traced[-1]
    for node in (*forward.nodes, *backward.nodes):
        if node.op == "call_function":
            alike = node.meta["val"].shape in (x.shape, ())
            if RULES.get(node.target) is not elementwise or not alike:
                return f"{node.target} is not elementwise"
    grad, results = next(iter(backward.nodes)), backward.output_node().args[0]
    if results[at] is None or results[at].meta["val"].dtype != x.dtype:
        return "it has no gradient, or one of another dtype"
    if not _is_linear(backward, grad, results[at]):
        return "its gradient is not what comes from behind times a slope"
    return ""


def _text(graphs: Iterable[fx.Graph]) -> str:
    """What ``graphs`` compute, with the numbers in it."""
    return str(
        [(n, n.target, n.args, n.kwargs) for g in graphs for n in g.nodes if n.op != "output"]
    )


def _is_linear(graph: fx.Graph, grad: fx.Node, result: fx.Node) -> bool:
    """Whether ``result`` is ``grad`` times what does not depend on it, or a sum of such."""
    linear = {grad}
    for node in graph.nodes:
        of = [
            a for a in (*node.args, *node.kwargs.values()) if isinstance(a, fx.Node) and a in linear
        ]
        if not of or node.op == "output":
            continue
        one, factor = len(of) == 1, node.target in _FACTORS
        numerator = node.target in _QUOTIENTS and node.args[0] in linear
        sums = node.target in _SUMS and len(of) == len(node.args)
        if not (one and (factor or numerator) or sums):
            return False
        linear.add(node)
    return result in linear


def apply_with_slope(fwd: fx.GraphModule, bwd: fx.GraphModule, *given: Any) -> tuple[Tensor, ...]:
    """An elementwise function f with a slope g of its own, as ``f(x) + (x - x') g(x)``, where x'
    and what f and g give are constants to autograd: x - x' is zero, and its gradient is one.

    Where x is infinite x - x' is no number, and stands for 0, of which the gradient is 0; where g
    is no finite number the largest one stands for it, so that the value remains f's.

    Args:
        fwd, bwd, given: of which ``why_no_slope`` says nothing.
    """
    ((at, x),) = ((i, x) for i, x in enumerate(given) if isinstance(x, Tensor))
    constant = x.detach()
    (y, *inside), saved = fwd(*given[:at], constant, *given[at + 1 :])
    slope = bwd(torch.ones_like(y), *map(torch.zeros_like, inside), *saved)[at]
    largest = torch.finfo(slope.dtype).max
    slope = slope.detach().nan_to_num(largest, largest, -largest)
    return (y.detach() + (x - constant).nan_to_num() * slope, *inside)
