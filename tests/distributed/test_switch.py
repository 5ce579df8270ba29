"""A split that switches to another dim and back: what each rank has, gradients, and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import RankPool

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis, local_positions, resolve_axis
from paradyse.distributed.switch import rows_per_rank, switch_back, switch_split
from paradyse.distributed.tokens import take_own

CASES = [(8, 6), (7, 5), (13, 3), (3, 1), (1, 9)]
"""Length of the dim that is split at rest, and of the other one."""


def rows_of(num: int, axis: Axis) -> torch.Tensor:
    """The rank's rows of ``num``; past the end the last one."""
    n = rows_per_rank(num, axis.size)
    return (torch.arange(n) + axis.rank * n).clamp(max=num - 1)


def there_and_back(num: int, other: int, outer_first: bool) -> dict[str, bool]:
    """Whether each of the things that ought to hold does."""
    axis = resolve_axis()
    layout = axis.layout(num)
    block = collectives.register_block(axis, "switch")
    dim, to = (3, 1) if outer_first else (1, 2)
    shape = [2, other, 3, num, 4] if outer_first else [2, num, other, 4]
    g = torch.Generator().manual_seed(num)
    whole = torch.randn(shape, generator=g, dtype=torch.float64)
    local = local_positions(layout, axis.rank)
    mine = whole.index_select(dim, local.clamp(max=num - 1)).requires_grad_()
    common = local, torch.arange(num), torch.tensor([num, block]), dim, to, other
    switched = switch_split(mine, *common, False, axis.name)
    own = rows_of(other, axis)
    before = collectives.traffic(axis, block).sent_bytes["all_to_all"]
    back = switch_back(switched.square(), *common, False, axis.name)
    message = collectives.traffic(axis, block).sent_bytes["all_to_all"] - before
    cotangent = torch.randn(shape, generator=g, dtype=torch.float64)
    (grad,) = torch.autograd.grad(back, mine, take_own(cotangent, layout, axis.rank, dim))
    want = take_own(2 * whole * cotangent, layout, axis.rank, dim)
    real = local < num
    value = back.detach().index_select(dim, torch.nonzero(real).flatten())
    padded = back.numel() // other * len(own) * axis.size
    return {
        "switched": torch.equal(switched.detach(), whole.index_select(to, own)),
        "back": torch.equal(value, whole.square().index_select(dim, local[real])),
        "gradient": torch.equal(grad, want),
        "bytes": message == (axis.size - 1) / axis.size * padded * 8,
    }


@pytest.mark.parametrize("nproc", [2, 3])
def test_values_gradients_and_bytes(nproc: int, ranks: Any) -> None:
    for case in CASES:
        for outer_first in (False, True):
            for found in ranks(nproc).run(there_and_back, *case, outer_first):
                assert all(found.values()), (case, outer_first, found)


def finite(num: int, other: int) -> bool:
    axis = resolve_axis()
    layout = axis.layout(num)
    block = collectives.register_block(axis, "switch")
    local = local_positions(layout, axis.rank)
    x = torch.full([len(local), other], 5.0)
    common = local, torch.arange(num), torch.tensor([num, block]), 0, 1, other
    y = switch_split(x, *common, False, axis.name)
    z = switch_back(y, *common, False, axis.name)
    return bool((y == 5).all() and (z == 5).all())


def test_rows_past_the_end_are_copies(pool3: RankPool) -> None:
    assert all(pool3.run(finite, 4, 2))
