"""Losses written behind the logits: exact on one to four ranks, one program for all lengths, and no
rank sees logits of other ranks' tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import RankPool
from losses import LOSSES, WithLoss, batch_of
from models import TOLERANCE, run_step, worst

LENGTHS = (13, 22, 31, 16)


def train(name: str, sharded: bool, head: str, dtype: torch.dtype = torch.float32) -> Any:
    """Worst error, number of programs, and shapes of split values that are gathered."""
    import paradyse
    from paradyse.runtime.registry import captures_of

    torch._dynamo.reset()
    reference, model = WithLoss(name, dtype), WithLoss(name, dtype)
    if sharded:
        paradyse.shard(model)
    plan = {"attention": "megatron_cz", "mlp": "megatron_cz", "head": head}
    options = {"inner": "aot_eager", "plan": plan}
    compiled = torch.compile(model, backend="paradyse", options=options)
    off = 0.0
    for n in LENGTHS:
        batch = batch_of(n, dtype)
        got = run_step(compiled, model, batch, lambda loss: loss)
        want = run_step(reference, reference, batch, lambda loss: loss)
        off = max(off, worst(got, want)[0])
    assert not list(captures_of(compiled, whole=True))
    graphs = [g for c in captures_of(compiled) for g in c.graphs.values()]
    gathered = [
        tuple(a.meta["val"].shape)
        for ctx in (g.program.ctx for g in graphs)
        for node, _ in ctx.gathered
        for a in node.all_input_nodes
        if a in ctx.split
    ]
    return off, len(graphs), gathered, [len(g.program.ctx.heads) for g in graphs]


def check(found: Any, dtype: torch.dtype = torch.float32) -> None:
    for off, programs, gathered, heads in found:
        assert off <= TOLERANCE[dtype]
        assert programs <= 2
        assert all(len(shape) < 3 or shape[-1] == 1 for shape in gathered)
        assert all(n == 1 for n in heads)


QUICK = ("policy",)
"""Those that run with every change."""


@pytest.mark.broad
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LOSSES]
)
def test_no_rank_sees_logits_of_others(name: str, pool2: RankPool) -> None:
    check(pool2.run(train, name, False, "", timeout_s=200))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_in_float64_by_tiles(name: str, pool2: RankPool) -> None:
    check(pool2.run(train, name, True, "tiled", torch.float64, timeout_s=200), torch.float64)


BY_WORDS = ("classes_second", "shifted_classes_second", "log_likelihood", "token_losses")
"""Those that read no number of each token and word besides the logits."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_WORDS)
def test_by_words_of_the_vocabulary(name: str, pool2: RankPool) -> None:
    found = pool2.run(train, name, True, "tiled+vocabulary", torch.float64, timeout_s=200)
    check(found, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("nproc", [1, 3, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_on_other_numbers_of_ranks(name: str, nproc: int, sharded: bool, ranks: Any) -> None:
    found = ranks(nproc).run(train, name, sharded, "", timeout_s=300)
    check([(off, n, [] if nproc == 1 else wide, heads) for off, n, wide, heads in found])
