"""One rank runs out of memory: all raise alike within seconds, and the loop goes on in step."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, run_ranks
from models import make_batch, make_model, relative, whole
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import paradyse
from paradyse.distributed import collectives
from paradyse.distributed.axis import SINGLE
from paradyse.distributed.collectives import CollectiveError, Message, Pending, Started
from paradyse.distributed.failures import RankFailedError, catch_up
from paradyse.distributed.lanes import GATHERS, GRADIENTS
from paradyse.runtime import frame
from paradyse.runtime.frame import Frame
from paradyse.runtime.registry import captures_of
from paradyse.torch_private import at_end_of_backward
from paradyse.weights import gradients

SOON_S = 10.0

NO_MEMORY = torch.OutOfMemoryError("Tried to allocate 20.00 GiB")
BUG = ZeroDivisionError("division by zero")
CPU_ALLOCATOR = RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: not enough")


class FailInBackward(torch.autograd.Function):
    """An identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ctx.error


@contextmanager
def failing(at: int, error: Exception | None, in_backward: bool = False) -> Iterator[None]:
    """Inside, step number ``at`` of every frame raises ``error``, once."""
    left = [error] if error is not None else []
    run_step = Frame.run_step

    def run(self: Frame, step: Any, strategy: str) -> None:
        here = step.position == at and left
        if here and not in_backward:
            raise left.pop()
        run_step(self, step, strategy)
        if here and torch.is_grad_enabled():
            for n in step.piece.outputs:
                if isinstance(x := self.env.get(n), Tensor) and x.requires_grad:
                    self.env[n] = FailInBackward.apply(x, left.pop())
                    return

    Frame.run_step = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        Frame.run_step = run_step  # type: ignore[method-assign]


class LetGo:
    """A callback that tells when it is let go of."""

    def __init__(self, order: list[str]) -> None:
        self.order = order

    def __call__(self) -> None:
        self.order.append("end")

    def __del__(self) -> None:
        self.order.append("let go")


def test_a_backward_that_fails_lets_go_of_its_callbacks_at_once() -> None:
    order: list[str] = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            at_end_of_backward(LetGo(order))
            raise torch.OutOfMemoryError("none")

    loss = Node.apply(torch.ones(2, requires_grad=True).exp()).sum()
    with pytest.raises(torch.OutOfMemoryError):
        try:
            loss.backward()
        finally:
            order.append("raised")
    assert order == ["let go", "raised"]


