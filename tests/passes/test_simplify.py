"""Fewer spellings of the same thing: operator counts before and after, and equal values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_graphs import context, operators, run, trace
from torch import Tensor
from torch.nn import functional as F

from paradyse.passes.simplify import drop_no_ops, merge_equals, unify_linears

aten = torch.ops.aten
X, W, BIAS = torch.randn(2, 3, 4), torch.randn(4, 5), torch.randn(5)

NO_OPS: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, int]]] = {
    "casts and copies": (lambda x: x.to(torch.float32).contiguous().clone() + 1, {"add": 1}),
    "views": (lambda x: aten.view(aten._unsafe_view(x, [6, 4]), [2, 3, 4]), {"reshape": 2}),
    "view to the same": (lambda x: x.view(2, 3, 4).expand(2, 3, 4) + 1, {"add": 1}),
    "dropout of nothing": (lambda x: F.dropout(F.dropout(x, 0.0), 0.5, False) + 1, {"add": 1}),
    "an empty cache": (lambda x: torch.cat([x.new_empty(0), x], 1) + 1, {"new_empty": 1, "add": 1}),
    "squeeze": (lambda x: x[:1].squeeze() + 1, {"slice": 1, "squeeze": 1, "add": 1}),
    "a cast that casts": (lambda x: x.to(torch.float64), {"to": 1}),
    "dropout": (lambda x: F.dropout(x, 1.0), {"dropout": 1}),
}


@pytest.mark.parametrize("name", NO_OPS)
def test_what_changes_nothing_goes(name: str) -> None:
    fn, left = NO_OPS[name]
    gm = trace(fn, X)
    before = len(gm.graph.nodes)
    assert drop_no_ops(gm, context()) == before - len(gm.graph.nodes)
    assert operators(gm) == left
    torch.testing.assert_close(run(gm, X), fn(X))


def test_a_squeeze_names_the_dims_that_it_takes() -> None:
    gm = trace(lambda x: x[:1, :1].squeeze(), X)
    drop_no_ops(gm, context())
    (node,) = [n for n in gm.graph.nodes if n.target == aten.squeeze.dims]
    assert node.args[1] == [0, 1]


def test_rows_repeated_a_number_of_times_are_as_many_as_there_are() -> None:
    gm = trace(lambda x: x.repeat_interleave(3, 0, output_size=3 * x.shape[0]), X)
    drop_no_ops(gm, context())
    (node,) = [n for n in gm.graph.nodes if n.target == aten.repeat_interleave.self_int]
    assert not node.kwargs
    torch.testing.assert_close(run(gm, X), X.repeat_interleave(3, 0))


def test_equals_are_computed_once_and_random_numbers_are_not() -> None:
    def fn(x: Tensor) -> Tensor:
        random = F.dropout(x) + F.dropout(x) + torch.rand(4) + torch.rand(4)
        return x.cos() + x.cos() + random + (x + 1) * (x + 1.0)

    gm = trace(fn, X)
    assert merge_equals(gm, context()) == 1
    assert operators(gm) == {"cos": 1, "dropout": 2, "rand": 2, "add": 8, "mul": 1}


RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: torch.normal(x, 1.0),
    "native dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "randn": lambda x: torch.randn(2, 3),
    "randint": lambda x: torch.randint(9, (2, 3)).float(),
    "randperm": lambda x: torch.randperm(5).float(),
    "bernoulli": lambda x: torch.bernoulli(x),
    "multinomial": lambda x: torch.multinomial(x[0].abs(), 2).float(),
}


@pytest.mark.parametrize("name", RANDOM)
def test_two_draws_stay_two(name: str) -> None:
    draw = RANDOM[name]
    gm = trace(lambda x: draw(x) - draw(x), X)
    tags = ((n, getattr(n.target, "tags", ())) for n in gm.graph.nodes)
    random = [n for n, t in tags if torch.Tag.nondeterministic_seeded in t]
    assert len(random) == 2
    merge_equals(gm, context())
    assert set(random) <= set(gm.graph.nodes)


LINEARS: dict[str, tuple[Callable[..., Tensor], dict[str, int]]] = {
    "conv1d": (
        lambda x, w, b: torch.addmm(b, x.reshape(-1, 4), w).reshape(2, 3, 5),
        {"t": 1, "linear": 1},
    ),
    "matmul": (lambda x, w, b: x @ w, {"t": 1, "linear": 1}),
    "transposed": (lambda x, w, b: x @ w.t().t() + b, {"t": 1, "linear": 1, "add": 1}),
    "cast": (lambda x, w, b: x.double() @ w.double(), {"to": 2, "t": 1, "linear": 1}),
    "activations": (lambda x, w, b: x @ x.transpose(1, 2), {"transpose": 1, "matmul": 1}),
    "scaled": (
        lambda x, w, b: torch.addmm(b, x.reshape(-1, 4), w, alpha=2),
        {"reshape": 1, "addmm": 1},
    ),
}


@pytest.mark.parametrize("name", LINEARS)
def test_products_with_weights_are_linears_on_unflattened_tokens(name: str) -> None:
    fn, left = LINEARS[name]
    gm = trace(fn, X, W, BIAS, weights=2)
    count = unify_linears(gm, context())
    gm.graph.eliminate_dead_code()
    assert operators(gm) == left and (count > 0) == ("linear" in left)
    torch.testing.assert_close(run(gm, X, W, BIAS), fn(X, W, BIAS))
