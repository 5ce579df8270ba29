"""A failure in one group of ranks ends the step of all groups, soon; then all are in step again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankFailure, RankPool, run_ranks
from models import VOCAB, make_model, relative, whole
from test_failures import BUG, NO_MEMORY, failing

import paradyse
from paradyse.distributed.axis import resolve_axis
from paradyse.distributed.collectives import CollectiveError
from paradyse.mixed.batches import MixedStep, Share
from paradyse.mixed.group_meshes import GroupMeshes
from paradyse.mixed.ways import StepPlan
from paradyse.runtime.frame import Frame

SOON_S = 10.0
"""In which others hear of a failure, on a machine that is busy with other tests."""

Groups = list[list[range]]
"""Of each micro-batch."""

BESIDE: dict[int, Groups] = {
    3: [[range(2), range(2, 3)], [range(3)]],
    4: [[range(2), range(2, 4)], [range(4)], [range(1), range(1, 2), range(2, 4)]],
}
"""By the number of ranks: groups side by side, of all, and of one rank."""


def step_of(groups: Groups) -> MixedStep:
    """A sequence of its own length for each group, in order."""
    axis = resolve_axis()
    everyone = [ranks for micro in groups for ranks in micro]
    meshes = axis.session.of(GroupMeshes)
    meshes.make(everyone, axis)
    meshes.make_sharing([ranks for ranks in everyone if len(ranks) < axis.size], axis)
    shares = []
    for i, ranks in enumerate(everyone):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(3, VOCAB, (1, 9 + i), generator=g)
        call = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(9 + i)[None]}
        if axis.rank in ranks:
            shares.append(Share(ranks, (call,), (8 + i,), (i,)))
    count = sum(8 + i for i in range(len(everyone)))
    return MixedStep(StepPlan(()), tuple(range(len(everyone))), tuple(shares), count)


class Loop:
    """Steps of groups beside each other."""

    def __init__(self, size: int, sharded: bool = False) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = make_model("llama", num_hidden_layers=1)
        if sharded:
            paradyse.shard(self.model)
        self.mixed = paradyse.MixedModel(self.model, {"inner": "eager", "plan": "megatron_cz"})
        self.plan = step_of(BESIDE[size])

    def step(self) -> dict[str, torch.Tensor]:
        """The gradients."""
        self.model.zero_grad()
        for loss in self.mixed.losses(self.plan):
            loss.backward()
        return {n: whole(p.grad) for n, p in self.model.named_parameters() if p.grad is not None}


@contextmanager
def slow_messages(seconds: float) -> Iterator[None]:
    """Inside, every step of a graph takes ``seconds`` longer: a long micro-batch."""
    run_step = Frame.run_step

    def run(self: Frame, step: Any, strategy: str) -> None:
        time.sleep(seconds)
        run_step(self, step, strategy)

    Frame.run_step = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        Frame.run_step = run_step  # type: ignore[method-assign]


def one_fails(
    rank: int, error: Exception, in_backward: bool, sharded: bool
) -> tuple[str, str, float, float]:
    """Kind and text of what is raised here, seconds until then, and how far the gradients of the
    step after it are off those of the step before."""
    loop = Loop(dist.get_world_size(), sharded)
    before = loop.step()
    fails, said, start = dist.get_rank() == rank, ("", ""), time.monotonic()
    try:
        with failing(1, error, in_backward) if fails else slow_messages(0.01):
            loop.step()
    except Exception as e:
        said = type(e).__name__, str(e)
    seconds = time.monotonic() - start
    dist.barrier()
    after = loop.step()
    return *said, seconds, max(relative(after[n], g) for n, g in before.items())


def check(results: list[tuple[str, str, float, float]], rank: int, kind: str) -> None:
    for i, (name, text, seconds, off) in enumerate(results):
        if i != rank:
            assert name == kind, results
            assert f"rank {rank} " in text and "in step" in text, results
        assert name and seconds < SOON_S and off < 1e-5, results


CASES = [
    pytest.param(3, 2, BUG, False, "RankFailedError", id="alone", marks=pytest.mark.slow),
    pytest.param(3, 2, BUG, True, "OutOfMemoryError", id="alone, back", marks=pytest.mark.slow),
    pytest.param(3, 0, BUG, False, "RankFailedError", id="of two", marks=pytest.mark.slow),
    pytest.param(3, 1, NO_MEMORY, True, "OutOfMemoryError", id="of two, backward"),
    pytest.param(4, 3, BUG, False, "RankFailedError", id="of four", marks=pytest.mark.slow),
    pytest.param(4, 2, NO_MEMORY, True, "OutOfMemoryError", id="memory", marks=pytest.mark.slow),
]


@pytest.mark.broad
@pytest.mark.parametrize(("size", "rank", "error", "in_backward", "kind"), CASES)
def test_all_hear_of_a_failure_in_one_group(
    size: int, rank: int, error: Exception, in_backward: bool, kind: str, ranks: Any
) -> None:
    """Also where that rank alone is in its group; the step after it is as the one before."""
    pool: RankPool = ranks(size)
    check(pool.run(one_fails, rank, error, in_backward, False, timeout_s=120), rank, kind)


SHARDED = [(3, 2, BUG, True), (3, 1, NO_MEMORY, False), (4, 0, NO_MEMORY, True)]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "rank", "error", "in_backward"), SHARDED)
def test_so_they_do_where_weights_are_gathered_over_all_groups(
    size: int, rank: int, error: Exception, in_backward: bool, ranks: Any
) -> None:
    """The message that others wait for is then as likely one of the weights."""
    results = ranks(size).run(one_fails, rank, error, in_backward, True, timeout_s=120)
    for name, text, seconds, off in results:
        assert name and text and seconds < SOON_S and off < 1e-5, results


def one_leaves_the_loop(who: tuple[int, ...], sharded: bool) -> tuple[str, str, float, float]:
    """The loop over the losses ends early on the ranks ``who``: kind and text of what is raised
    here, seconds until then, and how far the gradients of the step after it are off."""
    loop = Loop(dist.get_world_size(), sharded)
    before = loop.step()
    said, start = ("", ""), time.monotonic()
    try:
        loop.model.zero_grad()
        for loss in loop.mixed.losses(loop.plan):
            if dist.get_rank() in who:
                raise KeyError("of the loop")
            loss.backward()
    except Exception as e:
        said = type(e).__name__, str(e)
    seconds = time.monotonic() - start
    left = [p for p in loop.model.parameters() if p.grad is not None]
    dist.barrier()
    after = loop.step()
    off = max(relative(after[n], g) for n, g in before.items())
    return *said, seconds, off + len(left)


LEFT = [
    pytest.param(3, (2,), False, id="alone"),
    pytest.param(3, (0,), False, id="of two", marks=pytest.mark.slow),
    pytest.param(3, (1,), True, id="sharded"),
    pytest.param(4, (1, 2), False, id="two of four", marks=pytest.mark.slow),
    pytest.param(3, (0, 1, 2), False, id="all", marks=pytest.mark.slow),
    pytest.param(3, (0, 1, 2), True, id="all, sharded", marks=pytest.mark.slow),
]


@pytest.mark.broad
@pytest.mark.parametrize(("size", "who", "sharded"), LEFT)
def test_all_hear_of_a_loop_that_is_left(
    size: int, who: tuple[int, ...], sharded: bool, ranks: Any
) -> None:
    """What fails there is no error of the step: the generator is closed, as by ``break``."""
    results = ranks(size).run(one_leaves_the_loop, who, sharded, timeout_s=120)
    for rank, (name, text, seconds, off) in enumerate(results):
        assert seconds < SOON_S and off < 1e-5, results
        assert name == ("KeyError" if rank in who else "RankFailedError"), results
        told = [f"rank {r} failed in the loop over the losses of a step" for r in who]
        assert rank in who or any(t in text for t in told), results


def one_fails_before_its_call(rank: int) -> tuple[str, str, float]:
    """Rank ``rank`` fails where it has told nobody of its call, which others have begun: what is
    raised here, and how far the gradients of the next step are off."""
    loop = Loop(dist.get_world_size(), sharded=True)
    before, said = loop.step(), ("", "")

    def fail(*args: Any) -> None:
        raise BUG

    handle = loop.model.register_forward_pre_hook(fail) if dist.get_rank() == rank else None
    try:
        loop.step()
    except Exception as e:
        said = type(e).__name__, str(e)
    if handle is not None:
        handle.remove()
    dist.barrier()
    after = loop.step()
    return *said, max(relative(after[n], g) for n, g in before.items())


@pytest.mark.broad
def test_ranks_count_on_together_after_one_has_failed_before_its_call(pool3: RankPool) -> None:
    results = pool3.run(one_fails_before_its_call, 1, timeout_s=120)
    assert all(name and off < 1e-5 for name, _, off in results), results


def one_fails_in_the_sum(rank: int) -> tuple[str, str, float]:
    """Rank ``rank`` has no memory where the gradients of all ranks are summed; then a step is well.
    What is raised here, and how far gradients are off then."""
    loop = Loop(dist.get_world_size())
    before = loop.step()
    add_up, said = loop.mixed._sum, ("", "")

    def none(weights: Any) -> None:
        raise NO_MEMORY

    loop.mixed._sum = none if dist.get_rank() == rank else add_up  # type: ignore[method-assign]
    try:
        loop.step()
    except torch.OutOfMemoryError as e:
        said = type(e).__name__, str(e)
    loop.mixed._sum = add_up  # type: ignore[method-assign]
    after = loop.step()
    return *said, max(relative(after[n], g) for n, g in before.items())


@pytest.mark.slow
def test_all_hear_of_a_failure_where_gradients_are_summed(pool3: RankPool) -> None:
    results = pool3.run(one_fails_in_the_sum, 1, timeout_s=120)
    for rank, (name, text, off) in enumerate(results):
        assert name == "OutOfMemoryError" and off < 1e-5, results
        assert rank == 1 or "rank 1 ran out of memory in a step of MixedModel" in text, results


def while_others_compute(rank: int) -> tuple[str, float]:
    """Rank ``rank`` fails at once, the other group computes for half a minute: what it raises, and
    when."""
    loop = Loop(dist.get_world_size())
    loop.step()
    start, said = time.monotonic(), ""
    try:
        with failing(1, BUG) if dist.get_rank() == rank else slow_messages(3.0):
            loop.step()
    except Exception as e:
        said = type(e).__name__
    return said, time.monotonic() - start


@pytest.mark.slow
def test_a_group_that_computes_hears_at_its_next_message(pool3: RankPool) -> None:
    results = pool3.run(while_others_compute, 2, timeout_s=120)
    assert all(said and seconds < SOON_S for said, seconds in results), results


def one_is_killed(rank: int, folder: str, sharded: bool) -> None:
    """It is in a group of two; the other two are far from the end of their micro-batch."""
    loop = Loop(dist.get_world_size(), sharded)
    loop.step()
    start = time.monotonic()
    run_step = Frame.run_step

    def run(self: Frame, step: Any, strategy: str) -> None:
        if dist.get_rank() == rank and step.position == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.0 if dist.get_rank() in BESIDE[4][0][0] else 0.0)
        run_step(self, step, strategy)

    Frame.run_step = run  # type: ignore[method-assign]
    try:
        loop.step()
    except CollectiveError as e:
        seconds = time.monotonic() - start
        Path(folder, str(dist.get_rank())).write_text(f"{seconds} {type(e).__name__}: {e}")


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_all_hear_of_a_rank_that_is_killed(sharded: bool, tmp_path: Path) -> None:
    """Its group loses a message, and tells the others, which are in the middle of theirs, or, of
    weights that all gather, all lose one."""
    with pytest.raises(RankFailure):
        run_ranks(one_is_killed, 4, 3, str(tmp_path), sharded, timeout_s=90)
    said = {f.name: f.read_text() for f in tmp_path.iterdir()}
    assert said.keys() == {"0", "1", "2"}
    told = "has lost another one in a step of MixedModel" in said["0"] + said["1"]
    assert told or sharded, said
    assert all(float(text.split()[0]) < SOON_S for text in said.values()), said
