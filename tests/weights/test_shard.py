"""Weights that lie spread over the ranks: exact under every strategy, whatever divides by what.

Every family once: ``test_exactness.test_sharded_over_two_ranks``, ``.._three_ranks``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import RankPool
from models import FAMILIES
from plans import PLANS
from test_exactness import Batches, assert_exact, compare_plans, families, inner_for

SHORT: Batches = {"plain": ((3, 13),)}
PACKED: Batches = {"packed": ((1, 11),)}


@families()
def test_two_ranks(family: str, pool2: RankPool) -> None:
    args = (family, torch.float32, SHORT, inner_for(family), PLANS, True)
    assert_exact(family, pool2.run(compare_plans, *args, timeout_s=300))


@families()
def test_four_ranks(family: str, pool4: RankPool) -> None:
    batches = PACKED if FAMILIES[family].packs else SHORT
    args = (family, torch.float32, batches, "eager", PLANS, True)
    assert_exact(family, pool4.run(compare_plans, *args, timeout_s=300))


@pytest.mark.broad
@pytest.mark.parametrize("nproc", [1, 2])
def test_double_precision(nproc: int, ranks: Callable[[int], RankPool]) -> None:
    plans = PLANS if nproc > 1 else PLANS[-1:]  # one rank has nothing to choose
    args = ("llama_odd", torch.float64, SHORT, "eager", plans, True)
    assert_exact("llama_odd", ranks(nproc).run(compare_plans, *args, timeout_s=300), torch.float64)
