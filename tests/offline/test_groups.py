"""Groups on paper: what a way costs, against the planner it is from; comparisons of degrees."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch
from test_dry_run import on_paper

from paradyse.config import Options
from paradyse.mixed.estimate import undominated
from paradyse.mixed.ways import Way
from paradyse.offline.devices import machine_of, read_cluster
from paradyse.offline.dry_run import DryRun
from paradyse.offline.groups import (
    Comparison,
    GroupCosts,
    compare,
    degrees_of,
    ways_on_paper,
)
from paradyse.offline.outlook import PaperCosts
from paradyse.planning.planner import Planner
from paradyse.planning.prior import gradient_sum_s
from paradyse.types import REPLICATED, Workload

CLUSTER = read_cluster("a100-40gb")
ALONE = Workload(1, 4096, torch.float32, True, 1)


@cache
def run_of(degree: int) -> DryRun:
    return on_paper("llama", degree)


@cache
def ways() -> tuple[Way, ...]:
    return tuple(ways_on_paper(run_of, CLUSTER, 2, torch.float32))


def test_degrees_are_powers_of_two_and_all_ranks() -> None:
    assert [degrees_of(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.slow
def test_a_block_is_fetched_from_the_whole_axis_whatever_the_group() -> None:
    run, machine = run_of(1), machine_of(CLUSTER, 1, torch.float32)
    block = run.blocks[0]
    plain = PaperCosts(run, machine, sharded=False).cost(block, REPLICATED, ALONE)
    own_s = gradient_sum_s(block, REPLICATED, ALONE, machine)
    times = []
    for num_ranks in (2, 64):
        axis = machine_of(CLUSTER, num_ranks, torch.float32)
        cost = GroupCosts(run, machine, axis, num_ranks).cost(block, REPLICATED, ALONE)
        seen = 1 - axis.overlap
        times.append((cost.time_s - (plain.time_s - own_s)) / seen)
        assert cost.workspace_bytes == plain.workspace_bytes + 2 * 4 * block.num_weight_elements
        assert cost.ahead_bytes == 4 * block.num_weight_elements
        # forward and backward gather, backward scatters, of which a rank sends all but its share
        sent = 3 * 4 * block.num_weight_elements * (num_ranks - 1) / num_ranks
        sent_s = sent / axis.link("all_gather").bandwidth_bytes
        assert times[-1] > sent_s
        assert GroupCosts(run, machine, axis, num_ranks).messages_s(ALONE) > sent_s
    assert 0 < times[0] < times[1]


@pytest.mark.slow
def test_ways_are_what_the_planner_predicts() -> None:
    run, machine = run_of(2), machine_of(CLUSTER, 2, torch.float32)
    costs = cast(Any, GroupCosts(run, machine, machine, 2))
    options = Options(smoothing=0.0, strategies=("megatron_cz", "ulysses_z"))
    known = run.static_bytes, True, costs, run.head
    planner = Planner(options, run.blocks, 2, lambda dtype: machine, *known)
    of_two = [w for w in ways() if w.degree == 2]
    assert of_two and {w.degree for w in ways()} == {1, 2}
    for n in (300, 3000, 50_000):
        workload = replace(ALONE, seq_len=n, num_ranks=2)
        predicted = planner.predict(planner.plan(workload), workload)[0]
        fastest = min(w.group_s([n]) for w in of_two if w.max_tokens >= n)
        assert fastest == pytest.approx(predicted, rel=0.1)


@pytest.mark.slow
def test_two_packed_sequences_are_less_than_one_as_long_as_both() -> None:
    for way in ways():
        n = way.max_tokens // 4
        assert way.group_s([n]) < way.group_s([n, n]) < way.group_s([2 * n])
        assert way.group_s([n, n]) < 2 * way.group_s([n])


def test_ways_that_others_beat_are_left_out() -> None:
    slow = Way(1, 1.0, 100, (10, 100), (1.0, 10.0))
    fast = replace(slow, times_s=(0.5, 5.0))
    roomy = replace(slow, max_tokens=200)
    wide = replace(slow, degree=2)
    assert undominated([slow, fast, roomy, wide]) == [roomy, fast, wide]
    assert undominated([slow, roomy]) == [roomy]


@pytest.mark.slow
def test_groups_are_no_slower_than_any_degree() -> None:
    most = max(w.max_tokens for w in ways())
    batches = [[most // 2, *[500] * 40], [2000] * 8]
    found = compare(batches, ways(), 2)
    assert isinstance(found, Comparison) and len(found.plans) == 2
    assert set(found.static_s) <= {1, 2}
    assert found.groups_s <= found.best_static_s <= found.best_s * (1 + 1e-12)


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="not one token fits: .* a rank's 1000"):
        ways_on_paper(run_of, CLUSTER, 2, torch.float32, memory_limit=1000)
