"""Mixtures of experts are planned for machines that are not there, like any other block."""

from __future__ import annotations

import re

import pytest
import torch
from harness import RankPool
from test_dry_run import SEQ_LEN, meta_model, on_paper, saved_by_blocks

from paradyse.config import Options
from paradyse.offline.devices import machine_of, read_cluster
from paradyse.offline.dry_run import DryRun, dry_run
from paradyse.offline.outlook import MIXTURE, look_ahead, plan_in_words
from paradyse.planning.alone import Alone
from paradyse.planning.explain import explain_plan
from paradyse.planning.planner import Planner
from paradyse.planning.splits import Splits
from paradyse.types import ATTENTION_STRATEGIES, DSP, EXPERTS, Workload

TOKENS = 4096
"""Of a rank."""


@pytest.fixture(scope="module")
def mixtral4() -> DryRun:
    model, batch = meta_model("mixtral")
    return dry_run(model, batch, 4, levers=())


@pytest.mark.slow
def test_all_strategies_of_experts_are_measured(mixtral4: DryRun) -> None:
    assert [b.kind for b in mixtral4.blocks] == ["attention", EXPERTS] * 2 and not mixtral4.notes
    block = mixtral4.blocks[1]
    assert set(block.feasible()) == set(ATTENTION_STRATEGIES)
    saved = {s: mixtral4.block(block, s).at(TOKENS)[0] for s in ATTENTION_STRATEGIES}
    rows_bytes = 4 * TOKENS * block.experts_per_token * block.hidden
    assert 2 * rows_bytes < saved["metp"] < saved["ulysses_z"]
    # Rows are shared evenly by the experts, so a rank gets as many as it sends.
    assert saved["megatron_ts"] == pytest.approx(saved["ulysses_z"], rel=0.02)


@pytest.mark.slow
def test_groups_of_experts_that_are_not_run_repeat_the_last(mixtral4: DryRun) -> None:
    """What the rows of all experts take does not grow with the groups that are run."""
    sizes = mixtral4.block(mixtral4.blocks[1], "metp")
    assert sizes.before is not None and sizes.num_more == 1
    assert sizes.growth.at(TOKENS)[0] == sizes.before.at(TOKENS)[0]


@pytest.mark.broad
def test_plans_name_their_experts(mixtral4: DryRun) -> None:
    machine = machine_of(read_cluster("a100-80gb"), 4, torch.float32)
    outlook = look_ahead(mixtral4, machine, [TOKENS], torch.float32, levers=())
    plan = outlook.forecasts[MIXTURE][0].plan
    assert re.search(rf"; {EXPERTS} \w", plan_in_words(mixtral4.blocks, plan))
    known = mixtral4.static_bytes, True, None, mixtral4.head
    planner = Planner(Options(levers=()), mixtral4.blocks, 4, lambda _: machine, *known)
    alone = Alone(Splits(planner), "a reason")
    report = explain_plan(alone, Workload(1, TOKENS, torch.float32, True, 4))
    assert [b.kind for b in report.blocks[:2]] == ["attention", EXPERTS]
    assert "layers.0.experts and 1 like it: " in str(report)


@pytest.mark.slow
def test_experts_save_as_much_in_a_dry_run_as_on_two_ranks(pool2: RankPool) -> None:
    """Apart from ``megatron_ts``, where that depends on what routers choose."""
    real = pool2.run(saved_by_blocks, "mixtral", None, timeout_s=200)[0]
    run = on_paper("mixtral", 2)
    for block in run.blocks[:2]:
        left_out = {DSP, "megatron_ts"} if block.kind == EXPERTS else {DSP}
        for s in {*block.feasible()} - left_out:
            found = run.block(block, s).at(run.tokens(SEQ_LEN, 1))[0]
            assert found == real[block.kind, s], (block.kind, s)
