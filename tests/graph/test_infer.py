"""Names of a whole graph: every value has them, also where an operator is not known."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from paradyse.graph.factors import Names, size_of
from paradyse.graph.infer import infer_names
from paradyse.torch_private import make_fx


def named(fn: object, *inputs: Tensor) -> tuple[list[fx.Node], Names]:
    gm = make_fx(fn, pre_dispatch=True)(*inputs)
    return list(gm.graph.nodes), infer_names(gm.graph)


def test_every_value_has_dims_of_its_sizes() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        values, places = torch.fft.fft(x @ w).real.topk(2)
        return torch.linalg.qr(values)[0] + places

    nodes, names = named(fn, torch.randn(3, 5, 7), torch.randn(7, 4))
    assert set(names.dims) == set(nodes[:-1])
    for node in nodes[:-1]:
        value = node.meta["val"]
        dims = names.dims[node]
        several = isinstance(value, tuple | list)
        for x, of in zip(value if several else [value], dims if several else [dims], strict=True):
            assert [size_of(d, {}) for d in of] == list(x.shape)


def test_an_unknown_operator_with_several_results_mixes_and_says_so() -> None:
    nodes, names = named(lambda x: torch.linalg.qr(x)[0], torch.randn(3, 5))
    (unknown,) = names.unnamed
    assert names.unnamed[unknown] == f"no rule for {unknown.target}"
    assert names.mixed(unknown) == {f for d in names.of(nodes[0]) for f in d}


def test_numbers_have_no_dims() -> None:
    graph = fx.Graph()
    number = graph.placeholder("n")
    number.meta["val"] = 3
    graph.output(number)
    assert infer_names(graph).dims[number] == []
