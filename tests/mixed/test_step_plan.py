"""Steps of mixed lengths: how near to the fastest, how soon, and what no plan may do."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence

import pytest
from step_search import least_time_s, small_case, ways_by_formula

from paradyse.mixed.packing import Table, longest_first
from paradyse.mixed.step_plan import by_tokens, plan_step, static_steps
from paradyse.mixed.ways import StepPlan, Way


def check(plan: StepPlan, lengths: Sequence[int], num_ranks: int) -> None:
    """Each sequence is computed once, within memory, by ranks that do nothing else meanwhile; and
    times are those that ways say."""
    groups = [g for micro in plan.micro_batches for g in micro.groups]
    assert sorted(i for g in groups for i in g.sequences) == list(range(len(lengths)))
    for micro in plan.micro_batches:
        ranks = [r for g in micro.groups for r in g.ranks]
        assert len(set(ranks)) == len(ranks) and set(ranks) <= set(range(num_ranks))
        assert micro.time_s == max(g.time_s for g in micro.groups)
    for g in groups:
        packed = [lengths[i] for i in g.sequences]
        assert packed and sum(packed) <= g.way.max_tokens and len(g.ranks) == g.way.degree
        assert g.time_s == pytest.approx(g.way.group_s(packed), rel=1e-12)
    assert plan.time_s == pytest.approx(sum(m.time_s for m in plan.micro_batches), rel=1e-12)


def gap(seed: int) -> float:
    """By which share the plan of a small batch is slower than the fastest step there is."""
    lengths, ways, num_ranks = small_case(seed)
    plan = plan_step(lengths, ways, num_ranks)
    check(plan, lengths, num_ranks)
    return plan.time_s / least_time_s(lengths, ways, num_ranks) - 1


def check_gaps(gaps: Sequence[float]) -> None:
    assert min(gaps) > -1e-9, "faster than any step"
    assert statistics.median(gaps) <= 0.01 and max(gaps) <= 0.05, sorted(gaps)[-5:]


def test_small_batches_are_planned_as_well_as_possible() -> None:
    check_gaps([gap(seed) for seed in range(24)])


@pytest.mark.slow
def test_two_hundred_small_batches_are_planned_as_well_as_possible() -> None:
    check_gaps([gap(seed) for seed in range(100, 300)])


def long_tailed(count: int, most: int, seed: int = 0) -> list[int]:
    """``count`` lengths, most of them short, none above ``most`` tokens."""
    rng = random.Random(seed)
    return [min(most, max(16, int(rng.lognormvariate(7.5, 1.6)))) for _ in range(count)]


@pytest.mark.parametrize(("count", "num_ranks", "limit_s"), [(512, 64, 0.5), (4096, 1024, 5.0)])
def test_no_plan_is_slower_than_one_degree_for_all(
    count: int, num_ranks: int, limit_s: float
) -> None:
    lengths = long_tailed(count, 192 * 1024)
    ways = ways_by_formula([1 << k for k in range(11) if 1 << k <= num_ranks], 16384, 0.1)
    start = time.thread_time()
    plan = plan_step(lengths, ways, num_ranks, limit_s=0.9 * limit_s)
    assert time.thread_time() - start < limit_s
    check(plan, lengths, num_ranks)
    statics = static_steps(lengths, ways, num_ranks)
    assert statics and plan.time_s <= min(s.time_s for s in statics.values()) * (1 + 1e-12)
    for degree, static in statics.items():
        check(static, lengths, num_ranks)
        assert {g.way.degree for m in static.micro_batches for g in m.groups} == {degree}


def test_without_time_the_plan_is_still_whole() -> None:
    lengths, ways = long_tailed(300, 100_000), ways_by_formula([1, 2, 4, 8, 16], 8192, 0.1)
    plan = plan_step(lengths, ways, 16, limit_s=0.0)
    check(plan, lengths, 16)
    statics = static_steps(lengths, ways, 16)
    assert plan.time_s <= min(s.time_s for s in statics.values()) * (1 + 1e-12)


def test_a_long_sequence_and_short_ones_side_by_side() -> None:
    """The long one takes as many ranks as it pays for, and the others one each beside it."""
    ways = ways_by_formula([1, 2, 3, 4, 5, 6, 7, 8], 100_000, 0.01, messages=2.0)
    lengths = [50_000, *[5_000] * 12]
    plan = plan_step(lengths, ways, 8)
    check(plan, lengths, 8)
    (micro,) = plan.micro_batches
    assert 0 in micro.groups[0].sequences and micro.groups[0].way.degree >= 4
    assert len(micro.groups) > 1
    assert plan.time_s < min(s.time_s for s in static_steps(lengths, ways, 8).values())


def test_degrees_that_are_no_powers_of_two() -> None:
    """Two sequences whose work is as 5 to 3 on 8 ranks."""
    ways = [Way(d, 0.0, 10**6, (300, 500), (3 / d + 0.01, 5 / d + 0.01)) for d in range(1, 9)]
    plan = plan_step([500, 300], ways, 8)
    assert sorted(g.way.degree for g in plan.micro_batches[0].groups) == [3, 5]
    assert plan.time_s == pytest.approx(1.01)


@pytest.mark.parametrize(
    ("lengths", "words"),
    [([], "at least one"), ([5, 0], "at least 1 token"), ([4, 2049], "2049 tokens fits no group")],
)
def test_what_cannot_be_planned_is_refused(lengths: list[int], words: str) -> None:
    ways = ways_by_formula([1, 2, 4], 1024, 0.01)
    for solve in (plan_step, static_steps):
        with pytest.raises(ValueError, match=words):
            solve(lengths, ways, 3)  # 4 ranks would have room


def test_sequences_in_order_are_cut_by_tokens() -> None:
    table = Table([5, 1, 9, 3, 3, 3], ways_by_formula([1], 100, 0.01))
    parts = by_tokens(table, longest_first(table), 3)
    assert [[table.lengths[i] for i in part] for part in parts] == [[9], [5, 3], [3, 3, 1]]


def test_equal_batches_have_equal_plans() -> None:
    lengths, ways, num_ranks = small_case(5)
    assert plan_step(lengths, ways, num_ranks) == plan_step(lengths, ways, num_ranks)


def test_more_time_than_needed_is_not_taken() -> None:
    start = time.perf_counter()
    plan_step([100, 2000, 37], ways_by_formula([1, 2, 4], 4096, 0.01), 4, limit_s=math.inf)
    assert time.perf_counter() - start < 30
