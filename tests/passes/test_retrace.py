"""Retrace, and the passes that take modes out of a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import context, operators, run, trace
from torch import Tensor, fx, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch.utils.checkpoint import checkpoint

from paradyse.passes.retrace import (
    InputLike,
    Untraceable,
    drop_grad_mode,
    make_autocast_explicit,
    retrace,
)
from paradyse.runtime.capture import trace_inputs

CPU = torch.device("cpu")


def like(*shape: int, grad: bool = False) -> InputLike:
    return InputLike(shape, torch.float32, CPU, grad)


def test_operators_with_gradients_stay_whole() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return nn.functional.layer_norm(nn.functional.linear(x, w), (5,))

    gm = retrace(fx.symbolic_trace(fn), [like(3, 7), like(5, 7, grad=True)])
    assert operators(gm) == {"linear": 1, "layer_norm": 1}
    grads = [n.meta["tensor_meta"].requires_grad for n in gm.graph.nodes if n.op != "output"]
    assert grads == [False, True, True, True]


def test_numbers_stand_for_what_item_gives() -> None:
    gm = fx.symbolic_trace(lambda x, n: x * n.item())
    assert operators(retrace(gm, [like(3), 2.5])) == {"mul": 1}
    assert "item" in gm.code  # the graph that was given is as it was


def test_the_body_of_a_checkpoint_is_traced_in_place_and_marked() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = fx.symbolic_trace(lambda x: (x.sin().cos(),))

    graph = fx.Graph()
    x = graph.placeholder("x")
    body = graph.get_attr("body")
    out = graph.call_function(torch.ops.higher_order.tag_activation_checkpoint, (body, x))
    first = graph.call_function(operator.getitem, (out, 0))
    graph.output((graph.call_method("exp", (first,)),))
    root = Root()
    for node in (*graph.nodes, *root.body.graph.nodes):
        node.meta["stack_trace"] = "somewhere"  # as Dynamo's nodes have
    gm = retrace(fx.GraphModule(root, graph), [like(3, grad=True)])
    calls = (n for n in gm.graph.nodes if n.op == "call_function")
    marked = {n.target for n in calls if n.meta.get("recompute")}
    assert operators(gm) == {"sin": 1, "cos": 1, "exp": 1}
    assert marked == {torch.ops.aten.sin.default, torch.ops.aten.cos.default}


class Checkpointed(nn.Module):
    """Whose factor Dynamo takes for an input, of which the checkpoint's body reads the number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(5, 5), 0.25

    def scaled(self, x: Tensor) -> Tensor:
        return self.linear(x).clamp(max=self.factor)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.scaled, x, use_reentrant=False)


def test_numbers_that_the_body_of_a_checkpoint_reads_are_constants() -> None:
    found: list[Any] = []

    def backend(gm: Any, examples: list[Any]) -> Any:
        found[:] = [gm, examples]
        return gm.forward

    torch._dynamo.reset()
    model = Checkpointed()
    torch.compile(model, backend=backend, dynamic=True)(torch.ones(3, 5))
    gm, examples = found
    placeholders = gm.graph.find_nodes(op="placeholder")
    inputs = trace_inputs(placeholders, examples)
    assert 0.25 in [inputs.values[i] for i in inputs.scalars]
    traced = retrace(gm, list(inputs.values))
    (clamp,) = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.clamp.default)
    assert clamp.args[2] == 0.25


