"""What a replay times."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from torch import Tensor

from paradyse.cli import models, replay
from paradyse.cli.launch import Rank
from paradyse.cli.models import LlamaSize
from paradyse.cli.results import Record, Results
from paradyse.cli.screen import Screen, make_console
from paradyse.runtime.frame import Frame
from paradyse.runtime.runs import FUSE_AFTER
from paradyse.strategies import base


def test_steps_that_compile_are_not_timed() -> None:
    clock, timing, compiled_then = [0.0], [False], [0]
    times, compile_function = list[float](), base.compile_function

    def slowly(*args: Any, **kwargs: Any) -> Any:
        clock[0] += 100.0
        compiled_then[0] += timing[0]
        return compile_function(*args, **kwargs)

    def report(event: Any) -> None:
        timing[0] |= isinstance(event, replay.Phase) and event.text == "timing"
        if isinstance(event, replay.Replayed):
            times.append(event.time_s)

    rank = Rank(0, 1, "cpu", report)
    model = models.make_llama(LlamaSize(hidden=32, layers=2, heads=2, kv_heads=2), 0)
    batch = replay.batch_of(torch.arange(16)[None], rank.device)
    with (
        patch.object(base, "compile_function", slowly),
        patch.object(
            replay, "time", SimpleNamespace(perf_counter=lambda: clock[0], monotonic=lambda: 0.0)
        ),
    ):
        replay.replay(rank, model, [(0, batch, "")], (), FUSE_AFTER + 4, {"inner": "aot_eager"})
    assert compiled_then[0] > 0, "blocks in a row were to be compiled meanwhile"
    assert times == [0.0] * (FUSE_AFTER + 4)


NO_MEMORY = torch.OutOfMemoryError("Tried to allocate 20.00 GiB")
SHORT_OF_MEMORY = {"metp": (2, False), "colossal_z": (3, True), "megatron_ts": (6, False)}
"""Strategy -> which of its steps has no memory on the last rank, and whether in backward: when it
is compiled for the longest, when memory is watched, and when it is timed."""


def replayed_without_memory() -> list[Any]:
    """What this rank reports."""
    reports: list[Any] = []
    steps: Counter[str] = Counter()
    now: list[bool] = []
    run_step, step = Frame.run_step, replay._Choices._step

    def fail(grad: Tensor) -> Tensor:
        raise NO_MEMORY

    def run(self: Frame, node: Any, strategy: str) -> None:
        if now == [False]:
            now.clear()
            raise NO_MEMORY
        run_step(self, node, strategy)
        for n in node.piece.outputs if now else ():
            if isinstance(x := self.env.get(n), Tensor) and x.requires_grad and now:
                x.register_hook(fail)
                now.clear()

    def count(self: Any, choice: str, batch: dict[str, Tensor], known: str) -> None:
        steps[choice] += 1
        at, in_backward = SHORT_OF_MEMORY.get(choice, (0, False))
        if steps[choice] == at and dist.get_rank() == 1:
            now.append(in_backward)
        step(self, choice, batch, known)

    place = Rank(dist.get_rank(), 2, "cpu", reports.append)
    size = LlamaSize(hidden=32, layers=1, heads=2, kv_heads=2)
    strategies = [*SHORT_OF_MEMORY, "megatron_cz"]
    with patch.object(Frame, "run_step", run), patch.object(replay._Choices, "_step", count):
        replay.bench(place, size, [24, 16], 0, {"inner": "eager"}, 2, strategies)
    assert not now
    return reports


@pytest.mark.broad
def test_a_strategy_that_runs_out_of_memory_is_left_out(pool2: RankPool) -> None:
    reports, _ = pool2.run(replayed_without_memory)
    record, screen = Record(), Screen(make_console(), 0)
    for value in reports:
        record.hear(screen, value)
    found = {i.choice: i.why for i in record.infeasible}
    assert found.keys() == SHORT_OF_MEMORY.keys()
    assert found["metp"] == "a rank runs out of memory at 24 tokens"
    assert record.choices() == ["auto", "megatron_cz"] and record.num_rounds() == 2
    assert {h.choice for h in record.held} == {"auto", "megatron_cz"}
    assert len(Results(record).tables()) == 2


def test_what_auto_has_no_memory_for_ends_the_replay() -> None:
    rank = Rank(0, 1, "cpu", lambda value: None)
    model = models.make_llama(LlamaSize(hidden=32, layers=1, heads=2, kv_heads=2), 0)
    batch = replay.batch_of(torch.arange(16)[None], rank.device)
    with (
        patch.object(replay._Choices, "_step", side_effect=NO_MEMORY),
        pytest.raises(torch.OutOfMemoryError),
    ):
        replay.replay(rank, model, [(0, batch, "")], (), 1, {"inner": "eager"})
