"""Under autocast blocks compute in another dtype than weights lie in: what plans count with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool
from models import make_batch, make_model
from test_planner import MACHINE, model

import paradyse
from paradyse.distributed.collectives import traffic
from paradyse.planning.costs import gradient_bytes
from paradyse.planning.prior import made_again, prior_cost
from paradyse.planning.profile_file import read_profile
from paradyse.profiling.steps import Steps
from paradyse.types import ATTENTION_STRATEGIES, Workload

NARROW = Workload(1, 2048, torch.bfloat16, True, 4)
CAST = replace(NARROW, weight_dtype=torch.float32)
"""Weights of float32 under autocast."""
PLANS = ("megatron_ts", "megatron_cz", "ulysses_z", "metp")


def steps_of(strategy: str) -> list[tuple[int, int]]:
    """Per block, what was sent in a step, and what it was predicted to send."""
    torch._dynamo.reset()
    options = {"inner": "eager", "strategies": [*ATTENTION_STRATEGIES], "splits": []}
    with torch.autocast("cpu", torch.bfloat16):
        steps = Steps(make_model("llama", torch.float32), options, 2, True, None)
        with steps.prepared():
            steps.find_blocks(64)
            steps.run(64, strategy)
            before = [sent(steps, i) for i in range(len(steps.blocks))]
            steps.run(64, strategy)
            after = [sent(steps, i) for i in range(len(steps.blocks))]
            workload = steps.workload(64)
            assert (workload.dtype, workload.weight_dtype) == (torch.bfloat16, torch.float32)
    points = [str(steps.point_of(b, strategy)) for b in steps.blocks]
    predicted = [
        prior_cost(b, point, workload, MACHINE).comm_bytes
        for b, point in zip(steps.blocks, points, strict=True)
    ]
    return [(b - a, p) for a, b, p in zip(before, after, predicted, strict=True)]


def sent(steps: Steps, block: int) -> int:
    ids = [i for i, part in steps.part_of.items() if part is steps.blocks[block]]
    return sum(sum(traffic(steps.axis, i).sent_bytes.values()) for i in ids)


@pytest.mark.parametrize("strategy", PLANS)
def test_bytes_are_those_that_are_sent(strategy: str, pool2: RankPool) -> None:
    for blocks in pool2.run(steps_of, strategy, timeout_s=60):
        for counted, predicted in blocks:
            assert counted == predicted > 0


def planned_for() -> tuple[list[Workload], str]:
    """What a function is asked for plans of, under autocast and without, and the report then."""
    torch._dynamo.reset()
    asked: list[Workload] = []

    def plan(workload: Workload) -> str:
        asked.append(workload)
        return "auto"

    compiled: Any = torch.compile(
        make_model("llama", torch.float32),
        backend="paradyse",
        options={"inner": "eager", "plan": plan},
    )
    batch = make_batch("plain", 2, 9)
    compiled(**batch)
    with torch.autocast("cpu", torch.bfloat16):
        compiled(**batch)
        report = str(paradyse.explain(compiled, 2, 9))
    return asked, report


def test_plans_are_chosen_for_what_blocks_compute_in(pool2: RankPool) -> None:
    for (plain, cast, *_), report in pool2.run(planned_for, timeout_s=60):
        assert (plain.dtype, plain.weight_dtype) == (torch.float32, None)
        assert (cast.dtype, cast.weight_dtype) == (torch.bfloat16, torch.float32)
        assert "measured on 2 ranks, cpu, torch.bfloat16" in report


def profiled(path: str) -> list[str]:
    torch._dynamo.reset()
    found = []
    for cast in (True, False):
        name, options = f"{path}-{cast}.jsonl", {"inner": "eager"}
        made = make_model("llama", torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            paradyse.profile(made, name, lengths=[8], options=options, strategies=["metp"])
            found.append(read_profile(name).header.dtype)
            options |= {"cost_model": name}
            compiled: Any = torch.compile(made, backend="paradyse", options=options)
            compiled(**make_batch("plain", 2, 9))
    with torch.autocast("cpu", torch.bfloat16):
        try:
            torch._dynamo.reset()
            torch.compile(made, backend="paradyse", options=options)(**make_batch("plain", 2, 9))
        except torch._dynamo.exc.BackendCompilerFailed as e:
            found.append(str(e))
    return found


def test_profiles_are_of_what_blocks_compute_in(pool2: RankPool, tmp_path: Path) -> None:
    for cast, plain, refused in pool2.run(profiled, str(tmp_path / "found"), timeout_s=100):
        assert (cast, plain) == ("bfloat16", "float32")
        assert "float32" in refused and "--dtype bfloat16" in refused


@pytest.mark.parametrize("strategy", PLANS)
@pytest.mark.parametrize("block", model(1), ids=lambda b: b.kind)
def test_weights_and_the_residual_stream_stay_wide(block: Any, strategy: str) -> None:
    n, tokens = block.num_weight_elements, NARROW.seq_len // 4
    narrow, cast = (prior_cost(block, strategy, w, MACHINE) for w in (NARROW, CAST))
    assert cast.left_bytes == 2 * narrow.left_bytes == gradient_bytes(block, CAST, False) == 4 * n
    copies = n * 2 if strategy != "megatron_ts" else n * 2 // 4
    assert cast.saved_bytes - narrow.saved_bytes == 2 * tokens * block.hidden * 2 + copies
    assert cast.time_s > narrow.time_s
    again = [made_again([replace(block, follows=True)], w)[0] for w in (NARROW, CAST)]
    assert again == [tokens * block.hidden * itemsize for itemsize in (2, 4)]
    sharded = [prior_cost(block, strategy, w, MACHINE, sharded=True) for w in (NARROW, CAST)]
    own = n * 2 // 4 if strategy == "megatron_ts" else 0
    stream = 2 * tokens * block.hidden * 2
    assert sharded[1].saved_bytes - sharded[0].saved_bytes == stream + own
    travels = strategy != "megatron_ts"  # gradients, in the dtype of weights
    assert (sharded[1].comm_bytes > sharded[0].comm_bytes) == travels