class Loop:
    """Training beside one process; the last rank fails."""

    def __init__(self, sharded: bool, **options: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.reference = make_model("llama", num_hidden_layers=2)
        self.model = make_model("llama", num_hidden_layers=2)
        self.model.load_state_dict(self.reference.state_dict())
        if sharded:
            paradyse.shard(self.model, options.get("mesh"))
        options = {"inner": "eager", "plan": "megatron_ts", **options}
        self.compiled: Any = torch.compile(self.model, backend="paradyse", options=options)
        self.fails = dist.get_rank() == dist.get_world_size() - 1
        self.batch = make_batch("plain", 2, 12)

    def step(self) -> None:
        self.compiled(**self.batch).loss.backward()

    def steps(self) -> list[int]:
        """The first step, those of all blocks, and the last."""
        (graph,) = (g for c in captures_of(self.compiled) for g in c.graphs.values())
        blocks = (s.position for s in graph.program.block_steps)
        return sorted({0, *blocks, len(graph.program.steps) - 1})

    def is_exact(self) -> bool:
        for model in (self.model, self.reference):
            model.zero_grad()
        self.reference(**self.batch).loss.backward()
        self.step()
        got = {n: whole(p.grad) for n, p in self.model.named_parameters()}
        return all(relative(got[n], p.grad) < 1e-4 for n, p in self.reference.named_parameters())


def told(
    loop: Loop, at: int, error: Exception, in_backward: bool, raised: type[Exception]
) -> tuple[str, str]:
    """The name and the text of what this rank hears; then it is in step with the others."""
    loop.model.zero_grad()
    dist.barrier()
    start = time.monotonic()
    with failing(at, error if loop.fails else None, in_backward), pytest.raises(raised) as heard:
        loop.step()
    assert time.monotonic() - start < SOON_S
    assert all(p.grad is None for p in loop.model.parameters())
    name, text = type(heard.value).__name__, str(heard.value)
    del heard
    assert loop.is_exact()
    return name, text


def run_out(sharded: bool, in_backward: bool) -> list[tuple[str, str]]:
    loop = Loop(sharded)
    for _ in range(2):
        loop.step()
    places = loop.steps()[1:] if in_backward else loop.steps()
    return [told(loop, at, NO_MEMORY, in_backward, torch.OutOfMemoryError) for at in places]


WHOLE_OR_SHARDED = [pytest.param(False, marks=pytest.mark.slow), True]


@pytest.mark.parametrize("sharded", WHOLE_OR_SHARDED)
def test_in_forward(sharded: bool, pool2: RankPool) -> None:
    first, second = pool2.run(run_out, sharded, False)
    assert first == second
    for name, text in first:
        assert name == "OutOfMemoryError"
        assert re.search(
            r"rank 1 ran out of memory in forward of training call \d+.*Tried to allocate 20", text
        ), text
    assert any("mlp' (megatron_ts)" in text for _, text in first), first


@pytest.mark.broad
@pytest.mark.parametrize("sharded", WHOLE_OR_SHARDED)
def test_in_backward(sharded: bool, pool2: RankPool) -> None:
    """The rank itself hears what its operator raised; the others hear of it."""
    first, second = pool2.run(run_out, sharded, True)
    for (_, heard), (_, own) in zip(first, second, strict=True):
        assert re.search(r"rank 1 ran out of memory in backward of training call \d+", heard), heard
        assert "Tried to allocate" in own


def failed_out_of_step() -> tuple[str, bool]:
    """What this rank hears of a call with other lengths in which a rank fails ahead of its first
    message; and whether the next call, in which it waits for the other one, is exact."""
    loop, run_step = Loop(False), Frame.run_step
    batches = [make_batch("plain", 2, n) for n in (12, 15)]
    for batch in batches:  # so that a plan for each length is known
        loop.compiled(**batch).loss.backward()
    longer = batches[loop.fails]
    with failing(0, BUG if loop.fails else None), pytest.raises(ValueError) as heard:
        loop.compiled(**longer).loss.backward()

    def late(self: Frame, step: Any, strategy: str) -> None:
        time.sleep(0.5 if step.position and not loop.fails else 0.0)
        run_step(self, step, strategy)

    with patch.object(Frame, "run_step", late):
        return str(heard.value), loop.is_exact()


def test_where_ranks_were_out_of_step_already(pool2: RankPool) -> None:
    for text, exact in pool2.run(failed_out_of_step):
        assert "rank 0" in text and "12" in text and "15" in text
        assert exact


def run_out_on_all_lanes(sharded: bool) -> tuple[str, list[tuple[str, str]]]:
    """Lanes on which this rank has a message that it has not waited for when it hears of the
    failure, and what it hears; gradients are sent as soon as there are any."""
    under_way: list[Pending] = []
    start = collectives._start

    def started(*args: Any, **kwargs: Any) -> Pending:
        under_way.append(start(*args, **kwargs))
        return under_way[-1]

    with patch.object(gradients, "TOGETHER_BYTES", 1):
        loop = Loop(sharded, plan="megatron_cz")
        for _ in range(2):
            loop.step()
        heard, lanes = [], set[str]()
        for at in loop.steps()[2:-1]:
            with patch.object(collectives, "_start", started):
                loop.model.zero_grad()
                with failing(at, NO_MEMORY if loop.fails else None, True):
                    with pytest.raises(torch.OutOfMemoryError) as raised:
                        loop.step()
            lanes |= {p._context[1].lane for p in under_way if p._works}
            under_way.clear()
            heard.append((type(raised.value).__name__, str(raised.value)))
            del raised
            assert all(p.grad is None for p in loop.model.parameters())
            assert loop.is_exact()
    return ", ".join(sorted(lanes)), heard


@pytest.mark.broad(but="False")
@pytest.mark.parametrize("sharded", [False, True])
def test_while_messages_of_weights_are_under_way(sharded: bool, pool2: RankPool) -> None:
    first, second = pool2.run(run_out_on_all_lanes, sharded)
    for lanes, heard in (first, second):
        assert GRADIENTS in lanes and (GATHERS in lanes or not sharded), lanes
        assert len(heard) >= 2
    assert all("rank 1 ran out of memory in backward" in text for _, text in first[1])


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("in_backward", [False, True])
def test_three_ranks(sharded: bool, in_backward: bool, pool3: RankPool) -> None:
    for heard in zip(*pool3.run(run_out, sharded, in_backward), strict=True):
        assert all("rank 2 ran out of memory" in text for _, text in heard[:2]), heard


def other_errors(error: Exception) -> list[str]:
    loop = Loop(True)
    loop.step()
    raised = type(error) if loop.fails else RankFailedError
    return [told(loop, 2, error, False, raised)[1]]


def test_another_error_of_one_rank_is_told_to_the_others(pool2: RankPool) -> None:
    (first,), (second,) = pool2.run(other_errors, BUG)
    assert re.search("rank 1 failed in forward of .*ZeroDivisionError: division by zero", first)
    assert second == "division by zero"


def allocator() -> list[str]:
    loop = Loop(False)
    loop.step()
    return [told(loop, 2, CPU_ALLOCATOR, False, torch.OutOfMemoryError)[1]]


def test_what_the_cpu_allocator_raises_is_out_of_memory(pool2: RankPool) -> None:
    (first,), (second,) = pool2.run(allocator)
    assert first == second and "rank 1 ran out of memory" in first


def fill_memory() -> list[Tensor]:
    """All memory that the process may have, but for small pieces: what forward let go of would
    suffice for backward."""
    held: list[Tensor] = []
    for num_bytes in (1 << 20, 1 << 18):
        with suppress(RuntimeError):
            while True:
                held.append(torch.empty(num_bytes, dtype=torch.uint8))
    return held


def under_a_real_limit(in_backward: bool) -> tuple[str, str]:
    """One process may map some MiB more than it has; a longer batch needs more."""
    loop = Loop(True)
    short = loop.batch
    for length in (12, 64, 256):  # what there is to compile is compiled
        loop.batch = make_batch("plain", 4, length)
        loop.step()
    loop.batch = make_batch("plain", 4, 4096)
    loss = loop.compiled(**loop.batch).loss if in_backward else None
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if loop.fails:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (8 << 20), hard))
    filling = fill_memory() if loop.fails and in_backward else []
    with pytest.raises(RuntimeError) as heard:
        loop.compiled(**loop.batch) if loss is None else loss.backward()
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    name, text = type(heard.value).__name__, str(heard.value)
    del heard, loss, filling
    loop.batch = short
    assert loop.is_exact()
    return name, text


