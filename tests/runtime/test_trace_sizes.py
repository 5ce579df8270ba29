"""Sizes that a graph is traced at, and those that the trace is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paradyse.runtime.trace_sizes import choose_sizes


def chosen(fn: Callable[[Tensor], Tensor], *shape: int) -> list[tuple[int, int | None]]:
    """Of each size that Dynamo leaves open: what it is traced at, and what it is compared with."""
    found = []

    def backend(gm: Any, examples: Any) -> Any:
        symbols = [x for x in examples if isinstance(x, torch.SymInt)]
        values, others, _ = choose_sizes(symbols, examples)
        found.append([(values[s], others.get(s)) for s in values])
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, dynamic=True)(torch.ones(*shape))
    (sizes,) = found
    return sizes


@pytest.mark.parametrize("length", [9, 13, 22, 37, 41, 64, 131, 1024])
def test_the_other_size_is_padded_otherwise(length: int) -> None:
    """To a multiple of any small number, so that what is padded does not look like a constant."""
    sizes = chosen(lambda x: x.sum(1), 3, length)
    assert len(sizes) == 2
    for traced, other in sizes:
        assert other is not None and all(traced % k != other % k for k in range(2, 11))


def test_it_is_one_that_guards_allow() -> None:
    ((_, other),) = chosen(lambda x: x[-40:].sum(), 50)
    assert other is not None and other >= 40
    ((traced, other),) = chosen(lambda x: x * torch.ones(32)[: x.shape[0]], 22)
    assert other is not None and other != traced and other <= 32
    ((traced, other),) = chosen(lambda x: torch.stack(x.chunk(2)).sum(0), 6)
    assert other is not None and other != traced and other % 2 == 0


def test_a_size_that_guards_leave_no_other_is_told() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 2 if 20 < x.shape[0] < 22 else x

    assert chosen(fn, 21) in ([], [(21, None)])  # Dynamo may find out by itself that it is 21
