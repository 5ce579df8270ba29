"""Points with levers in plans: taken only where the limit asks for them, and paid for."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from test_planner import LONG, MACHINE, NORM, SHORT, explained, model, planner

from paradyse.planning.corrections import Corrections, scale_of
from paradyse.planning.costs import BlockCost
from paradyse.planning.planner import Planner
from paradyse.planning.prior import prior_cost
from paradyse.planning.time_ratios import OF_PRIOR, TimeRatios
from paradyse.planning.unmeasured import with_levers
from paradyse.types import LEVERS, BlockSpec, HeadSpec, Plan, Point, Workload

ALONE = replace(LONG, num_ranks=1)


def test_a_point_is_text_and_back() -> None:
    assert Point.parse("metp") == Point("metp")
    point = Point.parse("ulysses_z+recompute")
    assert (point.strategy, point.levers, str(point)) == (
        "ulysses_z",
        ("recompute",),
        "ulysses_z+recompute",
    )
    assert (point.variant, point.recomputes) == ("ulysses_z", True)
    assert str(Point("metp").on_demand()) == "metp+recompute"
    assert str(Point("metp", ("tiled",)).on_demand()) == "metp+tiled"  # keeps its input alone


def test_a_plan_is_its_key_and_back() -> None:
    for plan in (Plan(()), Plan(("metp", "ulysses_z+recompute")), Plan(("metp",), "tiled")):
        assert Plan.of_key(plan.key) == plan
    assert Plan(("metp", "metp")).key == "metp,metp"


def test_a_block_has_the_levers_of_its_kind_that_it_does_not_refuse() -> None:
    attention, mlp = model(
        1, infeasible={"metp": NORM}, refused_levers={"ulysses_z+recompute": "a reason"}
    )
    points = attention.points()
    assert "megatron_cz+recompute" in points and "ulysses_z" in points
    assert not {"metp", "metp+recompute", "ulysses_z+recompute"} & set(points)
    assert attention.why_not("metp+recompute") == NORM
    assert attention.why_not("ulysses_z+recompute") == "a reason"
    assert "not vocabulary" in mlp.why_not("metp+vocabulary")
    refused = replace(mlp, refused_levers=dict.fromkeys(LEVERS, "no"))
    assert refused.points() == refused.feasible()


def least(p: Planner, w: Workload) -> int:
    return p.least_bytes(w)


def test_levers_are_taken_only_where_the_limit_asks_for_them() -> None:
    blocks = model(layers=8)
    free, plain = planner(blocks=blocks, levers=["recompute"]), planner(blocks=blocks)
    for w in (SHORT, LONG):
        assert free.plan(w) == plain.plan(w)
    need = free.predict(free.plan(LONG), LONG)[1]
    low = least(free, LONG)
    assert low < least(plain, LONG) < need
    last, counts = 0.0, []
    for share in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0):
        limit = int(low + share * (need - low))
        p = planner(blocks=blocks, levers=["recompute"], memory_limit=limit)
        plan = p.plan(LONG)
        time_s, peak = p.predict(plan, LONG)
        assert peak <= limit and time_s >= last
        last = time_s
        counts.append(sum("+recompute" in s for s in plan.strategies))
    assert counts[0] == 0 and counts[-1] > 0


def test_least_memory_first_where_memory_ran_out() -> None:
    p = planner(levers=["recompute"])
    p.ran_out(LONG)
    assert p.predict(p.plan(LONG), LONG)[1] == least(p, LONG)
    assert any("+recompute" in s for s in p.plan(LONG).strategies)


def test_what_recomputes_takes_its_forward_once_more_and_keeps_its_input() -> None:
    for block in model(1):
        for s in block.feasible():
            plain, again = (prior_cost(block, f"{s}{v}", LONG, MACHINE) for v in ("", "+recompute"))
            forward = prior_cost(block, s, replace(LONG, training=False), MACHINE)
            assert again.time_s == pytest.approx(plain.time_s + forward.time_s, rel=1e-6)
            assert again.saved_bytes == 65_536 // 4 * 1024 * 2
            held = plain.saved_bytes + plain.workspace_bytes
            assert again.saved_bytes + again.workspace_bytes == pytest.approx(held, abs=2)
            assert again.comm_bytes == plain.comm_bytes + forward.comm_bytes
            assert again.left_bytes == plain.left_bytes


def test_sharded_weights_are_gathered_in_backward_anyway() -> None:
    block = model(1)[1]
    plain, again = (
        prior_cost(block, s, LONG, MACHINE, sharded=True)
        for s in ("megatron_cz", "megatron_cz+recompute")
    )
    assert again.comm_bytes == plain.comm_bytes


def test_without_backward_nothing_is_computed_again() -> None:
    forward = replace(LONG, training=False)
    p = planner(levers=["recompute"], memory_limit=2**60)
    assert not any("+" in s for s in p.candidates(p.blocks[0], training=False))
    costs = p.costs(forward)[0]
    assert costs["metp+recompute"] == costs["metp"]


def demanding() -> list[BlockSpec]:
    """Of a model that asks for gradient checkpointing."""
    return [replace(b, recompute=True) for b in model()]


@pytest.mark.parametrize("form", ["auto", "metp", ["metp", "auto"], {"mlp": "metp+recompute"}])
@pytest.mark.parametrize("levers", [(), ("recompute",)])
def test_a_demand_holds_whatever_the_plan_says(form: Any, levers: Any) -> None:
    p = planner(form, demanding(), levers=levers)
    plan = p.plan(LONG)
    assert all(s.endswith("+recompute") for s in plan.strategies)
    assert p.predict(plan, LONG)[0] == pytest.approx(
        sum(c[s].time_s for c, s in zip(p.costs(LONG), plan.strategies))
    )
    assert not any("+" in s for s in p.plan(replace(LONG, training=False)).strategies[:1])
    assert "the model asks for gradient checkpointing" in str(
        explained(planner("auto", demanding(), levers=levers), LONG)
    )


def test_a_plan_by_name_may_have_levers() -> None:
    p = planner(["metp+recompute", "ulysses_z"])
    assert p.plan(LONG).strategies == ("metp+recompute",) * 2 + ("ulysses_z",) * 2
    assert p.variants(p.plan(LONG))[1::2] == ("metp+recompute", "megatron_cz")
    refused = model(refused_levers={"recompute": "it has no inside"})
    with pytest.raises(ValueError, match="'metp.recompute' cannot compute .* it has no inside"):
        planner("metp+recompute", refused).plan(LONG)


def test_one_rank_has_levers_too() -> None:
    free = planner(num_ranks=1, levers=["recompute"], memory_limit=2**50)
    assert free.plan(ALONE).strategies == ("replicated",) * 4
    need, low = free.predict(free.plan(ALONE), ALONE)[1], least(free, ALONE)
    assert low < need
    tight = planner(num_ranks=1, levers=["recompute"], memory_limit=low)
    assert tight.predict(tight.plan(ALONE), ALONE)[1] == low
    assert "replicated+recompute" in tight.plan(ALONE).strategies
    named = planner("ulysses_z+recompute", num_ranks=1)
    assert named.plan(ALONE).strategies == ("replicated+recompute",) * 4
    with pytest.raises(ValueError, match="no plan fits"):
        planner(num_ranks=1, levers=["recompute"], memory_limit=low // 2).plan(ALONE)


def test_smoothing_keeps_no_lever() -> None:
    blocks = model(layers=4)
    free = planner(blocks=blocks, levers=["recompute"])
    low, need = least(free, LONG), free.predict(free.plan(LONG), LONG)[1]
    given = {"blocks": blocks, "levers": ["recompute"], "memory_limit": (19 * low + need) // 20}
    p = planner(**given, smoothing=1e9)
    assert any("+" in s for s in p.plan(LONG).strategies)
    assert not any("+" in s for s in p.plan(SHORT).strategies)
    some = 0
    for twentieths in range(8, 20):  # where fewer blocks need them
        shorter = replace(LONG, seq_len=LONG.seq_len * twentieths // 20)
        p.plan(LONG)
        kept = [("+" in s) for s in p.plan(shorter).strategies]
        best = [("+" in s) for s in planner(**given, smoothing=0).plan(shorter).strategies]
        assert all(k <= b for k, b in zip(kept, best, strict=True))
        some += 0 < sum(best) < len(best)
    assert some


def test_explain_says_which_levers_why_and_what_they_cost() -> None:
    blocks = model(layers=8)
    free = planner(blocks=blocks, levers=["recompute"])
    low, need = least(free, LONG), free.predict(free.plan(LONG), LONG)[1]
    p = planner(blocks=blocks, levers=["recompute"], memory_limit=(19 * low + need) // 20)
    report = explained(p, LONG)
    text = str(report)
    count = sum("+recompute" in s for s in report.plan.strategies)
    assert re.search(
        rf"lever recompute in {count} of 16 blocks: without it \d.* instead of \d.* a step, and a "
        r"peak of \d.*iB instead of \d.*iB",
        text,
    )
    assert "chosen; without levers: does not fit: needs" in text
    used = next(b for b in report.blocks if "+recompute" in b.chosen)
    assert f"{Point.parse(used.chosen).strategy}" in [r.strategy for r in used.rows]
    assert "lever" not in str(explained(free, LONG))


def test_a_point_that_was_not_measured_follows_its_strategy() -> None:
    p = planner(levers=["recompute"])
    key = p.kinds[0], "megatron_cz"
    ratios, parts = TimeRatios(OF_PRIOR), p.predicted_costs(LONG)[0]["megatron_cz"].parts
    for _ in range(20):
        ratios.add(key, scale_of(LONG), 2.0, parts)
    known = {("saved", key): {scale_of(LONG): 1.5}, ("workspace", key): {scale_of(LONG): 1.5}}
    corrections = Corrections(known, ratios.estimate())
    before = p.costs(LONG)[0]["megatron_cz+recompute"]
    p.correct(corrections)
    after = p.costs(LONG)[0]["megatron_cz+recompute"]
    assert after.time_s == pytest.approx(2 * before.time_s, rel=0.05)
    assert after.workspace_bytes == round(1.5 * before.workspace_bytes)
    assert (after.source, after.memory_source) == ("online", "online")


def test_a_measured_strategy_scales_its_points() -> None:
    plain, levered = BlockCost(2.0, 80, 20, 5), BlockCost(3.0, 10, 90, 8)
    got = with_levers(BlockCost(4.0, 100, 60, 5), plain, levered)
    assert (got.time_s, got.saved_bytes, got.workspace_bytes, got.comm_bytes) == (6.0, 10, 150, 8)


def test_the_head_is_chosen_with_the_blocks() -> None:
    head = HeadSpec(1024, 128_256)
    free = planner(head=head, levers=["tiled", "recompute"])
    assert free.plan(LONG).head == ""
    need = free.predict(free.plan(LONG), LONG)[1]
    logits = 65_536 // 4 * 128_256 * 2
    assert need > planner().predict(planner().plan(LONG), LONG)[1] + logits
    tight = planner(head=head, levers=["tiled", "recompute"], memory_limit=need // 3)
    plan = tight.plan(LONG)
    assert plan.head == "tiled" and plan.key.endswith(";tiled")
    assert tight.predict(plan, LONG)[1] <= need // 3
    assert "lever tiled in the head: without it" in str(explained(tight, LONG))
    with pytest.raises(ValueError, match="no plan fits"):
        planner(head=head, levers=["recompute"], memory_limit=need // 3).plan(LONG)


def test_the_head_by_name() -> None:
    head = HeadSpec(1024, 128_256, infeasible={"vocabulary": "its bias is shared"})
    named = planner({"attention": "metp", "mlp": "metp", "head": "tiled"}, head=head)
    assert named.plan(LONG) == Plan(("metp",) * 4, "tiled")
    assert planner("metp", head=head).plan(LONG).head == ""
    with pytest.raises(ValueError, match="cannot have the levers 'vocabulary': its bias is shared"):
        planner({"head": "vocabulary"}, head=head).plan(LONG)
    with pytest.raises(ValueError, match="'tiled': no last linear with a loss was found"):
        planner({"head": "tiled"}).plan(LONG)
