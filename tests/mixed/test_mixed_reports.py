"""What is said of a step in groups: which sequences where, predicted and taken seconds."""

from __future__ import annotations

import pytest
from harness import RankPool
from models import make_model
from test_training import dataset_of, ways_for

import paradyse
from paradyse.mixed.step_plan import plan_step, static_steps
from paradyse.mixed.step_reports import in_words, reports_of, with_times

LENGTHS = [40, 9, 7, 5, 1, 3, 11]


def test_every_sequence_stands_in_one_group_with_its_length() -> None:
    plan = plan_step(LENGTHS, ways_for(4), 4)
    indices = [10 + i for i in range(len(LENGTHS))]
    groups = list(reports_of(plan, indices, LENGTHS))
    placed = {i: n for g in groups for i, n in zip(g.sequences, g.lengths, strict=True)}
    assert placed == dict(zip(indices, LENGTHS, strict=True))
    assert [g.degree for g in groups] == [len(g.ranks) for g in groups]
    assert sum(max(g.predicted_s for g in groups if g.micro_batch == m)
               for m in {g.micro_batch for g in groups}) == plan.time_s  # fmt: skip


def test_the_slowest_rank_of_a_group_counts() -> None:
    plan = plan_step(LENGTHS, ways_for(2), 2)
    groups = [g for micro in plan.micro_batches for g in micro.groups]
    told = [[(n, 1.0 + n) for n, g in enumerate(groups) if r in g.ranks] for r in range(2)]
    both = next(n for n, g in enumerate(groups) if len(g.ranks) == 2)
    told[1] = [(n, s + 5 * (n == both)) for n, s in told[1]]
    report = with_times(plan, range(len(LENGTHS)), LENGTHS, told)
    taken = {(g.ranks, g.sequences): g.taken_s for g in report.groups}
    assert taken[groups[both].ranks, groups[both].sequences] == 6.0 + both
    assert report.taken_s == sum(s for _, s in told[1])
    assert report.num_tokens == sum(LENGTHS)


def test_ranks_in_words() -> None:
    assert (in_words(range(3, 4)), in_words(range(4, 8))) == ("3", "4 to 7")


def said() -> tuple[str, str, str, float]:
    model = paradyse.MixedModel(make_model("llama", num_hidden_layers=1), {"inner": "eager"})
    batches = paradyse.MixedBatches(
        dataset_of(LENGTHS), tokens_per_step=100, ways=ways_for(2), shuffle=False
    )
    (step,) = _trained(model, batches)
    before = paradyse.MixedBatches.explain(batches, step)
    assert step.report is not None and step.report.taken_s
    assert all(g.taken_s for g in step.report.groups), "of both micro-batches"
    fastest = min(before.static_s.values())
    assert step.plan.time_s <= fastest
    assert before.static_s == {
        d: p.time_s for d, p in static_steps(LENGTHS, ways_for(2), 2).items()
    }
    return str(before), str(paradyse.stats(model)), step.plan.in_words(), step.report.taken_s


def _trained(model: paradyse.MixedModel, batches: paradyse.MixedBatches):
    for step in batches:
        for loss in model.losses(step):
            loss.backward()
        yield step


@pytest.mark.broad
def test_explain_and_stats_show_groups_with_their_times(pool2: RankPool) -> None:
    for explained, counted, words, taken in pool2.run(said):
        assert words == "1 x 2; 2 x 1" and taken > 0
        for text in (explained, counted):
            assert "0 to 1" in text and "76 tokens in groups: predicted" in text, text
        assert "one degree for all, predicted: 2:" in explained  # 40 tokens do not fit one rank
