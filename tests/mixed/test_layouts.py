"""Another layout of groups every step: nothing is captured anew, and nothing grows."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from models import VOCAB, make_model

import paradyse
from paradyse.mixed.ways import Group, MicroBatch, StepPlan, Way
from paradyse.torch_private import num_process_groups

LENGTHS = [9, 17, 30]
"""Tokens of what groups are given, in turn."""
GROWTH_BYTES = 48 << 20
"""That the memory of a rank may grow by in the second half of the steps. Measured is noise of the
allocator; what is kept of each step would be far more."""


def layouts(num_ranks: int, seed: int) -> list[range]:
    """Ranks 0, 1, .. cut into groups of any degree, most ranks first."""
    rng, found, at = random.Random(seed), list[range](), 0
    most = num_ranks
    while at < num_ranks:
        most = rng.randint(1, min(most, num_ranks - at))
        found.append(range(at, at + most))
        at += most
    return found


def plan_of(num_ranks: int, seed: int) -> StepPlan:
    """One or two micro-batches, a sequence for each of their groups."""
    micros, sequences = [], 0
    for m in range(1 + seed % 2):
        groups = []
        for ranks in layouts(num_ranks, 2 * seed + m):
            way = Way(len(ranks), 0.0, 64, (64,), (1.0,))
            groups.append(Group(way, (sequences,), ranks.start, 0.0))
            sequences += 1
        micros.append(MicroBatch(tuple(groups)))
    return StepPlan(tuple(micros))


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def switch(steps: int, warm_up: int, sharded: bool = False) -> dict[str, Any]:
    """``steps`` steps, each with another layout: captures and process groups after ``warm_up`` and
    at the end, bytes at the half and at the end, and the layouts that there were."""
    torch._dynamo.reset()
    size = dist.get_world_size()
    model = make_model("llama", num_hidden_layers=1)
    if sharded:
        paradyse.shard(model)
    before = num_process_groups()
    mixed = paradyse.MixedModel(model, {"inner": "eager", "plan": "megatron_cz"})
    g = torch.Generator().manual_seed(0)
    data = [{"input_ids": torch.randint(3, VOCAB, (n,), generator=g)} for n in LENGTHS * size * 2]
    way = Way(1, 0.0, 64, (64,), (1.0,))
    batches = paradyse.MixedBatches(data, tokens_per_step=64, ways=[way])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen, found = set[str](), dict[str, Any]()
    for n in range(steps):
        plan = plan_of(size, n)
        num = sum(len(micro.groups) for micro in plan.micro_batches)
        indices = range(num)
        lengths = [len(data[i]["input_ids"]) for i in indices]
        seen.add(plan.in_words())
        step = batches.arranged(plan, indices, lengths)
        for loss in mixed.losses(step):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if n + 1 in (warm_up, steps):
            found[f"captures after {n + 1}"] = paradyse.stats(mixed).captures
            found[f"groups after {n + 1}"] = num_process_groups() - before
        if n + 1 in (steps // 2, steps):
            gc.collect()
            found[f"bytes after {n + 1}"] = resident_bytes()
    return {**found, "layouts": len(seen)}


def check(results: list[dict[str, Any]], steps: int, warm_up: int) -> None:
    for of in results:
        assert of["layouts"] > 2, of
        assert of[f"captures after {steps}"] == of[f"captures after {warm_up}"] > 1, of
        assert of[f"groups after {steps}"] == of[f"groups after {warm_up}"], of
        grown = of[f"bytes after {steps}"] - of[f"bytes after {steps // 2}"]
        assert grown < GROWTH_BYTES, of


@pytest.mark.slow
def test_thirty_steps_of_two_ranks(pool2: RankPool) -> None:
    check(pool2.run(switch, 30, 12, timeout_s=120), 30, 12)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_three_hundred_steps_of_four_ranks(sharded: bool, pool4: RankPool) -> None:
    """After warm-up each rank has been in a group of each degree, at each place that it can be."""
    check(pool4.run(switch, 300, 60, sharded, timeout_s=400), 300, 60)
