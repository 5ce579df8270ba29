"""Large messages that cross: each way has a group of its own, and values are those of one group."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import RankPool

from paradyse.distributed import collectives
from paradyse.distributed.agreement import agreement_of
from paradyse.distributed.axis import resolve_axis
from paradyse.distributed.collectives import MACHINE
from paradyse.distributed.crossing import CROSSING_BYTES
from paradyse.distributed.lanes import GATHERS, downward_group, lane_of


def send(num_bytes: int, purpose: str) -> tuple[dict[str, Any], list[tuple[bool, list[int]]]]:
    """What arrives of messages of so many bytes to a rank, and per call whether it was over the
    group to lower ranks, and to which ranks."""
    agreement_of(resolve_axis())
    axis, calls = lane_of(resolve_axis(), purpose), list[tuple[bool, list[int]]]()
    original = dist.all_to_all_single

    def noted(out: Any, x: Any, arrive: list[int], leave: list[int], group: Any, **how: Any) -> Any:
        calls.append((group is downward_group(axis), [r for r, n in enumerate(leave) if n]))
        return original(out, x, arrive, leave, group=group, **how)

    n, p = num_bytes // 4, axis.size
    rows = torch.arange(p)[:, None] * 10.0 + torch.arange(n) % 7 + 100 * axis.rank
    with patch.object(dist, "all_to_all_single", noted):
        found = {
            "all_to_all": collectives.all_to_all(rows, axis, MACHINE),
            "all_gather": collectives.all_gather(rows[0], axis, MACHINE),
            "reduce_scatter": collectives.reduce_scatter(rows, axis, MACHINE),
            "ring_exchange": collectives.ring_exchange(rows[0], axis, MACHINE).wait(),
        }
    return {name: x[..., -3:].tolist() for name, x in found.items()}, calls


@pytest.mark.parametrize("purpose", ["", GATHERS])
@pytest.mark.parametrize("num_bytes", [CROSSING_BYTES - 4, CROSSING_BYTES + 4])
@pytest.mark.parametrize("nproc", [2, 3])
def test_values_and_ways(
    nproc: int, num_bytes: int, purpose: str, pool2: RankPool, pool3: RankPool
) -> None:
    found = {2: pool2, 3: pool3}[nproc].run(send, num_bytes, purpose, timeout_s=30)
    n = num_bytes // 4
    last = torch.arange(n - 3, n) % 7
    sent = [[last + 10.0 * i + 100 * r for i in range(nproc)] for r in range(nproc)]
    for r, (values, calls) in enumerate(found):
        column = [row[r] for row in sent]
        assert values["all_to_all"] == torch.stack(column).tolist()
        assert values["all_gather"] == torch.stack([row[0] for row in sent]).tolist()
        assert values["reduce_scatter"] == sum(column).tolist()
        assert values["ring_exchange"] == sent[r - 1][0].tolist()
        below, above = list(range(r)), list(range(r + 1, nproc))
        to_all = [(False, above), (True, below)]
        following = (r + 1) % nproc
        to_next = [(down, [following] * ((following < r) == down)) for down in (False, True)]
        crossing = [*to_all * 3, *to_next]
        together = [*[(False, list(range(nproc)))] * 3, (False, [following])]
        assert calls == (crossing if num_bytes > CROSSING_BYTES else together)
