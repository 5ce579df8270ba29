"""What optimizers hold is asked of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankFailure, run_ranks
from tiny import Tiny, tokens
from torch import nn

import paradyse
from paradyse.runtime.registry import captures_of
from paradyse.weights.optimizer_state import OptimizersSeen, state_bytes
from paradyse.weights.sharded_tensor import rows_here

STATES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), 0),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
    "AdamW": (torch.optim.AdamW, 2),
    "AMSGrad": (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
}
"""Name -> optimizer, and how many tensors it holds of a weight."""


def stepped(
    model: nn.Module, make: Callable[[Any], torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    model(tokens(2, 7), tokens(2, 7, seed=1)).backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", STATES)
def test_state_is_counted_by_weight(name: str) -> None:
    make, each = STATES[name]
    model = Tiny()
    next(model.parameters()).requires_grad_(False)
    weights = list(model.parameters())
    trained = sum(w.nbytes for w in weights if w.requires_grad)
    numbers = 8 * each * len(weights)  # such as Adam's count of steps
    assert 0 <= state_bytes(stepped(model, make), weights) - each * trained <= numbers


def test_a_weight_without_a_gradient_counts_as_the_others() -> None:
    used, unused = (nn.Parameter(torch.ones(64)) for _ in range(2))
    optimizer = torch.optim.SGD([used, unused], lr=0.1, momentum=0.9)
    used.sum().backward()
    optimizer.step()
    assert state_bytes(optimizer, [used, unused]) == 2 * used.nbytes


class OneEach(torch.optim.Optimizer):
    """Whose state of a weight is a tensor."""

    def step(self, closure: Any = None) -> None:
        for w in self.param_groups[0]["params"]:
            self.state[w] = torch.zeros_like(w)


def test_a_state_may_be_a_tensor() -> None:
    weights = [nn.Parameter(torch.ones(64)) for _ in range(2)]
    optimizer, seen = OneEach(weights, {}), OptimizersSeen(weights)
    optimizer.step()
    assert seen.add(optimizer) and state_bytes(optimizer, weights) == 2 * weights[0].nbytes


def test_optimizers_of_other_models_do_not_count() -> None:
    model, other = Tiny(), Tiny()
    seen = OptimizersSeen(list(model.parameters()))
    size = sum(w.nbytes for w in model.parameters())
    assert not seen.add(stepped(other, STATES["SGD"][0]))
    assert seen.static_bytes() == 4 * size
    optimizer = stepped(model, STATES["SGD"][0])
    assert seen.add(optimizer)
    assert not seen.add(optimizer)
    assert seen.static_bytes() == 2 * size


def static_bytes_of_ranks() -> tuple[int, int, int]:
    """On one rank: of its weights, and what plans count before and after a step of SGD."""
    model = Tiny()
    paradyse.shard(model)
    mine = sum(rows_here(w).nbytes for w in model.parameters())
    compiled: Any = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    compiled(tokens(2, 7), tokens(2, 7, seed=1)).backward()
    (graph,) = next(iter(captures_of(compiled))).graphs.values()
    planner = graph.choice.planner
    before = planner.static_bytes
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return mine, before, planner.static_bytes


@pytest.mark.broad
def test_ranks_plan_with_what_their_optimizer_holds() -> None:
    for mine, before, after in run_ranks(static_bytes_of_ranks, 2):
        assert (before, after) == (4 * mine, 2 * mine)


def step_on_one_rank() -> None:
    model = Tiny()
    compiled: Any = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    compiled(tokens(2, 7), tokens(2, 7, seed=1)).backward()
    if dist.get_rank():
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    compiled(tokens(2, 7), tokens(2, 7, seed=1))


@pytest.mark.broad
def test_an_optimizer_that_steps_on_one_rank_is_told_of() -> None:
    told = "optimizers have stepped: rank 0: 0, rank 1: 1. call optimizer.step"
    with pytest.raises(RankFailure, match=told):
        run_ranks(step_on_one_rank, 2, timeout_s=90)
