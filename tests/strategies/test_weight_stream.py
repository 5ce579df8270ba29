"""Weights that come group by group are on their way before a block asks for the first ones, in
forward and in backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import RankPool
from models import check, make_batch, make_model, run_step

from paradyse.distributed import collectives
from paradyse.distributed.axis import resolve_axis
from paradyse.distributed.lanes import Overlap
from paradyse.profiling.marks import Clock, SavedMemory, Watch, WatchedFrame
from paradyse.runtime.frame_maker import frames_by
from paradyse.strategies.weight_stream import GroupTensors, Streams, WeightStream
from paradyse.types import Plan
from paradyse.weights.coming_gradient import ComingGradient

METP = "metp"
PLANS = {
    "metp": (METP,) * 4,
    "metp again": ("metp+recompute",) * 4,
    "mixed": ("megatron_cz", METP, METP, "ulysses_z"),
}
"""Of the blocks of two layers."""


def streamed(
    family: str, points: tuple[str, ...], change: Callable[[Any], None] = lambda model: None
) -> dict[str, Any]:
    """Of one step of a model as ``change`` leaves it: per stream that a block takes whether it was
    on its way, in forward and in backward; which were on their way for nothing. Gradients are
    compared with those of one process, before and behind."""
    import paradyse

    reference, model = (make_model(family) for _ in range(2))
    for each in (reference, model):
        change(each)
    paradyse.shard(model)
    options = {"plan": lambda workload: Plan(points), "inner": "eager"}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    batch = make_batch("plain", 2, 11)
    check(run_step(compiled, model, batch), run_step(reference, reference, batch), what="first")
    taken: list[bool] = []
    dropped, last = list[int](), list[Streams]()
    take = Streams.take

    def note(streams: Streams, *of: Any) -> Any:
        coming, last[:] = streams._coming, [streams]
        stream = take(streams, *of)
        taken.append(stream is coming)
        if coming is not None and stream is not coming:
            dropped.append(coming.block_id)
        return stream

    with patch.object(Streams, "take", note):
        loss = compiled(**batch).loss
        forward = list(taken)
        loss.backward()
    check(run_step(compiled, model, batch), run_step(reference, reference, batch), what="then")
    left = last[0]._coming  # which nobody took
    found = {"forward": forward, "backward": taken[len(forward) :], "dropped": dropped}
    return found | {"left": left and left.block_id}


@pytest.mark.broad(but="metp again")
@pytest.mark.parametrize("plan", PLANS)
def test_a_block_s_first_weights_are_on_their_way(plan: str, pool2: RankPool) -> None:
    for found in pool2.run(streamed, "llama", PLANS[plan]):
        streams = PLANS[plan].count(METP) or 4
        assert len(found["forward"]) == streams and not found["dropped"]
        assert all(found["forward"])
        if plan == "metp again":  # a stream that runs again, and then the one of its backward
            assert found["backward"] == [False, False] + [True, False] * (streams - 1)
        else:
            assert found["backward"] == [False] + [True] * (streams - 1)


@pytest.mark.broad
def test_groups_of_unlike_sizes_on_four_ranks(pool4: RankPool) -> None:
    """Heads that four ranks cannot share evenly: every rank starts the same messages."""
    found = pool4.run(streamed, "llama_odd", PLANS["metp"])
    assert found == [found[0]] * 4 and not found[0]["dropped"]
    assert all(found[0]["forward"]) and found[0]["backward"] == [False, True, True, True]


def test_experts_stream_ahead_too(pool2: RankPool) -> None:
    for found in pool2.run(streamed, "mixtral", (METP,) * 4):
        assert all(found["forward"]) and found["backward"] == [False, True, True, True]
        assert not found["dropped"]


def each_at_once() -> dict[str, Any]:
    """``streamed`` where every message is waited for as it is sent."""
    with patch.object(resolve_axis().session.of(Overlap), "on", False):
        return streamed("llama", PLANS["metp"])


def test_without_overlap_nothing_is_ahead(pool2: RankPool) -> None:
    for found in pool2.run(each_at_once):
        assert not any(found["forward"] + found["backward"])


def frozen() -> dict[str, Any]:
    """``streamed`` of a model whose first layer is not trained."""

    def freeze(model: Any) -> None:
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)

    return streamed("llama", PLANS["metp"], freeze)


def test_nothing_is_fetched_for_blocks_that_have_no_backward(pool2: RankPool) -> None:
    for found in pool2.run(frozen):
        assert all(found["forward"]) and found["backward"] == [False, True]
        assert not found["dropped"] and found["left"] is None


def watched() -> list[bool]:
    """Whether streams are ahead where a step's times, and where its memory is watched."""
    import paradyse

    model, found = paradyse.shard(make_model("llama")), list[bool]()
    options = {"plan": lambda workload: Plan(PLANS["metp"]), "inner": "eager"}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    batch, take = make_batch("plain", 2, 11), Streams.take

    def note(streams: Streams, *of: Any, **how: Any) -> Any:
        found.append(streams.ahead)
        return take(streams, *of, **how)

    for probe in (Clock(torch.device("cpu")), SavedMemory([])):
        frames = frames_by(partial(WatchedFrame, Watch(probe)))
        with probe, frames, patch.object(Streams, "take", note):
            compiled(**batch).loss.backward()
    return found


