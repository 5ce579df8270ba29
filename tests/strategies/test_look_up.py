"""Embeddings by rows: gradients as of a whole table, also of padding and of tied tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import RankPool
from models import check, redraw, run_step
from test_head import small_tiles
from tiny import Tiny, tokens
from torch import Tensor, nn

import paradyse
from paradyse.passes.split_steps import LookUpStep
from paradyse.runtime.registry import captures_of
from paradyse.strategies.look_up import LookUp

Ranks = Callable[[int], RankPool]

WORDS, PADDING = 53, 3


class TwoTables(nn.Module):
    """Two looked up, of which one is the head's, and one of positions."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, hidden, padding_idx=PADDING)
        self.tied = nn.Embedding(WORDS, hidden)
        self.positions = nn.Embedding(64, hidden)

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1])
        return self.words(ids) + 2 * self.tied((ids + 7) % WORDS) + self.positions(at)


class Model(Tiny):
    def __init__(self) -> None:
        super().__init__(hidden=32, heads=2, layers=1, vocab=WORDS)
        self.embed = TwoTables(32)
        self.head.weight = self.embed.tied.weight


def model() -> Any:
    torch.manual_seed(0)
    return redraw(Model()).double()


def batch(size: int, length: int) -> dict[str, Tensor]:
    ids = tokens(size, length)
    ids[0, 0] = PADDING
    return {"ids": ids, "labels": tokens(size, length, seed=1)}


def compiled_by_rows(made: Any) -> Any:
    options = {"plan": {"head": "tiled+vocabulary"}, "inner": "eager"}
    return torch.compile(made, backend="paradyse", options=options)


def train(sharded: bool) -> None:
    reference, made = model(), model()
    if sharded:
        paradyse.shard(made)
    compiled = compiled_by_rows(made)
    with small_tiles():
        for sizes in ((2, 13), (1, 6)):
            want = run_step(reference, reference, batch(*sizes), loss_of=lambda out: out)
            got = run_step(compiled, made, batch(*sizes), loss_of=lambda out: out)
            check(got, want, torch.float64)
    graph = [g for c in captures_of(compiled) for g in c.graphs.values()][-1]
    steps = [s for s in graph.program.steps if isinstance(s, LookUpStep)]
    assert sum(len(s.look_ups) for s in steps) == 2
    assert all("vocabulary" in graph.program.variants[s.position] for s in steps)
    assert graph.choice.planner.head.num_looked_up == 2 * WORDS * 32


@pytest.mark.broad
@pytest.mark.parametrize("nproc", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_sharded_tables(nproc: int, ranks: Ranks) -> None:
    ranks(nproc).run(train, True, timeout_s=100)


def train_whole() -> None:
    with patch.object(LookUp, "run_forward", side_effect=AssertionError("by rows")):
        train(False)


@pytest.mark.broad
def test_tables_that_every_rank_has_are_looked_up_there(pool2: RankPool) -> None:
    pool2.run(train_whole, timeout_s=100)
