"""Which rows lie on which rank: every layout gives back what it takes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from paradyse.distributed.axis import Axis
from paradyse.torch_private import TorchDispatchMode
from paradyse.weights.layout import ShardLayout, copy_all, even_layout

AXIS = Axis("of a test of layouts", 3, 1)
UNEVEN = (((4, 2), (0, 1), (9, 3)), ((1, 3), (6, 1), (12, 1), (7, 2)), ())
LAYOUTS = {
    "uneven stretches": ShardLayout(AXIS, 0, UNEVEN),
    "one each": even_layout(AXIS, 13),
    "a rank without rows": even_layout(AXIS, 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1])
def test_what_ranks_take_put_together_is_the_whole(name: str, dim: int) -> None:
    layout = ShardLayout(AXIS, dim, LAYOUTS[name].runs)
    size = [5, 5]
    size[dim] = sum(layout.num_rows)
    whole, again = torch.randn(size), torch.full(size, float("nan"))
    for rank in range(AXIS.size):
        rows = layout.take(whole, rank)
        assert tuple(rows.shape) == layout.shape(size, rank)
        assert rows.numel() == layout.numel(size, rank)
        layout.put(again, rank, rows)
    assert torch.equal(again, whole)


def test_what_a_rank_takes_is_memory_of_its_own() -> None:
    whole = torch.zeros(13, 2)
    own = even_layout(AXIS, 13).take_own(whole)
    own += 1
    assert whole.sum() == 0 and own.is_contiguous()


def test_rows_of_many_ranks_and_tensors_are_copied_together() -> None:
    axis = Axis("of no group", 8, 3)
    shapes = [(24, 4), (17, 3), (8, 2), (24, 4)]
    layouts = [even_layout(axis, n) for n, _ in shapes]
    layouts[3] = ShardLayout(axis, 1, tuple(((r, 1),) if r < 4 else () for r in range(8)))
    wholes = [torch.randn(shape) for shape in shapes]
    pairs, found = [], [torch.full(shape, torch.nan) for shape in shapes]
    for layout, whole, to in zip(layouts, wholes, found, strict=True):
        for rank in range(8):
            pairs += layout.places(to, rank, layout.take(whole, rank))
    with Operators() as operators:
        copy_all(pairs)
    assert all(map(torch.equal, found, wholes))
    columns = 4  # which do not lie in adjacent memory
    assert operators.found["aten._foreach_copy_.default"] == 1
    assert operators.found["aten.copy_.default"] == columns


class Operators(TorchDispatchMode):
    """Counts what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))