def test_memory_is_watched_without_what_is_ahead(pool2: RankPool) -> None:
    """It would count for the block that runs meanwhile; the plan's own count has it."""
    assert pool2.run(watched) == [[True] * 8 + [False] * 8] * 2


class Steps:
    """Of a call whose second step has a stream."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def stream(self, position: int) -> WeightStream | None:
        return WeightStream([self.weight], [0, 1], 7, [None]) if position == 1 else None


def drop() -> tuple[bool, bool, bool]:
    """Whether rows that were on their way for another block have come when a block asks; whether
    the steps of a call go with it, and nothing is fetched then."""
    import paradyse

    weight = paradyse.shard(torch.nn.Linear(6, 4, bias=False)).weight
    steps, waited = Steps(weight), list[Any]()
    streams, wait = Streams(ahead=True, of_step=steps.stream), collectives.Pending.wait

    def note(pending: collectives.Pending) -> Any:
        waited.append(pending)
        return wait(pending)

    streams.begin_following()
    with patch.object(collectives.Pending, "wait", note):
        found = streams.take([weight], [0, 1], 2, [None], again=True)
    dropped, alive = len(waited) == 1 and found.block_id == 2, weakref.ref(steps)
    del steps
    streams.begin_following()
    return dropped, alive() is None, streams._coming is None


def test_a_stream_that_nobody_takes_is_waited_for(pool2: RankPool) -> None:
    assert pool2.run(drop) == [(True, True, True)] * 2


def left_under_way(family: str) -> list[tuple[int, bool, int]]:
    """Of each block's backward under metp: messages of gradients that it leaves under way, whether
    a gradient of this rank is one of them, and how many blocks' values such messages have kept
    alive so far. Gradients are compared with those of one
    process."""
    import paradyse

    reference, model = (make_model(family) for _ in range(2))
    paradyse.shard(model)
    options = {"plan": METP, "inner": "eager"}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    batch, found = make_batch("plain", 2, 11), list[tuple[int, bool, int]]()
    gradients, before = GroupTensors.gradients, list[weakref.ref[GroupTensors]]()

    def note(tensors: GroupTensors, nodes: Any) -> Any:
        alive = sum(of() is not None for of in before)
        out = gradients(tensors, nodes)
        coming = any(isinstance(x, ComingGradient) for x in out)
        found.append((len(tensors.sync._scatters), coming, alive))
        before.append(weakref.ref(tensors))
        return out

    want = run_step(reference, reference, batch)
    with patch.object(GroupTensors, "gradients", note):
        check(run_step(compiled, model, batch), want)
    # an optimizer has the rows of other layouts of these, in as many messages on every rank
    compiled(**batch).loss.backward()
    assert not any(getattr(p.grad, "is_alias", False) for p in model.parameters())
    return found


@pytest.mark.parametrize("family", ["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_the_last_group_s_gradients_are_under_way_behind_the_block(
    family: str, pool2: RankPool
) -> None:
    first, second = pool2.run(left_under_way, family, timeout_s=60)
    assert len(first) == len(second) == 4
    assert all(left == (1, False, 0) for left in first)
    assert all(left == (1, True, 0) for left in second)
