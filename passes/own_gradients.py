"""Elementwise functions whose gradient is a function of its own, as operators."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from paradyse.graph.factors import RULES
from paradyse.graph.rules import elementwise
from paradyse.torch_private import FakeTensorMode, make_fx

aten = torch.ops.aten

_FACTORS = {aten.mul.Tensor, aten.mul.Scalar}
_QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}
_SUMS = {aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.clone.default}


def why_no_slope(fwd: fx.GraphModule, bwd: fx.GraphModule, like: Tensor) -> str:
    """Why ``apply_with_slope`` cannot stand for a custom autograd function; "" where it can.

    Args:
        fwd: its forward, which gives (outputs, what is saved).
        bwd: its backward, of the outputs' gradients and what is saved.
        like: its one argument, in shape and dtype.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        outputs, saved = fwd(x)
        if len(outputs) != 1 or not all(isinstance(s, Tensor) for s in saved):
            return "it gives more than one tensor, or keeps what is none"
        forward, backward = make_fx(fwd)(x).graph, make_fx(bwd)(torch.empty_like(x), *saved).graph
    for node in (*forward.nodes, *backward.nodes):
        if node.op == "call_function":
            alike = node.meta["val"].shape in (x.shape, ())
            if RULES.get(node.target) is not elementwise or not alike:
                return f"{node.target} is not elementwise"
    grad, (result, *others) = next(iter(backward.nodes)), backward.output_node().args[0]
    if others or result is None or result.meta["val"].dtype != x.dtype:
        return "it has no gradient, several, or one of another dtype"
    if outputs[0].shape != x.shape or not _is_linear(backward, grad, result):
        return "its gradient is not what comes from behind times a slope"
    return ""


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


def apply_with_slope(fwd: fx.GraphModule, bwd: fx.GraphModule, x: Tensor) -> tuple[Tensor]:
    """An elementwise function f with a slope g of its own, as ``f(x) + (x - x') g(x)``, where x'
    and what f and g give are constants to autograd: x - x' is zero, and its gradient is one.

    Args:
        fwd, bwd, x: of which ``why_no_slope`` says nothing.
    """
    constant = x.detach()
    (y,), saved = fwd(constant)
    (slope,) = bwd(torch.ones_like(y), *saved)
    return (y.detach() + (x - constant) * slope.detach(),)
