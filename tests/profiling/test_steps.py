"""Steps that are measured: at which lengths, and what they leave behind."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool
from tiny import Tiny, tokens
from torch import Tensor, nn

from paradyse import profile, shard
from paradyse.planning.costs import BlockCost, peak_bytes
from paradyse.profiling.steps import Steps

EAGER = {"inner": "eager"}


class Placed(Tiny):
    """Has so many positions, and no more, and takes lengths that are a multiple of four."""

    def __init__(self, positions: int, **sizes: int) -> None:
        super().__init__(**sizes)
        self.positions = nn.Embedding(positions, 32)

    def extra(self, x: Tensor) -> Tensor:
        assert x.shape[1] % 4 == 0
        return x + self.positions.weight[torch.arange(x.shape[1])]


def batch_of_tokens(batch: int, seq_len: int) -> dict[str, Any]:
    ids = tokens(batch, seq_len)
    return {"ids": ids, "labels": ids}


def test_a_model_is_measured_at_the_most_tokens_that_it_has_positions_for(tmp_path: Path) -> None:
    """With batches of the user's own, also where not every length can be had."""
    given: dict[str, Any] = {"repeats": 1, "options": EAGER, "make_batch": batch_of_tokens}
    found = profile(Placed(16, layers=1), tmp_path / "p.jsonl", [16], **given)
    assert {m.seq_len for m in found.measurements} == {16}


@pytest.mark.parametrize(("own", "lengths"), [(False, [16, 15]), (True, [16, 8])])
def test_blocks_are_found_at_no_length_beyond(own: bool, lengths: list[int]) -> None:
    model, ran = Tiny(layers=1), list[int]()
    model.get_input_embeddings = lambda: model.embed  # type: ignore[assignment]
    steps = Steps(model, EAGER, 1, True, batch_of_tokens if own else None)
    steps.blocks = steps.blocks or ("some",)  # type: ignore[assignment]
    steps.run = lambda n, plan: ran.append(n)  # type: ignore[method-assign]
    steps.find_blocks(16)
    assert ran == lengths


def predicted_over_held(sharded: bool) -> dict[str, float]:
    """Per strategy the peak that the parts of a measured step add up to, over its own."""
    torch.manual_seed(0)
    model = Tiny(layers=2)
    if sharded:
        shard(model)
    steps, found, seq_len = Steps(model, EAGER, 1, True, batch_of_tokens), dict[str, float](), 256
    with steps.prepared():
        steps.find_blocks(seq_len)
        for strategy in steps.blocks[0].feasible():
            steps.run(seq_len, strategy)
            held = steps.memory(seq_len, strategy)
            costs = [
                BlockCost(
                    0.0,
                    held.saved_bytes[i],
                    held.workspace_bytes[i],
                    0,
                    steps.left_bytes(steps.part_of[i], seq_len),
                    ahead_bytes=held.ahead_bytes[i],
                )
                for i in held.ahead_bytes
            ]
            rest = BlockCost(0.0, held.saved_bytes[-1], held.workspace_bytes[-1], 0)
            predicted = max(peak_bytes(costs, rest), held.floor_bytes)
            found[strategy] = predicted / held.peak_bytes
    return found


@pytest.mark.parametrize("sharded", [False, True])
def test_the_parts_of_a_step_add_up_to_its_peak(sharded: bool, pool2: RankPool) -> None:
    """Or to a little more: weights ahead of the one direction count in the other too."""
    for ratios in pool2.run(predicted_over_held, sharded, timeout_s=60):
        assert len(ratios) == 5
        assert all(1 <= x < 1.06 for x in ratios.values()), ratios


@pytest.mark.parametrize("training", [True, False])
def test_each_module_is_in_its_own_mode_afterwards(training: bool) -> None:
    """A part that was frozen by hand is not thawed, whatever the model is in."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).train(training)
    model[1].train(not training)
    with Steps(model, EAGER, 1, True, lambda batch, seq_len: {}).prepared():
        assert model[1].training
    assert (model.training, model[1].training) == (training, not training)


def test_what_was_measured_lets_go_of_its_model(tmp_path: Path) -> None:
    """What chooses its plans is kept by weights, and knows the plan option."""
    model = Tiny(layers=1)
    kept = weakref.ref(model.get_parameter("head.weight"))
    profile(model, tmp_path / "p.jsonl", [8], repeats=1, options=EAGER, make_batch=batch_of_tokens)
    del model
    torch.compiler.reset()
    gc.collect()
    assert kept() is None
