"""Calls inside a checkpoint of the user's, which makes them again in backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import RankPool
from models import make_batch, make_model, relative
from torch.utils.checkpoint import checkpoint

import paradyse


def checkpointed(plan: str) -> list[float]:
    """How far losses and gradients of calls inside a checkpoint are off, at several lengths."""
    torch._dynamo.reset()
    model, off = make_model("llama"), []
    options = {"inner": "eager", "plan": plan}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    for seq_len in (9, 14, 9):
        batch, found = make_batch("plain", 2, seq_len), []
        for run in (model, compiled):
            model.zero_grad()
            loss = checkpoint(lambda r=run, b=batch: r(**b).loss, use_reentrant=False)
            loss.backward()
            grads = [p.grad for p in model.parameters()]
            found.append([loss.detach(), *(g for g in grads if g is not None)])
        off += [relative(x, y) for x, y in zip(*found, strict=True)]
    return off


def refused() -> str:
    torch._dynamo.reset()
    model: Any = paradyse.shard(make_model("llama"))
    compiled: Any = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    batch = make_batch("plain", 2, 9)
    try:
        checkpoint(lambda: compiled(**batch).loss, use_reentrant=False).backward()
    except NotImplementedError as e:
        compiled(**batch).loss.backward()  # ranks are in step
        return str(e)
    return "no error"


def test_a_checkpoint_around_shards_is_refused(pool2: RankPool) -> None:
    for said in pool2.run(refused, timeout_s=100):
        assert "model.gradient_checkpointing_enable()" in said


@pytest.mark.parametrize("plan", ["auto", "megatron_cz", "megatron_cz+recompute", "metp"])
def test_calls_inside_a_checkpoint(plan: str, pool2: RankPool) -> None:
    for off in pool2.run(checkpointed, plan, timeout_s=100):
        assert max(off) < 1e-4
