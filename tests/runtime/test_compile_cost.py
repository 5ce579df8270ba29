"""Compilations are paid once for each structure and strategy, whatever lengths and depth come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import RankPool
from models import make_batch, make_model, run_step
from plans import blocks_of, choose

STRATEGIES = ("colossal_z", "ulysses_z", "megatron_cz", "megatron_ts", "metp", "mixed 0")
STRUCTURES = {"attention": 5, "mlp": 3}
"""Kind -> variants: the Z strategies of an MLP are one."""
LENGTHS = [3 + 7 * i % 128 for i in range(50)]


def compile_at(
    layers: int, lengths: list[int], hidden: int, dynamic: bool | None = None
) -> tuple[int, int, int, int, int]:
    """Captures, variants, steps, and what was compiled at the first use of plans and after it."""
    import paradyse
    from paradyse.distributed.axis import resolve_axis
    from paradyse.strategies.base import VariantCache

    model = make_model(
        "llama", num_hidden_layers=layers, hidden_size=hidden, intermediate_size=40, head_dim=8
    )
    current: list[Any] = ["colossal_z"]
    options = {"plan": lambda workload: current[0], "inner": "aot_eager"}
    compiled = torch.compile(model, backend="paradyse", dynamic=dynamic, options=options)
    cache = resolve_axis().session.of(VariantCache)
    start = cache.num_compiled
    run_step(compiled, model, make_batch("plain", 2, lengths[0]))
    blocks = blocks_of(compiled)
    for name in STRATEGIES:
        current[0] = choose(name, blocks)
        run_step(compiled, model, make_batch("plain", 2, lengths[0]))
    warm = cache.num_compiled
    for i, seq_len in enumerate(lengths):
        current[0] = choose(STRATEGIES[i % len(STRATEGIES)], blocks)
        run_step(compiled, model, make_batch("plain", 2, seq_len))
    stats = paradyse.stats(compiled)
    end = cache.num_compiled
    return stats.captures, stats.variants_compiled, stats.steps, warm - start, end - warm


@pytest.mark.slow
def test_fifty_lengths(pool2: RankPool) -> None:
    assert len(set(LENGTHS)) == 50
    expected = sum(STRUCTURES.values())
    for captures, variants, steps, first, later in pool2.run(
        compile_at, 2, LENGTHS, 40, timeout_s=400
    ):
        assert steps == 50 + 1 + len(STRATEGIES)
        assert captures == 2
        assert variants == expected
        assert expected <= first <= 2 * expected  # some are several pieces, and those between
        assert later == 0


@pytest.mark.broad
@pytest.mark.parametrize("deep", [5, pytest.param(24, marks=pytest.mark.slow)])
def test_depth_and_captures_compile_nothing(deep: int, pool2: RankPool) -> None:
    """What 2 layers have compiled serves more, and another capture."""
    hidden = 48 + deep // 24 * 8  # sizes of its own: nothing is compiled before
    for _, variants, _, first, _ in pool2.run(
        compile_at, 2, LENGTHS[:4], hidden, True, timeout_s=200
    ):
        assert first >= variants == sum(STRUCTURES.values())
    for layers in (2, deep):
        results = pool2.run(compile_at, layers, LENGTHS[:4], hidden, True, timeout_s=400)
        for captures, variants, _, first, later in results:
            assert captures == 1
            assert variants == sum(STRUCTURES.values())
            assert (first, later) == (0, 0)


def ask_guard_again(plan: str) -> bool:
    """Whether a workload seen before is made no plan."""
    from paradyse.runtime.registry import captures_of

    model = make_model("llama")
    options = {"plan": plan, "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    run_step(compiled, model, make_batch("plain", 2, 16))
    (graph,) = [g for c in captures_of(compiled) for g in c.graphs.values()]

    def plan_again(workload: Any) -> Any:
        raise AssertionError("the workload was seen before")

    guard, workload = graph.choice.guard, graph.choice.workload(2, 16, True)
    guard._plan = plan_again
    return guard(workload) is guard(workload)


@pytest.mark.broad(but="ulysses_z")
@pytest.mark.parametrize("plan", ["auto", "ulysses_z"])
def test_guard(plan: str, pool2: RankPool) -> None:
    assert pool2.run(ask_guard_again, plan, timeout_s=200) == [True, True]
