"""Families that are more than a stack of dense blocks, exact in double precision: numbers of ranks
that divide nothing, odd lengths, weights whole and sharded, under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_run import examine, loss_of
from family_table import FAMILIES
from harness import RankPool
from models import TOLERANCE, run_step, worst
from plans import PLANS, blocks_of, choose
from small_models import batch_of, make

EXACT = TOLERANCE[torch.float64]
SINGLE = 1e-6
ROWS = dict.fromkeys(("t5", "vit", "gpt-oss", "mixtral"), EXACT)
ROWS |= {"mamba2": SINGLE, "deepseek-v3": SINGLE}
"""Family -> largest relative norm of a difference. Whatever the dtype, Mamba2 scans in float32 and
DeepSeek's router multiplies in it: sums over tokens, which ranks take in another order."""


def train(name: str, sharded: bool, plans: tuple[str, ...]) -> dict[str, float]:
    """What is furthest from eager mode, by plan and length."""
    import transformers

    import paradyse

    transformers.logging.set_verbosity_error()
    row = FAMILIES[name]
    reference, model = make(row, torch.float64), make(row, torch.float64)
    reference.set_experts_implementation("eager")  # the others have no double precision
    if sharded:
        paradyse.shard(model)
    current: list[Any] = ["colossal_z"]  # which no block refuses; the first call finds the blocks
    options = {"plan": lambda workload: current[0], "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    found: dict[str, float] = {}
    for n in row.lengths:
        batch = batch_of(row, reference, n)
        batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
        want = run_step(reference, reference, batch, loss_of)
        for plan in plans:
            if found and len(plans) > 1:  # one rank has nothing to choose
                current[0] = choose(plan, blocks_of(compiled))
            error, what = worst(run_step(compiled, model, batch, loss_of), want)
            found[f"{plan}, {n}: {what}"] = error
    return found


CASES = [(name, nproc, sharded) for name in ROWS for nproc in (1, 2, 3, 4) for sharded in (0, 1)]


@pytest.mark.broad
@pytest.mark.parametrize(
    ("name", "nproc", "sharded"),
    [
        pytest.param(*case, marks=() if case == ("vit", 2, 1) else pytest.mark.slow)
        for case in CASES
    ],
)
def test_double_precision(
    name: str, nproc: int, sharded: int, ranks: Callable[[int], RankPool]
) -> None:
    plans = PLANS if nproc > 1 else ("colossal_z",)
    for found in ranks(nproc).run(train, name, bool(sharded), plans, timeout_s=300):
        assert {k: e for k, e in found.items() if not e <= ROWS[name]} == {}


ON_A_GPU = ("llama", "gpt2", "bert", "t5", "mistral", "gemma2", "gpt-oss", "mixtral", "mamba2")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_ranks_that_share_a_gpu(name: str, ranks: Callable[[int], RankPool]) -> None:
    """Over gloo, which takes tensors of a GPU through the host: NCCL has one rank a device."""
    given = FAMILIES[name], list(PLANS), "eager", "cuda"
    for found in ranks(2).run(examine, *given, timeout_s=300):
        assert found["exact"] == "all strategies"
