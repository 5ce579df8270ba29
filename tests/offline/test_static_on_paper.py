"""Weights, gradients and moments of a rank that is not there: what one that is there holds."""

from __future__ import annotations

import pytest
import torch
from harness import RankPool
from models import make_batch, make_model
from test_dry_run import meta_model

from paradyse.offline.capture import capture_program, fake_world
from paradyse.offline.dry_run import _static_bytes


def on_paper(model: torch.nn.Module, batch: dict[str, torch.Tensor], num_ranks: int) -> list[int]:
    """Static bytes of a rank, with weights whole and sharded."""
    with fake_world(num_ranks) as axis:
        program = capture_program(model, batch, axis)
        return [_static_bytes(program, [*model.parameters()], s) for s in (False, True)]


def held_at_rest() -> int:
    import paradyse
    from paradyse.weights.sharded_tensor import rows_here

    model = paradyse.shard(make_model("gpt2"))
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    with torch.no_grad():
        compiled(**make_batch("plain", 1, 24))
    return sum(rows_here(p).nbytes for p in model.parameters())


@pytest.mark.broad
def test_a_rank_with_more_heads_holds_more(pool3: RankPool) -> None:
    """Three ranks share four heads, and weights lie at rest by heads."""
    held = pool3.run(held_at_rest, timeout_s=200)
    assert len({*held}) > 1
    whole, sharded = on_paper(*meta_model("gpt2"), 3)
    assert sharded == 4 * max(held) and whole == 4 * sum(held)


def test_frozen_weights_have_no_gradients_and_no_moments() -> None:
    model, batch = meta_model("gpt2")
    all_of_them = [p.nbytes for p in model.parameters()]
    trained = model.transformer.h[0].attn.c_attn.weight
    for p in model.parameters():
        p.requires_grad_(p is trained)
    held = sum(all_of_them) + 3 * trained.nbytes
    assert on_paper(model, batch, 2) == [held, pytest.approx(held / 2, rel=1e-3)]
