"""Messages that start behind a block's own: when, in which order, and where none comes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from harness import RankPool
from tiny import Tiny, tokens

from paradyse.distributed import collectives
from paradyse.distributed.axis import resolve_axis
from paradyse.distributed.collectives import MACHINE, Pending, Started, traffic
from paradyse.distributed.held import Held, forget_held, hold, start_held
from paradyse.distributed.lanes import GATHERS, lane_of
from paradyse.types import Plan


def turns() -> list[Any]:
    """How many messages have started, and what came, step by step."""
    axis = resolve_axis()
    started = axis.session.of(Started)
    before, seen = started.count, list[Any]()

    def held(number: int) -> Held:
        x = torch.tensor([10.0 * number + axis.rank])
        return hold(lambda: collectives.ring_exchange(x, axis, MACHINE), axis)

    first, second = held(1), held(2)
    seen.append(started.count - before)
    start_held(axis)
    seen.append(started.count - before)
    seen += [float(m.wait()) for m in (first, second)]
    third, fourth = held(3), held(4)
    seen += [float(fourth.wait()), started.count - before]  # out of turn: it is asked for
    forget_held(axis)
    start_held(axis)
    seen += [started.count - before, float(third.wait()), float(third.wait())]
    return seen


def test_they_start_in_their_turn_or_when_they_are_asked_for(pool2: RankPool) -> None:
    for rank, seen in enumerate(pool2.run(turns, timeout_s=20)):
        came = 1 - rank
        assert seen == [0, 2, 10 + came, 20 + came, 40 + came, 3, 3, 30 + came, 30 + came]


def starts_once() -> tuple[int, str]:
    axis, asked = resolve_axis(), list[int]()

    def fail() -> Pending:
        asked.append(1)
        raise RuntimeError("no link")

    held = hold(fail, axis)
    with pytest.raises(RuntimeError, match="no link"):
        start_held(axis)
    with pytest.raises(AssertionError, match="failed to start"):
        held.wait()
    start_held(axis)
    return len(asked), ""


def test_one_that_failed_to_start_does_not_try_again(pool2: RankPool) -> None:
    assert pool2.run(starts_once, timeout_s=20) == [(1, "")] * 2


Event = tuple[str, str, str]
"""Of one message: "start" or "wait"; its lane, "" for a block's own; the block."""


@contextmanager
def messages() -> Iterator[list[Event]]:
    """Into the list: every message that starts or is waited for inside."""
    events: list[Event] = []
    start, wait, of = collectives._start, Pending.wait, dict[int, tuple[str, str]]()

    def started(what: str, x: Any, axis: Any, block_id: int, *args: Any, **kwargs: Any) -> Any:
        pending = start(what, x, axis, block_id, *args, **kwargs)
        of[id(pending)] = axis.lane, traffic(axis, block_id).name
        events.append(("start", *of[id(pending)]))
        return pending

    def waited(pending: Pending) -> Any:
        if id(pending) in of:
            events.append(("wait", *of.pop(id(pending))))
        return wait(pending)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_start", started)
        patch.setattr(Pending, "wait", waited)
        yield events


