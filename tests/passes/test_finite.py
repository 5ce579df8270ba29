"""Where rows that are cut off are set to infinity, by what they are made of."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paradyse.passes.finite import rows_are_finite, steep_inputs
from paradyse.torch_private import make_fx

Of = Callable[[Tensor, Tensor], Tensor]
"""Of hidden states [2, 6, 4] and a weight [4, 5]."""

FINITE: dict[str, Of] = {
    "an input": lambda x, w: x,
    "a product": lambda x, w: x.masked_fill(x > 0, math.inf) @ w,
    "scaled": lambda x, w: (x @ w).float() / 3,
    "by a number that is learned": lambda x, w: (x @ w) * w[0, 0].exp(),
    "capped": lambda x, w: ((x @ w) / 30).tanh() * 30,
    "as without a gradient": lambda x, w: (x @ w).log() / x[..., :1],
    "masked by a large number": lambda x, w: (x @ w).masked_fill(x[..., :1] > 0, -1e30),
    "of fewer classes": lambda x, w: (x @ w).masked_fill(w[:1] > 0, -math.inf),
    "normalized": lambda x, w: (x @ w).log_softmax(-1),
}
INFINITE: dict[str, Of] = {
    "masked": lambda x, w: (x @ w).masked_fill(x[..., :1] > 0, -math.inf),
    "normalized": lambda x, w: (x @ w).masked_fill(x[..., :1] > 0, -math.inf).log_softmax(-1),
    "scaled and flattened": lambda x, w: (
        (x @ w).masked_fill(x[..., :1] > 0, -math.inf).float().flatten(0, 1) * 3
    ),
    "chosen": lambda x, w: torch.where(x[..., :1] > 0, x @ w, -math.inf),
    "chosen by a tensor": lambda x, w: torch.where(
        x[..., :1] > 0, x @ w, torch.full([], -math.inf, dtype=x.dtype)
    ),
    "masked by a tensor": lambda x, w: (x @ w).masked_fill(
        x[..., :1] > 0, torch.scalar_tensor(-math.inf)
    ),
    "filled": lambda x, w: (x @ w) + torch.full((2, 6, 5), math.inf),
}


def rows(of: Of) -> bool:
    gm = make_fx(of, pre_dispatch=True)(torch.rand(2, 6, 4), torch.rand(4, 5))
    (out,) = gm.graph.output_node().all_input_nodes
    return rows_are_finite(out, 6)


@pytest.mark.parametrize("name", FINITE)
def test_what_is_made_of_finite_numbers_may_be_read(name: str) -> None:
    assert rows(FINITE[name])


@pytest.mark.parametrize("name", INFINITE)
def test_rows_that_are_set_to_infinity_are_found(name: str) -> None:
    assert not rows(INFINITE[name])


def test_the_inputs_that_must_not_be_just_any_number() -> None:
    x = torch.ones(2)
    of = make_fx(
        lambda x, y: (x / y, x.reciprocal(), x.pow(0.5), x.pow(2), x * y), pre_dispatch=True
    )(x, x)
    outs = of.graph.output_node().args[0]
    assert [steep_inputs(n) for n in outs] == [[1], [0], [0], [], []]
