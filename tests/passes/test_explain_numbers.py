"""Arguments of operators that are made of a length are told from constants by two traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from paradyse.graph.factors import Length, Product
from paradyse.graph.infer import infer_names
from paradyse.graph.subgraph import make_piece, run
from paradyse.passes.explain_numbers import explain_numbers

aten = torch.ops.aten

ONE, OTHER = (3, 37), (5, 41)
"""Shape of the input in the first trace and in the second."""

Function = Callable[[Tensor, Tensor], Tensor]
EXPLAINED: dict[str, tuple[Function, Any, tuple[int, int, int]]] = {
    "a bound": (lambda x, t: x.clamp(0, x.shape[1]), aten.clamp.default, (2, 0, 1)),
    "less": (lambda x, t: x.clamp(0, x.shape[1] - 5), aten.clamp.default, (2, -5, 1)),
    "what is left": (lambda x, t: t[0, 64 - x.shape[1] :], aten.slice.Tensor, (2, 64, -1)),
    "a batch": (lambda x, t: t.clamp(max=x.shape[0]), aten.clamp.default, (2, 0, 1)),
}
"""Function, the operator that is explained, and the argument's position, start and sign."""


def filled(*shape: int) -> Tensor:
    return torch.arange(float(shape[0] * shape[1])).view(shape)


def traced(fn: Function, shape: tuple[int, int]) -> Any:
    """The graph of ``fn`` of an input of ``shape`` and a table that is the model's."""
    gm = make_fx(fn, pre_dispatch=True)(filled(*shape), filled(64, 64))
    gm.graph.find_nodes(op="placeholder")[1].meta["weight"] = True
    return gm


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_number_made_of_a_size_is_written_as_that(name: str) -> None:
    fn, target, (position, start, sign) = EXPLAINED[name]
    one = traced(fn, ONE)
    found = explain_numbers(one, traced(fn, OTHER))
    ((node, lengths),) = found.items()
    assert node.target == target
    x, dim = one.graph.find_nodes(op="placeholder")[0], 0 if name == "a batch" else 1
    assert lengths == {position: Length(x, dim, start, sign)}
    assert torch.equal(*at_other_sizes(fn, one, found))


MULTIPLES: dict[str, tuple[Function, int, list[tuple[int, int]]]] = {
    "tokens": (lambda x, t: x.clamp(0, x.numel()), 1, [(0, 0), (1, 0)]),
    "elements": (lambda x, t: x.clamp(0, x.numel() * 7), 7, [(0, 0), (1, 0)]),
    "next tokens": (lambda x, t: x.clamp(0, x.shape[0] * (x.shape[1] - 1)), 1, [(0, 0), (1, -1)]),
    "three times": (lambda x, t: x.clamp(0, x.shape[1] * 3), 3, [(1, 0)]),
    "words of next tokens": (lambda x, t: x.clamp(0, x[:, 1:].shape[1] * 6), 6, [(1, -1)]),
}
"""Function, the factor, and the dims of the input that are multiplied, with what is added."""


@pytest.mark.parametrize("name", MULTIPLES)
def test_a_multiple_of_sizes_is_written_as_that(name: str) -> None:
    fn, times, dims = MULTIPLES[name]
    one = traced(fn, ONE)
    found = explain_numbers(one, traced(fn, OTHER))
    ((_, numbers),) = found.items()
    x = one.graph.find_nodes(op="placeholder")[0]
    assert numbers == {2: Product(times, tuple(Length(x, d, start, 1) for d, start in dims))}
    assert torch.equal(*at_other_sizes(fn, one, found))


def at_other_sizes(fn: Function, one: Any, found: Any) -> tuple[Tensor, Tensor]:
    """What the graph ``one`` gives at sizes of neither trace, and what ``fn`` gives."""
    x = one.graph.find_nodes(op="placeholder")[0]
    names = infer_names(one.graph)
    names.lengths = found
    nodes = [n for n in one.graph.nodes if n.op == "call_function"]
    piece = make_piece("all", nodes, one.graph.find_nodes(op="output")[0].args[0:1])
    inputs = [filled(11, 29), filled(64, 64)]
    of = {n.target: v for n, v in zip(one.graph.find_nodes(op="placeholder"), inputs, strict=True)}
    (batch,), (length,) = names.of(x)
    sizes = {batch: 11, length: 29, batch.entire: 11, length.entire: 29}
    (got,) = run(piece, [of[n.target] for n in piece.inputs], names, sizes)
    return got, fn(*inputs)


def test_constants_and_what_several_sizes_explain_stay() -> None:
    def explained(fn: Function, other: tuple[int, int] = OTHER) -> Any:
        return explain_numbers(traced(fn, ONE), traced(fn, other))

    assert explained(lambda x, t: x.clamp(0, 7)) == {}
    assert explained(lambda x, t: x.clamp(0, x.shape[1] ** 2)) == {}
    assert explained(lambda x, t: x.clamp(0, x.shape[1] * (x.shape[1] - 1))) == {}
    assert explained(lambda x, t: x.clamp(0, 2 * x.shape[1] + 3)) == {}
    # both sizes are four more: whose the number is does not show, unless it is one of them
    assert explained(lambda x, t: x.clamp(0, x.shape[1] - 5), (7, 41)) == {}
    assert explained(lambda x, t: x.clamp(0, x.shape[1]), (7, 41)) != {}


def test_graphs_of_other_operators_explain_nothing() -> None:
    one = traced(lambda x, t: x.clamp(0, x.shape[1]), ONE)
    assert explain_numbers(one, traced(lambda x, t: x.relu(), OTHER)) == {}
