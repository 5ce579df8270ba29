"""Reports: what explain, stats and verify say, as text and as tables of rich."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_planner import LONG, NORM, SHORT, explained, model, planner

from paradyse.planning.explain import PlanReport, short_key
from paradyse.planning.tables import text_table
from paradyse.planning.units import format_seconds
from paradyse.reports import Stats, attention_kernels
from paradyse.types import ATTENTION_STRATEGIES, HEAD, LEVERS, HeadSpec
from paradyse.verification import VerifyReport, VerifyRow


def rendered(value: Any) -> str:
    from rich.console import Console

    console = Console(width=200, file=io.StringIO())
    console.print(value)
    return console.file.getvalue()  # type: ignore[attr-defined]


def why(report: PlanReport, block: int) -> dict[str, str]:
    return {r.strategy: r.why for r in report.blocks[block].rows}


def test_every_strategy_has_a_row_with_its_prediction_or_its_reason() -> None:
    p = planner(blocks=model(infeasible={"metp": NORM}), strategies=["megatron_ts", "ulysses_z"])
    report = explained(p, LONG)
    assert report.plan == p.plan(LONG)
    for b, s in zip(report.blocks, report.plan.strategies):
        assert b.chosen == s
        assert [r.strategy for r in b.rows] == list(ATTENTION_STRATEGIES)
    texts = why(report, 0)
    assert texts["ulysses_z"] == "chosen"
    assert texts["metp"] == f"infeasible: {NORM}"
    assert texts["colossal_z"] == "not in option 'strategies'"
    assert texts["megatron_ts"].endswith("x the time")
    assert why(report, 1)["megatron_cz"] == "the same variant as ulysses_z"
    assert report.static_plans[4].why == "infeasible for layers.0.attention"
    assert report.static_plans[2].why == "this is the plan"
    assert (report.time_s, report.peak_bytes) == p.predict(report.plan, LONG)


def test_a_faster_loser_says_why_it_lost() -> None:
    fast = planner().plan(LONG).strategies[0]
    named = explained(planner("metp"), LONG)
    assert why(named, 0)[fast].endswith("x the time, but the plan option asks for metp")
    need = planner("metp").predict(planner("metp").plan(LONG), LONG)[1]
    tight = explained(planner(memory_limit=need), LONG)
    needs = r"\d\.\d\dx the time, but does not fit: needs \d+\.\d [MG]iB of \d+\.\d [MG]iB"
    assert re.fullmatch(needs, why(tight, 0)[fast])
    calm = planner(sharded=True, smoothing=1e9, strategies=["megatron_ts", "ulysses_z"])
    calm.plan(SHORT)
    kept = explained(calm, LONG)
    assert kept.plan == calm.plan(SHORT)
    assert "previous plan is kept" in why(kept, 0)["ulysses_z"]


@pytest.mark.parametrize("share", [0.9, 0.5, 0.3])
def test_plans_of_one_strategy_have_the_head_that_was_chosen(share: float) -> None:
    """So a row that is said to be the plan tells what the plan does."""
    head, blocks = HeadSpec(1024, 128_256), model(4)
    full = planner(head=head, blocks=blocks)
    most = full.predict(full.static("ulysses_z", LONG), LONG)[1]
    levers = ["tiled", "vocabulary"]
    p = planner(head=head, blocks=blocks, levers=levers, memory_limit=int(share * most))
    report = explained(p, LONG)
    assert report.plan.head
    for row in report.static_plans:
        if row.why == "this is the plan":
            assert (row.time_s, row.peak_bytes) == (report.time_s, report.peak_bytes)


def test_what_the_head_sends_is_sent_by_a_plan() -> None:
    with_head, without = planner(head=HeadSpec(1024, 32_000)), planner()
    with_head.sharded = without.sharded = True
    more, less = (
        next(r for r in explained(p, LONG).static_plans if r.strategy == "megatron_cz")
        for p in (with_head, without)
    )
    of_head = with_head.costs(LONG)[-1][""].comm_bytes
    assert of_head and more.comm_bytes == less.comm_bytes + of_head


def test_the_head_has_a_row_for_each_set_of_levers() -> None:
    head = HeadSpec(1024, 128_256, infeasible=dict.fromkeys({*LEVERS} - {"tiled"}, "its bias"))
    free = planner(head=head, levers=["tiled"])
    report = explained(free, LONG)
    assert report.blocks[-1].kind == HEAD and report.blocks[-1].chosen == "whole logits"
    assert why(report, -1)["whole logits"] == "chosen"
    assert why(report, -1)["tiled"].endswith("x the time")
    tight = planner(head=head, levers=["tiled"], memory_limit=report.peak_bytes // 3)
    texts = why(explained(tight, LONG), -1)
    assert texts["tiled"].startswith("chosen; without levers: does not fit: needs")
    barred = explained(planner(head=head, levers=[]), LONG)
    assert "tiled" not in why(barred, -1)
    assert HEAD not in [b.kind for b in explained(planner(), LONG).blocks]


def test_plan_report_as_text() -> None:
    p = planner(blocks=model(layers=24, infeasible={"metp": NORM}))
    report = explained(p, LONG, notes=("aten.topk of layers.3.gate: no rule",))
    text = str(report)
    assert text.startswith("plan for batch 1 x 65536 tokens, bfloat16, training, 4 ranks\n")
    assert "predicted: " in text
    assert "layers.0.attention and 23 like it: " in text
    assert "(mask: causal)" in text
    assert "layers.0.mlp and 23 like it: " in text
    assert f"infeasible: {NORM}" in text
    assert "one strategy for all blocks" in text
    assert text.endswith("on gathered tensors: aten.topk of layers.3.gate: no rule")
    assert all(line == line.rstrip() for line in text.splitlines())


def test_one_rank_has_nothing_to_choose() -> None:
    report = explained(planner(num_ranks=1), replace(SHORT, num_ranks=1))
    assert report.plan.strategies == ("replicated",) * 4
    assert "layers.0.attention and 1 like it: replicated (mask: causal)" in str(report)
    assert "replicated" in rendered(report)


def test_stats_as_text() -> None:
    stats = Stats(
        captures=2,
        variants_compiled=4,
        plan_per_length={128: "metp,metp,ulysses_z", 7: "metp"},
        bytes_per_collective={"all_to_all": 2048},
        calls_per_collective={"all_to_all": 3},
    )
    text = str(stats)
    assert "captures           2" in text
    assert text.index("7       metp") < text.index("128     2 metp, 1 ulysses_z")
    assert "all_to_all  3      2.0 KiB" in text
    assert "communication" not in str(Stats())


def test_a_verification_is_ok_only_if_something_ran_and_all_that_ran_agree() -> None:
    good = VerifyRow("metp", 1e-7, "w", 2e-6)
    refused = VerifyRow("megatron_ts", infeasible=NORM)
    assert VerifyReport((good, refused)).ok
    assert not VerifyReport((refused,)).ok
    assert not VerifyReport(()).ok
    for bad in (
        VerifyRow("mixed", 1e-7, "w", 2e-3),
        VerifyRow("mixed", float("nan"), "w", 0.0),
        VerifyRow("mixed", None, "w", 0.0),
        VerifyRow("mixed", 0.0, "w", None),
    ):
        report = VerifyReport((good, bad), "llama, float32, 2 ranks")
        assert not report.ok
        assert "WRONG: over 1e-04" in str(report)
        assert str(report).endswith("FAILED")
    text = str(VerifyReport((good, refused), "llama, float32, 2 ranks"))
    assert text.startswith("against one-device eager: llama, float32, 2 ranks\n")
    assert "metp         1.0e-07     2.0e-06         w               ok" in text
    assert f"infeasible: {NORM}" in text


def test_rich_shows_the_same_words_and_takes_no_markup_from_them() -> None:
    reason = "needs [B, S], got [red]"
    report = explained(planner(blocks=model(infeasible={"metp": reason})), LONG)
    for value in (
        report,
        Stats(captures=3, plan_per_length={5: "metp"}),
        VerifyReport((VerifyRow("metp", 1e-7, "w[0]", 2e-6),)),
    ):
        plain = {w for line in str(value).splitlines() if "---" not in line for w in line.split()}
        shown = rendered(value)
        assert not [w for w in plain if w not in shown]


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.00125, "1.25 ms"), (2e-6, "2 us"), (0.0, "0 us")]
)
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_small_formats() -> None:
    assert short_key("") == ""
    assert short_key("metp,metp") == "metp"
    assert text_table(("a", "bb"), [("xyz", "")]) == "a    bb\n---  --\nxyz"


def test_kernels_are_shown() -> None:
    line = "width 64, causal forward: aten_flash (not measured for this device, dtype and width)"
    report = explained(planner(), LONG, kernels=(line,))
    assert f"kernel: {line}" in str(report) and "aten_flash" in rendered(report)
    assert attention_kernels(model(), torch.bfloat16, torch.device("cpu")) == ()


def test_notebooks_show_the_text_as_it_is_printed() -> None:
    report = VerifyReport((VerifyRow("metp", 1e-7, "a<b>&c", 2e-6),))
    shown = report._repr_html_()
    assert "a&lt;b&gt;&amp;c" in shown and "<b>" not in shown
    inside = re.fullmatch(r"<pre [^>]*>(.*)</pre>", shown, re.DOTALL)
    assert inside and inside[1].splitlines()[0] == str(report).splitlines()[0]
    assert all(hasattr(kind, "_repr_html_") for kind in (PlanReport, Stats))
