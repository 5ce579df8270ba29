"""What blocks keep on the host: taken where that is another memory, and no more than it has."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from test_planner import LONG, MACHINE, SHORT, explained, model, planner
from test_solver import random_choices

from paradyse.planning.costs import Machine
from paradyse.planning.planner import Planner
from paradyse.types import LEVERS, Plan, Point

HOST = replace(MACHINE, host_bandwidth=5e10, host_capacity_bytes=2**40)


def planner_on(machine: Machine, **options: Any) -> Planner:
    return planner(blocks=model(layers=8), machine=lambda dtype: machine, levers=LEVERS, **options)


@pytest.mark.parametrize("host_bandwidth", [None, 5e10])
def test_weights_and_optimizer_may_take_more_of_the_host_than_there_is(
    host_bandwidth: float | None,
) -> None:
    """Then blocks keep nothing there, which all plans without levers do."""
    over = replace(HOST, host_bandwidth=host_bandwidth, host_capacity_bytes=-(2**20))
    for w in (SHORT, replace(SHORT, training=False)):
        plan = planner_on(over).plan(w)
        assert not num_offloaded(plan) and plan == planner_on(MACHINE).plan(w)


def num_offloaded(plan: Plan) -> int:
    return sum(Point.parse(s).offloads for s in plan.strategies)


def on_host(p: Planner, plan: Plan) -> int:
    return sum(c[s].host_bytes for c, s in zip(p.costs(LONG), plan.strategies))


def test_one_memory_has_no_other_unless_a_plan_says_so() -> None:
    free = planner_on(MACHINE)
    low = free.least_bytes(LONG)
    tight = planner_on(MACHINE, memory_limit=low)
    assert num_offloaded(tight.plan(LONG)) == 0
    assert "lever offload by name alone" in str(explained(tight, LONG))
    assert planner_on(HOST).least_bytes(LONG) < low
    named = planner_on(MACHINE, plan="metp+offload")
    assert set(named.plan(LONG).strategies) == {"metp+offload"}
    assert named.predict(named.plan(LONG), LONG)[1] < low


def test_a_named_plan_that_makes_inputs_again_has_a_longest_length_on_a_small_host() -> None:
    """Its blocks are priced by what they keep on the host, also those of no candidate."""
    small = replace(HOST, host_capacity_bytes=2**20)
    p = planner_on(small, memory_limit=2**40)
    plan = Plan(("ulysses_z+recompute+chunked", "ulysses_z+selective") * 8)
    assert 0 < p.longest(LONG, 2**30, plan) < 2**30


def test_the_host_is_used_only_where_the_limit_asks_for_it() -> None:
    free, plain = planner_on(HOST), planner(blocks=model(layers=8))
    for w in (SHORT, LONG):
        assert free.plan(w).strategies == plain.plan(w).strategies
    need, low = free.predict(free.plan(LONG), LONG)[1], free.least_bytes(LONG)
    counts, last = [], 0.0
    for share in (0.9, 0.3, 0.0):
        p = planner_on(HOST, memory_limit=int(low + share * (need - low)))
        time_s, peak = p.predict(p.plan(LONG), LONG)
        assert peak <= low + share * (need - low) and time_s > last
        last = time_s
        counts.append(num_offloaded(p.plan(LONG)))
    assert counts[-1] > 0
    text = str(explained(p, LONG))
    assert "lever offload in" in text and "on the host: " in text and "of 1.0 TiB" in text
    forward = replace(LONG, training=False)
    assert num_offloaded(p.plan(forward)) == 0


def test_no_more_than_the_host_has() -> None:
    without = planner(blocks=model(layers=8), levers=[v for v in LEVERS if v != "offload"])
    least = without.least_bytes(LONG)
    limit = (3 * least + planner_on(HOST).least_bytes(LONG)) // 4
    wide = planner_on(HOST, memory_limit=limit)
    used = on_host(wide, wide.plan(LONG))
    assert used > 0
    last = wide.predict(wide.plan(LONG), LONG)[0]
    for share in (0.9, 0.6):
        p = planner_on(HOST, memory_limit=limit, host_memory=int(share * used))
        assert on_host(p, p.plan(LONG)) <= share * used
        time_s, peak = p.predict(p.plan(LONG), LONG)
        assert peak <= limit and time_s >= last
        last = time_s
    p = planner_on(HOST, memory_limit=limit, host_memory=1)
    with pytest.raises(ValueError, match="blocks keep .* on the host, of which a rank may use 1 B"):
        p.plan(LONG)
    assert p.longest(LONG, 2 * LONG.seq_len) < wide.longest(LONG, 2 * LONG.seq_len)
    p.ran_out(SHORT)
    assert on_host(p, p.plan(SHORT)) <= 1


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_that_keeps_as_little_on_the_host_is_faster(seed: int) -> None:
    names = ("a", "b", "c")
    choices = random_choices(seed, 3, names)
    of = {id(c): {n: replace(x, host_bytes=40 * i) for i, (n, x) in enumerate(c.items())}
          for c in choices.costs}  # fmt: skip
    choices = replace(choices, costs=[of[id(c)] for c in choices.costs])
    every = list(itertools.product(names, repeat=6))
    need = choices.smallest()[0]
    limit = need + 0.3 * (max(map(choices.peak, every)) - need)
    fitting = [p for p in every if choices.peak(p) <= limit]
    found = 0
    for host in range(0, 500, 60):
        limited = replace(choices, host_limit=host)
        plan = limited.fastest(limit)
        possible = any(choices.host_bytes(p) <= host for p in fitting)
        assert limited.feasible(limit) == possible == (plan is not None)
        if plan is None:
            continue
        found += 1
        assert limited.fits(plan, limit)
        alike = [p for p in fitting if choices.host_bytes(p) <= choices.host_bytes(plan)]
        assert choices.time_s(plan) == pytest.approx(min(map(choices.time_s, alike)), rel=1e-6)
    assert found > 0


def test_what_is_tried_all_the_same_is_within_the_host(caplog: pytest.LogCaptureFixture) -> None:
    small = replace(HOST, capacity_bytes=2**24)
    free, bound = planner_on(small), planner_on(small, host_memory=1000)
    assert on_host(free, free.plan(LONG)) > 1000
    assert on_host(bound, bound.plan(LONG)) == 0
    assert caplog.text.count("Trying it all the same") == 2


def test_after_memory_ran_out_the_smallest_plan_is_within_the_host_too() -> None:
    p = planner_on(HOST, host_memory=2**20)
    before = p.plan(LONG)
    p.ran_out(LONG)
    after = p.plan(LONG)
    assert p.predict(after, LONG)[1] < p.predict(before, LONG)[1]
    assert on_host(p, after) <= 2**20
