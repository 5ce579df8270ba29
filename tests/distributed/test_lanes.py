"""Lanes: groups of the same ranks, of which none waits for another."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, run_ranks
from tiny import Tiny, tokens

from paradyse.distributed import collectives, crossing
from paradyse.distributed.agreement import agreement_of
from paradyse.distributed.axis import axis_of, is_alive, live_axes, resolve_axis
from paradyse.distributed.collectives import AGREEMENT, MACHINE, Pending, Started
from paradyse.distributed.control import control_of, tell_all
from paradyse.distributed.failures import catch_up, started
from paradyse.distributed.lanes import GATHERS, GRADIENTS, lane_of, num_groups
from paradyse.types import Plan


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


SENDERS = {
    ("shard_comm", "start_gather"): GATHERS,
    ("weight_stream", "start"): GATHERS,
    ("shard_comm", "start_scatter"): GRADIENTS,
    ("weight_stream", "send"): GRADIENTS,
}
"""Module and function -> what the messages are for that it starts."""

HELD = {"start_all_gather": GATHERS, "start_reduce_scatter": GRADIENTS}
"""What is held back -> what for."""

OWN = "a block's own"
"""All other messages, but those of agreements."""

Event = tuple[str, str, tuple[str, ...]]
"""Of one message: "start" or "wait", what it is for, and the process groups that carry it."""


def purpose_of(block_id: int) -> str:
    """What the message is for that is started by whoever called this."""
    frame = sys._getframe()
    while frame is not None:
        of = Path(frame.f_code.co_filename).stem, frame.f_code.co_name
        if of == ("held", "begin"):  # what was held back, by its sender
            return HELD[frame.f_locals["start"].func.__name__]
        if of in SENDERS:
            return SENDERS[of]
        frame = frame.f_back
    return "agreement" if block_id == AGREEMENT else OWN


@contextmanager
def messages() -> Iterator[list[Event]]:
    """Into the list: every message that is started or waited for inside."""
    events: list[Event] = []
    start, wait, groups = collectives._start, Pending.wait, list[str]()
    of_message: dict[int, tuple[str, tuple[str, ...]]] = {}

    def started(what: str, x: Any, axis: Any, block_id: int, *args: Any, **kwargs: Any) -> Any:
        groups.clear()
        pending = start(what, x, axis, block_id, *args, **kwargs)
        of_message[id(pending)] = purpose_of(block_id), tuple(groups)
        events.append(("start", *of_message[id(pending)]))
        return pending

    def waited(pending: Pending) -> Any:
        if id(pending) in of_message:
            events.append(("wait", *of_message.pop(id(pending))))
        return wait(pending)

    def noted(send: Any) -> Any:
        def sent(*args: Any, group: Any, **kwargs: Any) -> Any:
            groups.append(group.group_name)
            return send(*args, group=group, **kwargs)

        return sent

    with pytest.MonkeyPatch.context() as to:
        to.setattr(collectives, "_start", started)
        to.setattr(Pending, "wait", waited)
        for name in ("all_to_all_single", "all_reduce", "broadcast", "reduce"):
            to.setattr(dist, name, noted(getattr(dist, name)))
        yield events


RING = ("megatron_cz",) * 4
PLANS = {
    "ring": RING,
    "mixed": ("ulysses_z", "megatron_ts", "metp", "colossal_z"),
    "ring again": tuple(f"{s}+recompute" for s in RING),
    "mixed again": ("ulysses_z+recompute", "megatron_ts", "metp", "colossal_z+recompute"),
}
"""Of the blocks of two layers; "again": in backward they are computed again."""


def messages_of_plans() -> dict[str, tuple[list[Event], list[Event]]]:
    """Plan -> what forward and what backward send, with whole messages and with such that go over
    two groups (``crossing.py``)."""
    import paradyse

    torch.manual_seed(0)
    model = paradyse.shard(Tiny())
    current = [Plan(RING)]
    options = {"plan": lambda workload: current[0], "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    ids, found = tokens(2, 11), {}
    for name, points in PLANS.items():
        current[0] = Plan(points)
        compiled(ids, ids).backward()
        for least in (crossing.CROSSING_BYTES, 1):
            with patch.object(crossing, "CROSSING_BYTES", least):
                with messages() as forward:
                    loss = compiled(ids, ids)
                with messages() as backward:
                    loss.backward()
            found[name if least > 1 else f"{name}, crossing"] = forward, backward
    return found


def carriers(events: list[Event]) -> dict[str, set[str]]:
    """What messages are for -> the process groups that carry them."""
    found: dict[str, set[str]] = {}
    for what, purpose, groups in events:
        if what == "start":
            found.setdefault(purpose, set()).update(groups)
    return found


def own_meanwhile(events: list[Event]) -> int:
    """How many messages of blocks start while weights are on their way."""
    coming = count = 0
    for what, purpose, _ in events:
        coming += {"start": 1, "wait": -1}[what] * (purpose == GATHERS)
        count += coming > 0 and (what, purpose) == ("start", OWN)
    return count


def starts(events: list[Event], purpose: str) -> int:
    return sum(event[:2] == ("start", purpose) for event in events)


def sent(found: dict[str, tuple[list[Event], list[Event]]]) -> dict[str, list[Event]]:
    """Plan -> the messages that are started, which all ranks do in one order. They may wait in
    another: under metp the rank that gets a gradient adds it to what is there."""
    return {name: [e for of in both for e in of if e[0] == "start"] for name, both in found.items()}


def test_weights_come_over_another_group_than_what_blocks_send(pool2: RankPool) -> None:
    first, second = pool2.run(messages_of_plans, timeout_s=60)
    assert sent(first) == sent(second) and len(first) == 2 * len(PLANS)
    lanes: dict[str, set[str]] = {}
    for plan, (forward, backward) in first.items():
        for phase, events in (("forward", forward), ("backward", backward)):
            found = carriers(events)
            wanted = {GATHERS, OWN} | ({GRADIENTS} if phase == "backward" else set())
            assert wanted <= found.keys(), (plan, phase)
            for purpose, groups in found.items():
                lanes.setdefault(purpose, set()).update(groups)
            # There is something to overtake: else one group would do.
            assert own_meanwhile(events), (plan, phase)
    for plan in PLANS:
        if plan.endswith(" again"):
            once = first[plan.removesuffix(" again")]
            assert starts(first[plan][1], OWN) > starts(once[1], OWN), plan
    of = {group: [p for p in lanes if group in lanes[p]] for group in set().union(*lanes.values())}
    assert all(len(purposes) == 1 for purposes in of.values()), of
    # Whole messages go over one group, crossing ones over two.
    assert {p: len(lanes[p]) for p in (GATHERS, GRADIENTS, OWN)} == dict.fromkeys(
        (GATHERS, GRADIENTS, OWN), 2
    )
