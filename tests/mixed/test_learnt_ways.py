"""Ways are held to what groups took: by the median, so that steps that compile do not count."""

from __future__ import annotations

import pytest
from harness import RankPool
from models import make_model
from test_training import dataset_of

import paradyse
from paradyse.mixed.ahead import Ahead
from paradyse.mixed.learnt_ways import FEWEST, LearntWays
from paradyse.mixed.step_plan import plan_step
from paradyse.mixed.step_reports import GroupReport, MixedReport
from paradyse.mixed.ways import Way

ONE = Way(1, 0.1, 100, (100,), (1.0,))
TWO = Way(2, 0.2, 200, (100, 200), (0.5, 1.0), least_s=0.3)
FOUR = Way(4, 0.3, 400, (400,), (1.0,))


def step(*groups: tuple[Way, float]) -> MixedReport:
    """Groups of one sequence of 100 tokens, that took as often as long as their way says."""
    said = [
        GroupReport(0, range(w.degree), w.name, (0,), (100,), 9.9, w.group_s([100]) * times)
        for w, times in groups
    ]
    return MixedReport(tuple(said), 9.9)


def test_a_way_is_corrected_once_enough_of_its_groups_are_seen() -> None:
    learnt = LearntWays([ONE, TWO, FOUR])
    for _ in range(FEWEST - 1):
        assert not learnt.add(step((TWO, 2.0)))
    assert learnt.ways == learnt.given == (ONE, TWO, FOUR)
    assert learnt.add(step((TWO, 2.0)))
    two = learnt.ways[1]
    assert two.group_s([100]) == pytest.approx(2 * TWO.group_s([100]))
    assert (two.least_s, two.max_tokens) == (pytest.approx(0.6), 200)
    # What was never seen is off as what was: otherwise it would look fast beside that.
    assert learnt.ways[0].group_s([50]) == pytest.approx(2 * ONE.group_s([50]))
    for _ in range(FEWEST):
        learnt.add(step((ONE, 8.0)))
    assert learnt.factors == {(2, ""): pytest.approx(2.0), (1, ""): pytest.approx(8.0)}
    assert learnt.ways[2].fixed_s == pytest.approx(4 * FOUR.fixed_s)
    assert not learnt.add(step((ONE, 8.01), (TWO, 1.99))), "no news"


def test_the_few_that_compile_do_not_count() -> None:
    learnt = LearntWays([ONE])
    for i in range(FEWEST):
        learnt.add(step((ONE, 300.0 if i < 3 else 1.5)))
    assert learnt.factors[1, ""] == pytest.approx(1.5)


def test_ways_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ways of 1 ranks with the name '': give each its own"):
        LearntWays([ONE, TWO, ONE])


def test_a_step_is_held_to_the_ways_that_it_was_planned_by() -> None:
    data = dataset_of([9, 9])
    batches = paradyse.MixedBatches(data, tokens_per_step=9, ways=[ONE], shuffle=False)
    first, _ = batches
    for _ in range(FEWEST):
        batches._learnt.add(step((ONE, 100.0)))
    assert batches.ways[0].fixed_s == pytest.approx(100 * ONE.fixed_s)
    report = batches.explain(first)
    assert report.static_s == {1: pytest.approx(report.predicted_s)}


def test_what_is_learnt_changes_plans() -> None:
    lengths, learnt = [90] * 4, LearntWays([ONE, TWO])
    assert plan_step(lengths, learnt.ways, 2).in_words() == "2 x 1; 2 x 1"
    for _ in range(FEWEST):
        learnt.add(step((ONE, 10.0), (TWO, 1.0)))
    with Ahead(learnt.given, 2) as ahead:
        ahead.ask(lengths)
        ahead.use(learnt.ways)
        ahead.ask(lengths)
        assert ahead.take().in_words() == "2 x 1; 2 x 1"
        assert (
            ahead.take().in_words()
            == plan_step(lengths, learnt.ways, 2).in_words()
            == "1 x 2; 1 x 2"
        )


def learn(on: bool) -> tuple[list[float], list[float], tuple[Way, ...]]:
    """Seconds predicted for each step and taken, by ways that are a hundred times too fast."""
    model = paradyse.MixedModel(make_model("llama", num_hidden_layers=1), {"inner": "eager"})
    ways = [Way(1, 1e-5, 40, (40,), (1e-5,)), Way(2, 1e-5, 80, (80,), (1e-5,))]
    data = dataset_of([60, 9, 30, 30] * 12)
    batches = paradyse.MixedBatches(data, tokens_per_step=129, ways=ways, shuffle=False, learn=on)
    predicted, taken = [], []
    for mixed in batches:
        for loss in model.losses(mixed):
            loss.backward()
        assert mixed.report is not None and mixed.report.taken_s is not None
        predicted.append(mixed.report.predicted_s)
        taken.append(mixed.report.taken_s)
    return predicted, taken, batches.ways


@pytest.mark.broad
@pytest.mark.parametrize("on", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_steps_take_what_is_predicted_once_enough_were_seen(on: bool, pool2: RankPool) -> None:
    found = pool2.run(learn, on, timeout_s=120)
    assert found[0][2] == found[1][2], "ranks have learnt the same"
    predicted, taken, _ = found[0]
    assert len(predicted) == 12 and predicted[0] < taken[0] / 50
    assert (predicted[-1] > taken[-1] / 20) is on