def steps(attention: str, mlp: str) -> tuple[list[Event], list[Event]]:
    """What forward and what backward send."""
    import paradyse

    torch.manual_seed(0)
    model = paradyse.shard(Tiny())
    options = {"plan": lambda workload: Plan((attention, mlp) * 2), "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    ids = tokens(2, 11)
    compiled(ids, ids).backward()
    model.zero_grad()  # what a gradient is added to waits for it
    with messages() as forward:
        loss = compiled(ids, ids)
    with messages() as backward:
        loss.backward()
    return forward, backward


def own_before(events: list[Event], event: Event, block: str) -> list[str]:
    """What of its own messages ``block`` has done before ``event``, which is there once."""
    assert events.count(event) == 1, (event, events)
    before = events[: events.index(event)]
    return [what for what, lane, of in before if (lane, of) == ("", block)]


@pytest.mark.parametrize(
    ("attention", "mlp", "own", "weights"),
    [
        ("megatron_ts", "megatron_cz", "layers.1.attention", "layers.1.mlp"),
        ("megatron_cz", "megatron_ts+recompute", "layers.0.mlp", "layers.1.attention"),
        ("ulysses_z", "megatron_cz", "layers.1.attention", "layers.1.mlp"),
    ],
    ids=["megatron_ts", "recompute", "ulysses_z"],
)
def test_weights_start_behind_the_first_message_of_a_block(
    attention: str, mlp: str, own: str, weights: str, pool2: RankPool
) -> None:
    """They would make it come later, and it is waited for."""
    for forward, _ in pool2.run(steps, attention, mlp, timeout_s=60):
        assert own_before(forward, ("start", "weights", weights), own) == ["start", "wait"]
        assert forward.count(("start", "", own)) == 2  # it gathers and scatters


def test_weights_that_backward_needs_next_start_behind_that_message_too(pool2: RankPool) -> None:
    for _, backward in pool2.run(steps, "ulysses_z", "megatron_cz", timeout_s=60):
        own, at = "layers.1.attention", ("start", "weights", "layers.0.mlp")
        assert own_before(backward, at, own) == ["start", "wait"]


@pytest.mark.parametrize(
    ("attention", "mlp", "own", "weights"),
    [
        ("megatron_ts", "megatron_cz", "layers.0.attention", "layers.0.mlp"),
        ("ulysses_z", "megatron_ts", "layers.0.mlp", "layers.1.attention"),
    ],
    ids=["megatron_ts", "ulysses_z"],
)
def test_so_they_do_on_three_ranks(
    attention: str, mlp: str, own: str, weights: str, pool3: RankPool
) -> None:
    """That share neither heads nor tokens evenly."""
    for forward, _ in pool3.run(steps, attention, mlp, timeout_s=60):
        assert own_before(forward, ("start", "weights", weights), own) == ["start", "wait"]


def test_those_of_blocks_without_such_a_message_start_at_once(pool2: RankPool) -> None:
    for forward, _ in pool2.run(steps, "megatron_cz", "megatron_cz", timeout_s=60):
        assert not own_before(forward, ("start", "weights", "layers.1.mlp"), "layers.1.attention")


def hooked_on_one_rank() -> list[int]:
    """How often the hook was called, and the steps that came to their end."""
    import paradyse

    torch.manual_seed(0)
    model = paradyse.shard(Tiny())
    options = {"plan": "ulysses_z", "inner": "eager"}
    compiled, called, ids = torch.compile(model, backend="paradyse", options=options), [0], None
    if resolve_axis().rank == 0:
        weight = model.layers[1]["up"].weight
        weight.register_post_accumulate_grad_hook(lambda p: called.append(1))
    ids = tokens(2, 11)
    for _ in range(2):
        model.zero_grad()
        compiled(ids, ids).backward()
        called[0] += 1
    return [sum(called[1:]), called[0]]


def test_a_hook_on_one_rank_alone_is_no_deadlock(pool2: RankPool) -> None:
    """It waits for its gradient at once; the others are to have sent theirs."""
    assert pool2.run(hooked_on_one_rank, timeout_s=60) == [[2, 2], [0, 2]]


def after_one_that_failed() -> list[list[float]]:
    """Gradients of a call whose backward comes after another call has failed, on one rank before
    and on the other after it has held weights back; and of the same where none has."""
    import paradyse

    torch.manual_seed(0)
    model = paradyse.shard(Tiny())
    options = {"plan": "ulysses_z", "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    ids, axis, found = tokens(2, 11), resolve_axis(), []
    for fails in (False, True):
        model.zero_grad()
        loss = compiled(ids, ids)
        if fails and axis.rank == 1:
            stale = torch.ones(3), lane_of(axis, GATHERS), MACHINE
            hold(partial(collectives.start_all_gather, *stale), axis)
        loss.backward()
        found.append([float(p.grad.full_tensor().double().norm()) for p in model.parameters()])
    return found


def test_what_a_failed_call_has_held_back_is_not_sent_by_another(pool2: RankPool) -> None:
    for alone, behind_a_failure in pool2.run(after_one_that_failed, timeout_s=60):
        assert alone == behind_a_failure
