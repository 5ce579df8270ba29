"""Whole weights that are fetched one block ahead, in forward and in backward."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import RankPool
from models import check, make_batch, make_model, run_step

from paradyse.types import Plan
from paradyse.weights.unshard import Gathered, Shelf

AGAIN = "megatron_cz+recompute"
MIXED = (AGAIN, "megatron_cz", AGAIN, "megatron_cz+selective")
"""Of the blocks of two layers; the last one's input is made again by the attention before it."""


def fetched(points: tuple[str, ...]) -> tuple[list[bool], list[bool]]:
    """For every gather of forward and of backward, whether it was on its way when it was asked for;
    gradients are compared with those of one process."""
    import paradyse

    reference, model = (make_model("llama") for _ in range(2))
    paradyse.shard(model)
    options = {"plan": lambda workload: Plan(points), "inner": "eager"}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    batch = make_batch("plain", 2, 11)
    check(run_step(compiled, model, batch), run_step(reference, reference, batch), what="first")
    found: list[bool] = []
    take = Shelf.take

    def note(shelf: Shelf, shards: Any) -> Any:
        messages = take(shelf, shards)
        if shards:  # backward reads no weights of some steps
            found.append(messages is not None)
        return messages

    with patch.object(Shelf, "take", note):
        loss = compiled(**batch).loss
        forward = list(found)
        loss.backward()
    return forward, found[len(forward) :]


@pytest.mark.broad(but="recompute")
@pytest.mark.parametrize("points", [(AGAIN,) * 4, MIXED], ids=["recompute", "mixed"])
def test_weights_are_on_their_way_when_a_block_asks(
    points: tuple[str, ...], pool2: RankPool
) -> None:
    for forward, backward in pool2.run(fetched, points):
        assert len(forward) >= 5 and all(forward[1:]), forward
        # nothing of backward comes before its first weights
        assert len(backward) >= 5 and all(backward[1:]), backward


def held_after_backward() -> int:
    """Bytes of whole weights that lie here while the loss lives, of a model that trains none."""
    import paradyse

    made: list[Gathered] = []
    make = Gathered.make

    def note(gathered: Gathered) -> list[torch.Tensor]:
        made.append(gathered)
        return make(gathered)

    model = make_model("llama").requires_grad_(False)
    paradyse.shard(model)
    options = {"plan": "megatron_cz", "inner": "eager"}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    batch = make_batch("plain", 2, 11)
    prompt = torch.randn(2, 11, model.config.hidden_size, requires_grad=True)
    with patch.object(Gathered, "make", note):
        loss = compiled(inputs_embeds=prompt, labels=batch["labels"]).loss
    loss.backward()
    assert made and prompt.grad is not None and loss.grad_fn is not None
    return sum(w.untyped_storage().nbytes() for gathered in made for w in gathered.wholes)


def test_frozen_weights_are_let_go_of_once_backward_is_over(pool2: RankPool) -> None:
    assert pool2.run(held_after_backward) == [0, 0]
