"""Custom autograd functions that are elementwise become operators with the same gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import operators
from torch import Tensor, fx

from paradyse.passes.retrace import Untraceable, retrace
from paradyse.runtime.capture import trace_inputs


class Gelu(torch.autograd.Function):
    """As Bloom's: the gradient is written out, and keeps the input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        return (0.5 * x * ((1 - t * t) * (0.79788456 + 0.107 * x * x)) + 0.5 * (1 + t)) * grad


class Rounded(torch.autograd.Function):
    """The gradient is not the function's own: straight through, within bounds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1) - grad / 3.0


class Root(torch.autograd.Function):
    """Steep at 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sqrt()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad / (2 * y)


class Sigmoid(torch.autograd.Function):
    """What is saved is the value that it gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sigmoid()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)


class Clipped(Rounded):
    """Not linear in the gradient that comes from behind."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.1, 0.1)


class Summed(Rounded):
    """Rows depend on each other."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad * y, grad * x


class Scaled(Rounded):
    """By how many rows there are."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * grad.shape[0]


def captured(
    fn: Callable[[Tensor], Tensor], x: Tensor, dynamic: bool = True
) -> list[fx.GraphModule | str]:
    """Dynamo's graphs of ``fn``, traced again; of one that is refused why."""
    found: list[fx.GraphModule | str] = []

    def compile_graph(gm: fx.GraphModule, inputs: list[Tensor]) -> Any:
        placeholders = gm.graph.find_nodes(op="placeholder")
        try:
            found.append(retrace(gm, list(trace_inputs(placeholders, inputs).values)))
        except Untraceable as e:
            found.append(str(e))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=compile_graph, dynamic=dynamic)(x)
    return found


@pytest.mark.parametrize(("dtype", "dynamic"), [(torch.float64, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("function", [Gelu, Rounded, Sigmoid])
def test_values_and_gradients_are_the_functions_own(
    function: Any, dtype: torch.dtype, dynamic: bool
) -> None:
    x = torch.randn(5, 7, dtype=dtype, requires_grad=True)
    behind = torch.randn(5, 7, dtype=dtype)
    (gm,) = captured(lambda x: function.apply(x * 2), x, dynamic)
    assert isinstance(gm, fx.GraphModule) and operators(gm)["detach"]
    placeholders = gm.graph.find_nodes(op="placeholder")
    given = [x if isinstance(n.meta.get("val"), Tensor) else 0 for n in placeholders]
    found = []
    for (y,) in (gm(*given), [function.apply(x * 2)]):
        found.append([y.detach(), *torch.autograd.grad(y, x, behind)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("function", "numbers"),
    [(Root, [0.0, 4.0, torch.inf]), (Gelu, [torch.inf, 1.0]), (Rounded, [-torch.inf, 0.6])],
)
def test_values_stay_where_a_number_or_a_slope_is_infinite(
    function: Any, numbers: list[float]
) -> None:
    x = torch.tensor(numbers, dtype=torch.float64, requires_grad=True)
    (gm,) = captured(function.apply, x)
    assert isinstance(gm, fx.GraphModule)
    placeholders = gm.graph.find_nodes(op="placeholder")
    (y,) = gm(*[x if isinstance(n.meta.get("val"), Tensor) else 0 for n in placeholders])
    want = function.apply(x)
    torch.testing.assert_close(y, want)
    got, of = (torch.autograd.grad(v.sum(), x)[0] for v in (y, want))
    finite = x.isfinite() & of.isfinite()
    torch.testing.assert_close(got[finite], of[finite])
    assert not got.isnan().any()
    assert (got[of.isinf()] > 1e300).all()


REFUSED = {
    "clipped": (Clipped.apply, "times a slope"),
    "over rows": (Summed.apply, "mean.dim is not elementwise"),
    "by its size": (Scaled.apply, "depends on sizes"),
    "of two tensors": (lambda x: Product.apply(x, x + 1), "not a function of one tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_functions_are_refused_by_name(name: str) -> None:
    fn, text = REFUSED[name]
    (why,) = captured(fn, torch.randn(3, 4, requires_grad=True))
    assert isinstance(why, str) and "autograd_function_apply, whose body" in why and text in why
