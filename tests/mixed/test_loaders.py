"""Batches that a DataLoader gives train in groups as HuggingFace's model does on them whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankPool
from models import TOLERANCE, make_model, worst
from test_sequences import packed, padded
from test_training import dataset_of, step_of, ways_for
from torch import Tensor
from torch.utils.data import DataLoader

import paradyse
from paradyse.distributed.axis import resolve_axis

LENGTHS = [40, 9, 7, 5, 1, 3, 11, 13, 17, 5, 5, 5]

COLLATE: dict[str, Callable[[list[dict[str, Tensor]]], Any]] = {
    "samples": list,
    "padded": padded,
    "left": lambda of: padded(of, "left"),
    "packed": lambda of: packed(of, False),
    "bounds": lambda of: packed(of, True),
}


def epochs(how: str) -> list[tuple[float, str]]:
    """Errors of each batch of two epochs of a shuffled loader against one process."""
    torch._dynamo.reset()
    model, reference = (make_model("llama", num_hidden_layers=1) for _ in range(2))
    data = dataset_of(LENGTHS)
    made = [torch.Generator().manual_seed(5) for _ in range(2)]
    loader, same = (
        DataLoader(data, batch_size=5, shuffle=True, collate_fn=collate, generator=g)
        for g, collate in zip(made, (COLLATE[how], padded), strict=True)
    )
    batches = paradyse.MixedBatches(loader, ways=ways_for(resolve_axis().size))
    mixed, found = paradyse.MixedModel(model, {"inner": "eager"}), []
    for _ in range(2):
        for step, batch in zip(batches, same, strict=True):
            for loss in mixed.losses(step):
                loss.backward()
            assert step.loss is not None
            want = reference(**batch).loss
            want.backward()
            found.append(worst(step_of(model, step.loss), step_of(reference, want)))
    return found


@pytest.mark.parametrize("how", [pytest.param(h, marks=pytest.mark.slow) for h in COLLATE])
def test_all_kinds_of_batches(how: str, pool3: RankPool) -> None:
    check(pool3.run(epochs, how, timeout_s=240))


@pytest.mark.slow
def test_padded_batches(pool2: RankPool) -> None:
    check(pool2.run(epochs, "padded", timeout_s=120))


def check(results: list[list[tuple[float, str]]]) -> None:
    for found in results:
        assert len(found) == 6
        assert all(error <= TOLERANCE[torch.float32] for error, _ in found), found


def refused(how: str) -> list[str]:
    """What the ranks are told of batches that are not equal, and whether the next epoch goes."""
    rank, data = resolve_axis().rank, dataset_of([3, 4, 5, 6])
    if how == "lengths":
        data = data[rank:]
    if how == "tokens":
        data[2]["input_ids"] = data[2]["input_ids"] + rank
    batches = paradyse.MixedBatches([data[:2], data[2:]], ways=ways_for(resolve_axis().size))
    found = []
    for _ in range(2):
        try:
            found.append(str(len([*batches])))
        except ValueError as e:
            found.append(str(e))
    return found


WORDS = {
    "lengths": "batch 0 of this rank is another than the first rank's",
    "tokens": "batch 1 has other tokens on ranks [1] than on the first",
}


@pytest.mark.parametrize("how", list(WORDS))
def test_ranks_have_to_be_given_equal_batches(how: str, pool2: RankPool) -> None:
    for found in pool2.run(refused, how):
        assert len(found) == 2 and all(WORDS[how] in words for words in found), found


def left_early() -> list[int]:
    """Numbers of the sequences of the first batch of an epoch, the one before it left early."""
    data = dataset_of([3, 4, 5, 6, 7, 8])
    batches = paradyse.MixedBatches(
        [data[:2], data[2:4], data[4:]], ways=ways_for(resolve_axis().size)
    )
    next(iter(batches))
    return [i for step in batches for i in step.indices]


def test_an_epoch_left_early_is_over(pool2: RankPool) -> None:
    assert pool2.run(left_early) == [[*range(6)]] * 2
