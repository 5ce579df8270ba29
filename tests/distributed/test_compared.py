"""Ranks that make a graph at different calls have compared the same at each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from models import VOCAB, make_batch, make_model
from test_replicas import make_mesh
from torch import nn

import paradyse
from paradyse.distributed.compared import Compared
from paradyse.mixed.ways import Group, MicroBatch, StepPlan, Way


def test_weights_are_compared_once_for_each_purpose() -> None:
    compared = Compared()
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    assert not compared.has("one", [first])
    assert compared.has("one", [first])
    assert not compared.has("one", [first, second])
    assert compared.has("one", [second])
    assert not compared.has("another", [second])
    assert compared.has("one", [])


def test_nothing_is_known_after_a_call_was_dropped() -> None:
    compared, weight = Compared(), nn.Parameter(torch.ones(2))
    compared.has("one", [weight])
    compared.since(0)
    assert compared.has("one", [weight])
    batch = compared.batch
    compared.since(1)
    assert not compared.has("one", [weight]) and compared.batch is not batch


def plan_of(*groups: range) -> StepPlan:
    """One micro-batch, a sequence for each of its groups."""
    made = (
        Group(Way(len(r), 0.0, 64, (64,), (1.0,)), (i,), r.start, 0.0) for i, r in enumerate(groups)
    )
    return StepPlan((MicroBatch(tuple(made)),))


def a_rank_that_has_seen_lengths() -> int:
    """The first rank trains alone, so that Dynamo makes its graph of both for all lengths at once;
    the second one's is made anew at another length. How many graphs a rank has made."""
    torch._dynamo.reset()
    model = make_model("llama", num_hidden_layers=1)
    mixed = paradyse.MixedModel(model, {"inner": "eager", "plan": "megatron_cz"})
    g = torch.Generator().manual_seed(0)
    data = [{"input_ids": torch.randint(3, VOCAB, (n,), generator=g)} for n in (9, 17, 30)]
    batches = paradyse.MixedBatches(data, tokens_per_step=64, ways=[Way(1, 0.0, 64, (64,), (1.0,))])
    for number, ranks in enumerate((range(1), range(2), range(2))):
        length = len(data[number]["input_ids"])
        for loss in mixed.losses(batches.arranged(plan_of(ranks), [number], [length])):
            loss.backward()
    return paradyse.stats(mixed).captures


def test_groups_whose_ranks_make_graphs_at_different_calls(pool2: RankPool) -> None:
    made = pool2.run(a_rank_that_has_seen_lengths, timeout_s=100)
    assert made == [2, 2]  # of one rank and of both, or of both twice


def lengths_that_stagger(sharded: bool) -> list[float]:
    """The second replica has another length, and so another graph, a call before the first one."""
    torch._dynamo.reset()
    mesh = make_mesh((2, 2))
    model = make_model("llama", num_hidden_layers=1)
    if sharded:
        paradyse.shard(model, mesh)
    options = {"mesh": mesh, "inner": "eager", "plan": "ulysses_z"}
    run = torch.compile(model, backend="paradyse", options=options)
    found = []
    for of in (9, 9), (9, 12), (12, 12):
        loss = run(**make_batch("plain", 2, of[dist.get_rank() // 2])).loss
        loss.backward()
        found.append(float(loss.detach()))
    return found


@pytest.mark.broad
@pytest.mark.parametrize("sharded", [False, True])
def test_replicas_that_make_graphs_at_different_calls(sharded: bool, pool4: RankPool) -> None:
    found: list[Any] = pool4.run(lengths_that_stagger, sharded, timeout_s=60)
    assert all(of == pytest.approx(found[0], rel=1e-6) for of in found), found
