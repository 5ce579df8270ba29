"""Of plans that are about as fast: one strategy for all blocks, else the previous plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_planner import NORM, SHORT, model, planner

from paradyse.planning.corrections import Corrections, scale_of
from paradyse.planning.costs import NOTHING, BlockCost
from paradyse.planning.planner import Planner
from paradyse.planning.solver import Choices, Points
from paradyse.planning.steady import is_mixed, of_one_strategy, steady
from paradyse.planning.time_ratios import OF_PRIOR, TimeRatios
from paradyse.types import ATTENTION_STRATEGIES, HEAD, Plan, Workload

NAMES = ("megatron_ts", "megatron_cz", "metp")
MIXED: Points = ("megatron_ts", "megatron_cz")
TS: Points = ("megatron_ts",) * 2
CZ: Points = ("megatron_cz",) * 2


def choices(attention: tuple[float, ...], mlp: tuple[float, ...], saved: int = 0) -> Choices:
    """Of one layer: seconds by strategy, and bytes that ``megatron_cz`` saves."""
    costs = [
        {
            s: BlockCost(t, saved * (s == "megatron_cz"), 0, 0)
            for s, t in zip(NAMES, of, strict=True)
        }
        for of in (attention, mlp)
    ]
    return Choices([NAMES] * 2, costs, NOTHING, 0, 0, 0.0, 0)


@pytest.mark.parametrize(("share", "taken"), [(0.0, MIXED), (0.04, MIXED), (0.06, CZ), (0.5, CZ)])
def test_two_strategies_have_to_gain_more_than_the_share(share: float, taken: Points) -> None:
    of = choices((1.0, 1.1, 3.0), (1.3, 1.0, 3.0))  # mixed 2.0, cz 2.1, ts 2.3
    assert steady(MIXED, None, [TS, CZ], of, 1e9, share, of.time_s) == taken


def test_one_that_does_not_fit_is_not_taken() -> None:
    of = choices((1.0, 1.1, 3.0), (1.3, 1.0, 3.0), saved=100)
    assert steady(MIXED, None, [TS, CZ], of, 150, 0.1, of.time_s) == MIXED
    assert steady(MIXED, None, [TS, CZ], of, 150, 0.2, of.time_s) == TS


def test_the_previous_plan_stays_among_its_like() -> None:
    of = choices((1.0, 1.1, 3.0), (1.3, 1.0, 3.0))
    assert steady(MIXED, TS, [TS, CZ], of, 1e9, 0.2, of.time_s) == TS
    assert steady(MIXED, TS, [TS, CZ], of, 1e9, 0.1, of.time_s) == CZ
    other: Points = ("megatron_cz", "megatron_ts")  # 2.4, a mix too
    assert steady(MIXED, other, [TS, CZ], of, 1e9, 0.3, of.time_s) == CZ
    assert steady(MIXED, other, [], of, 1e9, 0.3, of.time_s) == other
    assert steady(MIXED, other, [], of, 1e9, 0.1, of.time_s) == MIXED


def test_plans_of_one_strategy() -> None:
    blocks = model(1, infeasible={"ulysses_z": NORM})
    fastest: Points = ("megatron_ts", "metp")
    names = [NAMES, NAMES]
    found = of_one_strategy(fastest, names, blocks, ("megatron_ts", "megatron_cz", "ulysses_z"))
    # No attention has ulysses_z here: it stays, and the MLP's of ulysses_z is megatron_cz's.
    assert found == [TS, CZ, ("megatron_ts", "megatron_cz")]
    head = of_one_strategy((*fastest, "tiled"), names, blocks, ("megatron_cz",))
    assert head == [(*CZ, "tiled")]
    assert not of_one_strategy(("megatron_ts+recompute", "metp"), names, blocks, ("megatron_cz",))


def test_smoothing_of_nothing_takes_the_fastest() -> None:
    """Where one is faster for attention and another for MLPs."""
    p, calm = planner(smoothing=0), planner(smoothing=1e9)
    best, alike = p.plan(SHORT), calm.plan(SHORT)
    assert p.predict(best, SHORT)[0] <= p.predict(alike, SHORT)[0]
    static = [calm.static(s, SHORT) for s in ATTENTION_STRATEGIES]
    assert calm.variants(alike) in [calm.variants(plan) for plan in static]


def test_which_plans_are_mixed() -> None:
    blocks = model(1, infeasible={"ulysses_z": NORM})
    plans = {
        ("megatron_ts", "megatron_ts"): False,
        ("megatron_cz+recompute", "megatron_cz"): False,
        ("megatron_ts", "metp"): True,
        ("megatron_cz", "ulysses_z"): False,  # of an MLP they are one
        ("metp", "ulysses_z"): False,  # which no attention can have here
    }
    assert {plan: is_mixed(blocks, plan) for plan in plans} == plans


def slow_mix(p: Planner, at: Workload) -> Plan:
    """The mix that ``p`` plans ``at``, which then turns out to take half as long again, while
    attention among its like takes what was predicted."""
    mixed = p.plan(at)
    assert is_mixed(p.blocks, mixed.strategies)
    keys = p.time_keys(mixed)
    assert {k for k in keys if k[0] != HEAD}.isdisjoint(p.keys(mixed))
    before, ratios = p.predict(mixed, at)[0], TimeRatios(OF_PRIOR)
    for key, parts in zip(keys, (c[s].parts for c, s in zip(p.costs(at), mixed.strategies))):
        for _ in range(8):
            ratios.add(key, scale_of(at), 1.5, parts)
            ratios.add((key[0], "megatron_cz"), scale_of(at), 1.0, parts)
    p.correct(Corrections(times=ratios.estimate()))
    assert p.predict(mixed, at)[0] > 1.3 * before
    return mixed


BETWEEN = replace(SHORT, seq_len=4096)
"""Where one strategy is faster for attention and another for MLPs."""


@pytest.mark.parametrize("again", [False, True], ids=["", "recompute"])
def test_a_mix_that_was_slower_than_predicted_is_left(again: bool) -> None:
    """What is known of mixes says little of the plans of one strategy; with levers too."""
    blocks = [replace(b, recompute=again) for b in model()]
    p = planner(blocks=blocks, levers=["recompute"] * again, smoothing=0)
    mixed = slow_mix(p, BETWEEN)
    assert again == ("+recompute" in mixed.strategies[0])
    after = p.plan(BETWEEN)
    assert not is_mixed(p.blocks, after.strategies)
    assert p.predict(after, BETWEEN)[0] < p.predict(mixed, BETWEEN)[0]


def test_other_mixes_are_expected_to_be_slower_too() -> None:
    p = planner(smoothing=0)
    plain, mixed = (p.costs(BETWEEN, of)[0]["metp"].time_s for of in (False, True))
    assert plain == mixed  # nothing is known yet
    slow_mix(p, BETWEEN)
    plain, mixed = (p.costs(BETWEEN, of)[0]["metp"].time_s for of in (False, True))
    assert mixed > 1.1 * plain
