"""Which rows lie on which rank: every layout gives back what it takes."""

from __future__ import annotations

import pytest
import torch

from paradyse.distributed.axis import Axis
from paradyse.weights.layout import ShardLayout, even_layout

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
