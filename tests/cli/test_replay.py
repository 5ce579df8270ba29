"""What a replay times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from paradyse.cli import models, replay
from paradyse.cli.launch import Rank
from paradyse.cli.models import LlamaSize
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
