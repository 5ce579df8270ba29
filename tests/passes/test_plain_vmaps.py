"""Maps of functions that compute element by element are traced without the map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_retrace import like
from torch import Tensor, fx
from torch._higher_order_ops.associative_scan import associative_scan

from paradyse.passes.retrace import retrace


def recurrence(x: Tensor) -> Tensor:
    """h_t = a_t h_(t-1) + x_t, as state spaces have it."""

    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return associative_scan(combine, (x.sigmoid(), x), 0, False, "generic")[1]


def of_elements(x: Tensor) -> Tensor:
    return torch.func.vmap(lambda a, b: 2 * a - torch.exp(b))(x, x.flip(0))


@pytest.mark.parametrize("fn", [recurrence, of_elements])
def test_maps_of_elements_need_no_map(fn: Callable[[Tensor], Tensor]) -> None:
    def compile_graph(gm: fx.GraphModule, inputs: list[Tensor]) -> Any:
        return retrace(gm, [like(*x.shape) for x in inputs])

    torch._dynamo.reset()
    x = torch.randn(9, 3)
    found, want = torch.compile(fn, backend=compile_graph)(x), fn(x)
    torch.testing.assert_close(found[0] if isinstance(found, tuple) else found, want)