@pytest.mark.slow
@pytest.mark.parametrize("in_backward", [False, True])
def test_the_memory_of_a_process_is_at_its_end(in_backward: bool) -> None:
    first, second = run_ranks(under_a_real_limit, 2, in_backward)
    assert first[0] == "OutOfMemoryError" and "rank 1 ran out of memory in" in first[1]
    assert "DefaultCPUAllocator" in second[1]


def no_memory_for_messages(in_backward: bool) -> bool:
    """Whether the loop goes on in step; the plan is the planner's to change."""
    loop = Loop(True, plan="auto", strategies=["megatron_cz", "metp"])
    loop.step()
    take_part, left = Message.take_part, [NO_MEMORY] if loop.fails else []

    def fail_once(self: Message, axis: Any) -> None:
        if left:
            raise left.pop()
        take_part(self, axis)

    error = NO_MEMORY if loop.fails else None
    loop.model.zero_grad()
    with patch.object(Message, "take_part", fail_once), failing(2, error, in_backward):
        with pytest.raises(RuntimeError) as heard:
            loop.step()
        if not in_backward:
            assert isinstance(heard.value, CollectiveError)
            with pytest.raises(CollectiveError, match="out of step"):
                loop.step()
            return False
        del heard
        return loop.is_exact()


@pytest.mark.broad
@pytest.mark.parametrize("in_backward", [pytest.param(False, marks=pytest.mark.slow), True])
def test_no_memory_even_for_the_messages_under_way(in_backward: bool) -> None:
    """In backward the others wait until the caller has let go of the graph; else all give up."""
    assert run_ranks(no_memory_for_messages, 2, in_backward) == [in_backward] * 2


def retried(retry: bool) -> tuple[list[str], bool]:
    """The plans of the steps before and after, and whether an error was raised."""
    options = {"strategies": ["megatron_cz", "metp"], "splits": [], "retry_out_of_memory": retry}
    loop = Loop(False, plan="auto", **options)
    plans, raised = [], False
    for at in (None, 2, None):
        loop.model.zero_grad()
        error = NO_MEMORY if at is not None and loop.fails else None
        try:
            with failing(2, error):
                loop.step()
        except torch.OutOfMemoryError:
            raised = True
        plans.append(paradyse.stats(loop.compiled).plan_per_length[12])
    assert loop.is_exact()
    return plans, raised


