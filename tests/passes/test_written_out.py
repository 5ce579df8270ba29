"""Attention as models write it out: blocks under every strategy, with one process's gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import RankPool
from models import DRAWS_AT_LAYERS, check, draws_at_layers, make_batch, run_step
from plans import PLANS, blocks_of, choose
from written_out import BY_HAND, HUGGING_FACE, make

import paradyse

S = 13
LEVERS = ("megatron_cz+selective", "ulysses_z+chunked")


def train(name: str, dtype: torch.dtype, plans: tuple[str, ...]) -> list[str]:
    """What is understood of the masks; loss and every gradient under each of ``plans``."""
    torch._dynamo.reset()
    model = make(name).to(dtype)
    batch, current = make_batch("plain", 2, S), list[Any](["ulysses_z"])
    options = {"plan": lambda workload: current[0], "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)

    def loss_of(out: Any) -> Any:
        return out if isinstance(out, torch.Tensor) else out.loss

    want = run_step(model, model, batch, loss_of)
    run_step(compiled, model, batch, loss_of)
    blocks = blocks_of(compiled)
    attentions = [b for b in blocks if b.kind == "attention"]
    for plan in plans:
        assert not any(plan in b.infeasible for b in attentions), (plan, attentions[0].infeasible)
        current[0] = choose(plan, blocks)
        check(run_step(compiled, model, batch, loss_of), want, dtype, f"{name} {plan}")
    notes = str(paradyse.explain(compiled, 2, S))
    assert "written out" not in notes and "dense" not in notes
    return [str(b.mask) for b in attentions]


@pytest.mark.broad(but="alibi")
@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str, pool2: RankPool) -> None:
    mask = [BY_HAND[name][1]] * 2
    assert pool2.run(train, name, torch.float64, PLANS + LEVERS, timeout_s=200) == [mask] * 2


@pytest.mark.broad(but="mpnet")
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_families(name: str, pool2: RankPool) -> None:
    if name == "xglm" and draws_at_layers():
        pytest.skip(DRAWS_AT_LAYERS)
    masks = list(HUGGING_FACE[name][1])
    assert pool2.run(train, name, torch.float32, PLANS, timeout_s=200) == [masks] * 2
