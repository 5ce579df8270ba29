"""What whole steps took, measured side by side: which plan is taken then, and how long it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_planner import MACHINE, SHORT, planner

from paradyse.planning.alone import Alone
from paradyse.planning.corrections import scale_of
from paradyse.planning.explain import explain_plan
from paradyse.planning.splits import Splits
from paradyse.planning.tried import FASTER, Tried
from paradyse.types import Plan, Workload

ONE, OTHER, MORE = (Plan((s,) * 4) for s in ("megatron_ts", "megatron_cz", "ulysses_z"))
SCALE = scale_of(SHORT)


def took(tried: Tried, splits: Splits, seconds: dict[Plan, float], at: Workload = SHORT) -> None:
    """Plans took ``seconds`` at a workload."""
    off = {plan: s / splits.predict(plan, at)[0] for plan, s in seconds.items()}
    tried.add(scale_of(at), off)


def test_the_faster_one_is_taken_at_its_scale_if_it_is_faster_by_more_than_noise() -> None:
    splits = Splits(planner())
    tried = Tried(splits)
    assert tried.best(ONE, SHORT) == ONE
    took(tried, splits, {ONE: 1.0, OTHER: 1 / (1 + 2 * FASTER)})
    assert tried.best(ONE, SHORT) == OTHER and tried.best(OTHER, SHORT) == OTHER
    assert set(tried.at(SHORT)) == {ONE, OTHER}
    assert tried.best(MORE, SHORT) == MORE  # it was not tried
    for other in (replace(SHORT, seq_len=4 * SHORT.seq_len), replace(SHORT, training=False)):
        assert tried.best(ONE, other) == ONE
    took(tried, splits, {ONE: 1.0, OTHER: 1 / (1 + FASTER / 2)})
    assert tried.best(ONE, SHORT) == ONE and tried.best(OTHER, SHORT) == OTHER


def test_predictions_go_on_counting() -> None:
    """One that was faster at a length is left at another, where it is predicted to be slower."""
    splits = Splits(planner(sharded=True))
    tried, at, longer = Tried(splits), replace(SHORT, seq_len=1024), replace(SHORT, seq_len=2047)
    assert scale_of(at) == scale_of(longer)
    grows = {p: splits.predict(p, longer)[0] / splits.predict(p, at)[0] for p in (ONE, MORE)}
    fast, slow = sorted(grows, key=grows.__getitem__)
    just = (grows[slow] / grows[fast]) ** 0.5
    assert just > 1 + FASTER
    took(tried, splits, {slow: 1.0, fast: just}, at)
    assert tried.best(fast, at) == slow
    assert tried.best(slow, longer) == fast


def test_trials_compare_by_what_they_share() -> None:
    splits = Splits(planner())
    tried = Tried(splits)
    took(tried, splits, {ONE: 1.0, OTHER: 0.8})
    took(tried, splits, {OTHER: 8.0, MORE: 7.0})  # the machine is ten times as slow
    assert tried.best(ONE, SHORT) == tried.best(OTHER, SHORT) == MORE
    assert set(tried.at(SHORT)) == {ONE, OTHER, MORE}
    assert splits.predict(ONE, SHORT)[0] != splits.predict(OTHER, SHORT)[0]
    alone = Plan(("replicated",) * 4)
    took(tried, splits, {alone: 1.0})
    assert set(tried.at(SHORT)) == {alone}  # nothing to compare by


@pytest.mark.parametrize("fits", [True, False])
def test_what_does_not_fit_is_not_taken(fits: bool) -> None:
    peak = Splits(planner()).predict(OTHER, SHORT)[1]
    limit = max(Splits(planner()).predict(ONE, SHORT)[1], peak) if fits else peak - 1
    splits = Splits(planner(memory_limit=limit))
    tried = Tried(splits)
    took(tried, splits, {ONE: 1.0, OTHER: 0.5})
    assert tried.best(ONE, SHORT) == (OTHER if fits else ONE)


def test_explain_tells_what_was_tried() -> None:
    alone = Alone(Splits(planner(sharded=True)), "a reason")
    assert "tried" not in str(explain_plan(alone, SHORT))
    chosen = alone.planner.plan(SHORT)
    other = next(p for p in (ONE, OTHER, MORE) if p != chosen)
    took(alone.tried, alone.splits, {chosen: 1.25, other: 1.0})
    report = explain_plan(alone, SHORT)
    assert report.plan == other
    fastest, slower = report.tried
    assert fastest == f"tried in this run: {other.strategies[0]}, 1.00x the time"
    assert slower == f"tried in this run: {chosen.strategies[0]}, 1.25x the time"
    assert slower in str(report)


def test_it_settles_what_is_left_open_unless_memory_ran_out() -> None:
    alone = Alone(Splits(planner(machine=lambda dtype: MACHINE)), "a reason")
    chosen = alone.planner.plan(SHORT)
    other = next(p for p in (ONE, OTHER, MORE) if p != chosen)
    took(alone.tried, alone.splits, {chosen: 1.0, other: 0.5})
    assert alone.settle(chosen, SHORT) == other
    alone.ran_out(SHORT)
    assert alone.settle(chosen, SHORT) == chosen