@pytest.mark.broad(but="False")
@pytest.mark.parametrize("retry", [False, True])
def test_a_forward_is_run_again_by_the_smallest_plan(retry: bool, pool2: RankPool) -> None:
    first, second = pool2.run(retried, retry)
    assert first == second
    (before, _, after), raised = first
    assert raised is not retry
    assert "megatron_cz" in before and "metp" in after and before != after


def after_the_last_message() -> str:
    """Where an error is heard; the other rank has its loss by then, and nothing is run again."""
    loop = Loop(False, plan="auto", strategies=["megatron_cz", "metp"])
    loop.step()
    loop.model.zero_grad()
    result, left, where = Frame.result, [NO_MEMORY] if loop.fails else [], "forward"

    def fail_once(self: Frame, node: Any) -> Any:
        out = result(self, node)
        if left:
            raise left.pop()
        return out

    with patch.object(Frame, "result", fail_once), pytest.raises(torch.OutOfMemoryError) as heard:
        loss = loop.compiled(**loop.batch).loss
        where = "backward"
        loss.backward()
    assert "rank 1 ran out of memory in forward of training call" in str(heard.value)
    del heard
    assert all(p.grad is None for p in loop.model.parameters())
    assert loop.is_exact()
    return where


@pytest.mark.broad
def test_after_the_last_message_others_hear_in_backward(pool2: RankPool) -> None:
    assert pool2.run(after_the_last_message) == ["backward", "forward"]


def accumulate() -> bool:
    """Gradients of the batch before are kept where they were whole."""
    loop = Loop(True, plan="auto", strategies=["megatron_cz", "metp"])
    loop.step()
    with failing(2, NO_MEMORY if loop.fails else None):
        loop.step()  # run again
    loop.reference(**loop.batch).loss.backward()
    loop.reference(**loop.batch).loss.backward()
    got = {n: whole(p.grad) for n, p in loop.model.named_parameters()}
    return all(relative(got[n], p.grad) < 1e-4 for n, p in loop.reference.named_parameters())


@pytest.mark.broad
def test_gradients_accumulate_over_a_forward_that_is_run_again(pool2: RankPool) -> None:
    assert pool2.run(accumulate) == [True, True]


def read_late() -> str:
    loop = Loop(True)
    out = loop.compiled(**loop.batch)
    gather = frame.GatherTokens.apply

    def fail(*args: Any) -> Any:
        raise NO_MEMORY

    if loop.fails:
        frame.GatherTokens.apply = fail  # type: ignore[method-assign]
    try:
        with pytest.raises(torch.OutOfMemoryError) as heard:
            str(out.logits)
    finally:
        frame.GatherTokens.apply = gather  # type: ignore[method-assign]
    text = str(heard.value)
    assert loop.is_exact()
    return text


@pytest.mark.broad
def test_in_a_late_read(pool2: RankPool) -> None:
    first, second = pool2.run(read_late)
    assert first == second
    assert re.search("rank 1 ran out of memory in the read of the output .* of training", first)
    assert " out of memory." in first  # by which accelerate knows it


def on_replicas() -> list[str]:
    """What is heard of failures in forward and in backward, on two meshes of the same ranks: the
    calls on one must not hear what happens on the other."""
    found = []
    for in_backward in (False, True):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
        loop = Loop(True, mesh=mesh)
        loop.step()
        found.append(told(loop, 3, NO_MEMORY, in_backward, torch.OutOfMemoryError)[1])
    return found


@pytest.mark.slow
def test_every_replica_hears_of_it_on_every_mesh(pool4: RankPool) -> None:
    for heard in pool4.run(on_replicas, timeout_s=120)[:3]:
        assert all("rank 3 ran out of memory" in text for text in heard), heard


def test_who_is_behind_by_more_than_is_remembered_does_not_take_part_in_some() -> None:
    """Those would meet other messages."""
    taken = list[Message]()
    message = Message("all_gather", (2,), torch.float32, "cpu")
    count = SINGLE.session.of(Started).count
    with patch.object(Message, "take_part", lambda self, axis: taken.append(self)):
        catch_up(SINGLE, [{SINGLE.name: (count, [])}, {SINGLE.name: (count + 2, [message] * 3)}])
        assert len(taken) == 2
        with pytest.raises(CollectiveError, match="4 messages behind, and the latest 3 are known"):
            catch_up(SINGLE, [{SINGLE.name: (count + 4, [message] * 3)}])
    assert len(taken) == 2
