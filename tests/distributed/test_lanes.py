"""Lanes: groups of the same ranks, of which none waits for another."""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import RankPool, run_ranks

from paradyse.distributed import collectives
from paradyse.distributed.agreement import agreement_of
from paradyse.distributed.axis import axis_of, is_alive, live_axes, resolve_axis
from paradyse.distributed.collectives import AGREEMENT, MACHINE, Started
from paradyse.distributed.control import control_of, tell_all
from paradyse.distributed.failures import catch_up, started
from paradyse.distributed.lanes import GATHERS, GRADIENTS, lane_of, num_groups


def overtake() -> list[float]:
    """What the other rank sends over the lanes, in which each rank begins with another one, and
    over the axis in between."""
    axis = resolve_axis()
    agreement_of(axis)
    first, last = (GATHERS, GRADIENTS) if axis.rank == 0 else (GRADIENTS, GATHERS)
    mine, came = torch.full((3,), 1.0 + axis.rank), {}
    for purpose in (first, "", last):
        lane = lane_of(axis, purpose)
        came[purpose] = collectives.ring_exchange(mine * (1 + len(purpose)), lane, MACHINE)
        if purpose == "":
            came[purpose].wait()
    return [float(came[p].wait()[0]) for p in ("", GATHERS, GRADIENTS)]


def test_messages_of_one_lane_do_not_wait_for_those_of_another(pool2: RankPool) -> None:
    factors = torch.tensor([1 + len(p) for p in ("", GATHERS, GRADIENTS)])
    assert len(factors.unique()) == 3
    first, second = pool2.run(overtake, timeout_s=20)
    assert first == (2 * factors).tolist() and second == factors.tolist()


def fall_behind() -> bool:
    """Rank 1 has started none of the messages that rank 0 has, on three groups."""
    axis = resolve_axis()
    agreement_of(axis)
    pending, count = [], axis.session.of(Started).count
    if axis.rank == 0:
        for purpose in (GATHERS, "", GRADIENTS, GATHERS, ""):
            lane = lane_of(axis, purpose)
            pending.append(collectives.ring_exchange(torch.ones(2), lane, MACHINE))
    catch_up(axis, tell_all(started([axis]), control_of((0, 1)).axis))
    for p in pending:
        p.wait()
    in_step = collectives.all_gather(torch.tensor([axis.rank]), axis, AGREEMENT)
    return in_step.flatten().tolist() == [0, 1] and axis.session.of(Started).count == count + 6


def test_a_rank_that_is_behind_takes_part_on_all_lanes(pool2: RankPool) -> None:
    assert pool2.run(fall_behind, timeout_s=20) == [True, True]


def lives() -> tuple[list[bool], list[bool], bool]:
    """Whether the lanes of a group of its own are there with it, and without it; and another's."""
    group = dist.new_group([0, 1])
    axis, other = axis_of(group), resolve_axis()
    for each in (axis, other):
        agreement_of(each)
    lanes = [lane_of(axis, purpose) for purpose in (GATHERS, GRADIENTS)]
    assert all(lane.session is axis.session and lane != axis for lane in lanes)
    assert lane_of(axis, "") is axis and axis.lane == ""
    before = [is_alive(lane.group) for lane in lanes]
    dist.destroy_process_group(group)
    live_axes()
    after = [is_alive(lane.group) for lane in lanes]
    return before, after, is_alive(lane_of(other, GATHERS).group)


def test_lanes_live_as_long_as_their_axis() -> None:
    assert run_ranks(lives, 2) == [([True, True], [False, False], True)] * 2


def test_groups_are_counted() -> None:
    assert num_groups(training=False, sharded=False) == 1
    assert num_groups(training=True, sharded=False) == 2
    assert num_groups(training=True, sharded=True) == 3