def test_constants_of_the_graph_and_of_the_program_are_kept() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 3)
            self.table = torch.ones(3)
            self.register_buffer("scale", torch.full((3,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x * self.table * self.scale) + torch.tensor([1.0, 2.0, 3.0])

    root = Root()
    gm = retrace(fx.symbolic_trace(root), [like(2, 3)])
    x = torch.randn(2, 3)
    torch.testing.assert_close(fx.Interpreter(gm).run(x), root(x))


def of_every_row(x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: row * 2 + row.sum())(x)


def of_every_column(x: Tensor) -> Tensor:
    return torch.func.vmap(torch.exp, in_dims=1)(x)


def of_rows_and_columns(x: Tensor) -> Tensor:
    return torch.func.vmap(torch.mul)(x, x[:, 0])


def of_what_is_elsewhere(x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: row * x)(x)


def in_turn(x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.vmap(torch.exp))(x)


def scanned_products(x: Tensor) -> Tensor:
    return associative_scan(lambda a, b: a @ b, x[..., None] * x[:, None], 0, False, "generic")


@pytest.mark.parametrize(
    "fn",
    [
        of_every_row,
        of_every_column,
        of_rows_and_columns,
        of_what_is_elsewhere,
        in_turn,
        scanned_products,
    ],
)
def test_what_tracing_loses_is_no_constant(fn: Callable[[Tensor], Tensor]) -> None:
    refused = []

    def compile_graph(gm: fx.GraphModule, inputs: list[Tensor]) -> Any:
        with pytest.raises(Untraceable, match="transforms functions|whose body") as error:
            retrace(gm, [like(*x.shape) for x in inputs])
        refused.append(error)
        return gm.forward

    torch._dynamo.reset()
    x = torch.randn(4, 3)
    torch.testing.assert_close(torch.compile(fn, backend=compile_graph)(x), fn(x))
    assert refused


def test_other_operators_with_a_body_are_refused() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.higher_order.cond, (graph.placeholder("x"),)))
    with pytest.raises(Untraceable, match="cond, whose body"):
        retrace(fx.GraphModule({}, graph), [like(3)])


def test_what_enters_a_region_without_gradients_is_detached() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * w + w
        return y * w

    gm = trace(fn, torch.randn(3), torch.randn(3, requires_grad=True))
    assert operators(gm)["_set_grad_enabled"] == 2
    assert drop_grad_mode(gm, context()) == 2
    assert operators(gm) == {"detach": 2, "mul": 2, "add": 1}
    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    out = run(gm, x, w)
    (got,) = torch.autograd.grad(out.sum(), w)
    torch.testing.assert_close(got, x * w.detach() + w.detach())


def test_the_casts_of_autocast_are_in_the_graph() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = nn.functional.linear(x, w)
            z = nn.functional.linear(x, w)
        return y.float() + z

    x, w = torch.randn(3, 4), torch.randn(5, 4)
    gm = trace(fn, x, w)
    assert make_autocast_explicit(gm, context()) == 4  # two switches, two products
    assert operators(gm) == {"to": 3, "linear": 2, "add": 1}  # each input is cast once
    torch.testing.assert_close(run(gm, x, w), fn(x, w))


def switches(inside: bool, body: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """What switches autocast on, or off, in the middle; maybe inside a checkpointed region."""

    def part(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return (x @ w.float().t()).cos()

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = checkpoint(part, x, w, use_reentrant=False) if body else part(x, w)
        return y.float() * (x @ w.t())

    return fn


@pytest.mark.parametrize("body", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_autocast_is_switched_where_the_model_does(inside: bool, outside: bool, body: bool) -> None:
    """In a graph of Dynamo's, and under autocast outside."""
    fn, found = switches(inside, body), []

    def backend(gm: fx.GraphModule, examples: Any) -> Any:
        given = trace_inputs(list(gm.graph.find_nodes(op="placeholder")), examples)
        traced = retrace(gm, list(given.values))
        make_autocast_explicit(traced, context())
        found.append((traced, examples))
        return gm.forward

    torch._dynamo.reset()
    x, w = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        want = torch.compile(fn, backend=backend, dynamic=False, fullgraph=True)(x, w)
        is_on = torch.is_autocast_enabled("cpu")
    assert is_on is outside and not torch.is_autocast_enabled("cpu")
    ((gm, examples),) = found
    (got,) = run(gm, *examples)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_without_autocast_nothing_is_cast() -> None:
    gm = trace(lambda x: x.double() @ x.double().mT, torch.randn(3, 4))
    assert make_autocast_explicit(gm, context()) == 0


def test_a_graph_of_numbers_alone_has_nothing_to_cast() -> None:
    gm = retrace(fx.symbolic_trace(lambda n: n + 1), [3])
    assert make_autocast_explicit(gm, context()) == 0


def test_views_in_place_are_views() -> None:
    """Of all names that the tensor has by then."""

    def fn(x: Tensor) -> Tensor:
        means = x.mean(-1)
        means.unsqueeze_(-1)
        again = means.squeeze_(-1).unsqueeze_(-1)
        turned = x + 1
        turned.transpose_(0, 1)
        return x * means + again + turned.t()

    gm = retrace(fx.symbolic_trace(fn), [like(3, 4)])
    assert not any(name.endswith("_") for name in operators(gm))
    x = torch.randn(3, 4)
    assert torch.equal(gm(x), fn(x))
