"""Costs from a profile that has few measurements of a strategy, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from test_measured import ATTENTION, HEADER, RATES, measure, profile_of, work

from paradyse.planning.costs import NOTHING
from paradyse.planning.measured import CostModel, head_structure
from paradyse.planning.prior import gradient_sum_s, prior_cost
from paradyse.planning.profile_file import OVER_LIMIT, Measurement
from paradyse.types import ATTENTION_STRATEGIES, HEAD, HeadSpec, Workload


def test_a_strategy_that_was_not_measured_is_as_far_off_as_the_others() -> None:
    for factor in (0.5, 2.0):
        m = CostModel(profile_of({"megatron_cz": factor, "ulysses_z": factor}))
        prior = prior_cost(ATTENTION, "colossal_z", work(700), RATES)
        cost = m.cost(ATTENTION, "colossal_z", work(700))
        sums_s = gradient_sum_s(ATTENTION, "colossal_z", work(700), RATES)
        ratio = (cost.time_s - sums_s) / (prior.time_s - sums_s)
        assert ratio == pytest.approx(factor, rel=0.15)
        assert replace(cost, time_s=prior.time_s) == prior


def test_what_is_not_known_of_one_time_over_another() -> None:
    """Less where both were measured, and nothing of a strategy against itself."""
    names = ("megatron_cz", "ulysses_z", "megatron_ts")
    m = CostModel(profile_of({"megatron_cz": 2.0, "ulysses_z": 2.0}))
    times, deviation = m.estimate(ATTENTION, names, work(700))
    assert list(times) == list(names) and deviation.shape == (3, 3)
    assert np.allclose(deviation, deviation.T) and not deviation.diagonal().any()
    assert 0 < deviation[0, 1] < 0.5 * deviation[0, 2]
    nothing = CostModel(profile_of({}))
    said, before = nothing.estimate(ATTENTION, names, work(700))
    assert (before >= deviation).all() and before[0, 1] > 2 * deviation[0, 1]
    assert said == {s: prior_cost(ATTENTION, s, work(700), RATES).time_s for s in names}


def test_two_measurements_or_fewer_scale_the_prior() -> None:
    m = CostModel(profile_of({"metp": 0.25}, lengths=(512, 2048)))
    cost, prior = (
        m.cost(ATTENTION, "metp", work(700)),
        prior_cost(ATTENTION, "metp", work(700), RATES),
    )
    sums_s = gradient_sum_s(ATTENTION, "metp", work(700), RATES)
    # A measurement is believed to a few percent, against what predictions usually are off.
    assert cost.time_s == pytest.approx(0.25 * (prior.time_s - sums_s) + sums_s, rel=0.03)
    assert (cost.saved_bytes, cost.source) == (prior.saved_bytes, "prior")


def test_two_measurements_count_each_at_its_own_length() -> None:
    rows = [measure(ATTENTION, "metp", 512, 2.0), measure(ATTENTION, "metp", 8192, 1.0)]
    m = CostModel(profile_of({}, more=rows))

    def ratio(n: int) -> float:
        sums_s = gradient_sum_s(ATTENTION, "metp", work(n), RATES)
        prior = prior_cost(ATTENTION, "metp", work(n), RATES)
        return (m.cost(ATTENTION, "metp", work(n)).time_s - sums_s) / (prior.time_s - sums_s)

    assert ratio(512) == pytest.approx(2, rel=0.1) and ratio(8192) == pytest.approx(1, rel=0.1)
    assert ratio(512) > ratio(1024) > ratio(4096) > ratio(8192)


def test_curves_are_taken_where_all_were_measured_alike() -> None:
    """At the same lengths, up to the first that did not fit."""
    names = {"megatron_cz": 2.0, "ulysses_z": 2.0}
    alike = CostModel(profile_of(names))
    assert alike.cost(ATTENTION, "ulysses_z", work(700)).source == "forest"
    more = CostModel(profile_of(names, more=[measure(ATTENTION, "ulysses_z", 300, 2.0)]))
    sources = {more.cost(ATTENTION, s, work(700)).source for s in (*names, "metp")}
    assert sources == {"prior"}
    exact = alike.cost(ATTENTION, "ulysses_z", work(700))
    cost = more.cost(ATTENTION, "ulysses_z", work(700))
    assert cost.time_s == pytest.approx(exact.time_s, rel=0.1)
    assert cost.saved_bytes == pytest.approx(exact.saved_bytes, rel=0.01)
    over = replace(measure(ATTENTION, "megatron_cz", 9999), outcome=OVER_LIMIT)
    longer = [measure(ATTENTION, "ulysses_z", n, 2.0) for n in (9999, 20_000, 40_000)]
    fitted = CostModel(profile_of(names, more=[over, *longer]))
    for name in names:  # no longer length was tried of the one
        assert fitted.cost(ATTENTION, name, work(700)).source == "forest"
    other = {"megatron_cz": 2.0} | {"metp": 2.0}  # as many lengths, but others
    rows = [measure(ATTENTION, "ulysses_z", n, 2.0) for n in (300, 600, 900, 1200)]
    apart = CostModel(profile_of(other, more=rows))
    assert apart.cost(ATTENTION, "metp", work(700)).source == "prior"


def test_the_rest_of_a_step_by_one_measurement_or_two() -> None:
    def rest(*tokens: int) -> CostModel:
        fields = {"forward_s": 1e-3, "backward_s": 1e-3, "workspace_bytes": 100}
        rows = [
            Measurement("", "rest", "", 1, n, True, **fields, saved_bytes=8 * n) for n in tokens
        ]
        return CostModel(profile_of({}, more=rows))

    assert rest().rest(work(700)) == NOTHING
    assert rest(512).rest(work(700)).saved_bytes == 8 * 512
    cost = rest(512, 1024).rest(work(4096))
    assert (cost.saved_bytes, cost.workspace_bytes) == (8 * 4096, 100)
    assert cost.time_s == pytest.approx(2e-3)


@pytest.mark.parametrize("levers", ["", "+recompute", "+selective"])
def test_a_point_that_did_not_fit_where_it_was_tried_first_needs_more(levers: str) -> None:
    """Also one with levers, of which nothing else was measured."""
    name, limit = f"megatron_cz{levers}", HEADER.memory_limit
    assert limit is not None
    over = replace(measure(ATTENTION, name, 65_536), outcome=OVER_LIMIT)
    m = CostModel(profile_of({"megatron_cz": 1.0}, more=[over]))
    found = [m.cost(ATTENTION, name, work(s)).workspace_bytes > limit for s in (8192, 65_536)]
    assert found == [False, True]


def test_a_head_with_levers_that_did_not_fit_needs_more() -> None:
    head, limit = HeadSpec(1024, 32_768), HEADER.memory_limit
    assert limit is not None
    row = Measurement(head_structure(head), HEAD, "", 1, 512, True, "measured", 1.0, 1.0, 0, 2**20)
    over = replace(row, strategy="tiled", seq_len=65_536, outcome=OVER_LIMIT)
    m = CostModel(profile_of({}, more=[row, over]))
    found = [m.head(head, "tiled", work(s)).workspace_bytes > limit for s in (512, 65_536)]
    assert found == [False, True]


ACROSS = replace(ATTENTION, name="layers.0.cross_attention", structure="x", keys=1)
"""Measured with as many keys as queries, as profiles do."""


def across(keys: int, queries: int = 128) -> Workload:
    return work(queries, others=((1, keys),)).of(ACROSS)


@pytest.mark.parametrize("lengths", [(128, 512, 2048, 8192), (128, 512)])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_keys_may_be_longer_or_shorter_than_where_they_were_measured(
    factor: float, lengths: Sequence[int]
) -> None:
    """Whether there are curves or few measurements."""
    rows = []
    for strategy, n in product(ATTENTION_STRATEGIES, lengths):
        prior = prior_cost(ACROSS, strategy, across(n, n), RATES)
        row = replace(measure(ATTENTION, strategy, n), structure="x")
        step_s = factor * (prior.time_s - gradient_sum_s(ACROSS, strategy, across(n, n), RATES))
        sizes = {"saved_bytes": prior.saved_bytes, "workspace_bytes": prior.workspace_bytes}
        rows.append(replace(row, forward_s=0.4 * step_s, backward_s=0.6 * step_s, **sizes))
    profile = profile_of({}, more=rows)
    m = CostModel(profile)
    for strategy, keys in product(ATTENTION_STRATEGIES, (8192, 16, 128)):
        cost = m.cost(ACROSS, strategy, across(keys))
        prior = prior_cost(ACROSS, strategy, across(keys), RATES)
        sums_s = gradient_sum_s(ACROSS, strategy, across(keys), RATES)
        assert (cost.time_s - sums_s) / (prior.time_s - sums_s) == pytest.approx(factor, rel=0.1)
        assert cost.saved_bytes == pytest.approx(prior.saved_bytes, rel=0.01)
        assert cost.workspace_bytes == pytest.approx(prior.workspace_bytes, rel=0.01)
        assert cost.comm_bytes == prior.comm_bytes
        assert (
            CostModel(profile).cost(ACROSS, strategy, across(keys)) == cost
        )  # whatever came first
