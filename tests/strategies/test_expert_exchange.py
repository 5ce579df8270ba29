"""Rows go to the ranks of their experts and come back, whatever their numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import RankPool
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import SINGLE, resolve_axis
from paradyse.strategies.experts.exchange import FEWEST, deal_rows, num_rows_of
from paradyse.torch_private import FakeTensorMode

BOUNDS = ((0, 2), (2, 3), (3, 5))
"""First expert of each rank, and the one behind its last."""

OTHERS = {"a rank without experts": ((0, 0), (0, 3), (3, 5))}
"""The same of the cases that have others."""

IDS = {
    "a rank without experts": ([0, 4, 3], [2, 1], [4, 4]),
    "uneven": ([0, 4, 4, 1, 3, 4], [2, 2, 0], [4]),
    "one has all": ([3, 3, 3], [3], [3, 3]),
    "one row in all": ([1], [], []),
    "none": ([], [], []),
}
"""Of each rank, the experts of its rows."""


def there_and_back(name: str) -> dict[str, Any]:
    """What the rank's experts see, and what comes back of it: each row times its expert's number,
    which stands in for a weight."""
    axis = resolve_axis()
    ids = torch.tensor(IDS[name][axis.rank], dtype=torch.int64)
    in_order, order, inverse, ends = torch.ops.paradyse.route_rows(ids, 5)
    own = (10.0 * axis.rank + torch.arange(len(ids))).double()[:, None].expand(-1, 3)
    own = own.contiguous().requires_grad_()
    rows = torch.ops.paradyse.take_rows(own, order, inverse, 1)
    block = collectives.register_block(axis, name)
    bounds = OTHERS.get(name, BOUNDS)
    dealing = deal_rows(ends, len(ids), bounds, axis, block)
    came = dealing.bring(rows)
    (first, end), most = bounds[axis.rank], max(b - a for a, b in bounds)
    numbers = torch.arange(1.0, 6, dtype=torch.float64)[first:end]
    numbers = torch.nn.functional.pad(numbers, (0, most - len(numbers))).requires_grad_()
    bounds = [0, *dealing.ends.tolist()]
    weight = torch.cat(
        [numbers[e].expand(b - a) for e, (a, b) in enumerate(zip(bounds, bounds[1:]))]
    )
    back = dealing.take_back(came * weight[:, None])
    result = torch.ops.paradyse.take_rows(back, inverse, order, 1)
    (result * result.detach()).sum().backward()
    sent = collectives.traffic(axis, block).sent_bytes
    return {
        "came": came.detach()[:, 0].tolist(),
        "in order": dealing.in_order.tolist(),
        "rows": result.detach(),
        "gradient": own.grad,
        "of weights": numbers.grad,
        "sent": sent["all_to_all"],
        "missing": dealing.num_missing,
    }


@pytest.mark.parametrize("name", IDS)
def test_each_row_meets_its_expert(name: str, pool3: RankPool) -> None:
    results = pool3.run(there_and_back, name)
    ids = IDS[name]
    for rank, got in enumerate(results):
        bounds = OTHERS.get(name, BOUNDS)
        (first, end), most = bounds[rank], max(b - a for a, b in bounds)
        mine = [
            (e, 10.0 * r + i) for r in range(3) for i, e in enumerate(ids[r]) if first <= e < end
        ]
        mine.sort(key=lambda row: row[0])
        assert got["missing"] == max(0, FEWEST - len(mine))
        assert got["came"] == [x for _, x in mine] + [0.0] * got["missing"]
        assert got["in order"] == [e - first for e, _ in mine] + [most - 1] * got["missing"]
        values = (10.0 * rank + torch.arange(len(ids[rank]))).double()
        number = torch.tensor(ids[rank], dtype=torch.float64) + 1
        assert torch.equal(got["rows"][:, 0], values * number)
        assert torch.equal(got["gradient"][:, 0], values * number**2)
        of_weights = [
            sum(3 * (e + 1) * x * x for e, x in mine if e == at) for at in range(first, end)
        ]
        assert got["of weights"].tolist()[: end - first] == of_weights
        away = sum(not first <= e < end for e in ids[rank])
        come = len(mine) - (len(ids[rank]) - away)
        assert got["sent"] == 2 * (away + come) * 3 * 8


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def test_where_there_are_no_numbers_experts_share_the_rows() -> None:
    assert num_rows_of(ends_of([3, 0, 4]), 7, SINGLE) == [3, 0, 4]
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(ends_of([3, 0, 4]))
        found = num_rows_of(fake, 7, SINGLE)
    assert sum(found) == 7 and max(found) - min(found) <= 1
