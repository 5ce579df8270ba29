"""What blocks cause of a step in which they wait for each other's weights."""

from __future__ import annotations

import pytest

from paradyse.planning.attribution import ALL_FROM, caused_s
from paradyse.planning.costs import BlockCost, TimeParts


def cost(parts: TimeParts, time_s: float | None = None) -> BlockCost:
    return BlockCost(sum(parts) if time_s is None else time_s, 0, 0, 0, parts=parts)


def test_without_weights_on_their_way_what_a_block_took_is_its_own() -> None:
    costs = [cost(TimeParts(compute_s=1.0)), cost(TimeParts(attention_s=3.0, exchange_s=1.0))]
    assert caused_s([2.0, 1.0], costs) == [2.0, 1.0]


@pytest.mark.parametrize("weights_s", [0.1, 0.5, 9.0])
def test_the_sum_stays(weights_s: float) -> None:
    costs = [cost(TimeParts(1.0, weights_s=weights_s)), cost(TimeParts(2.0), 1.5)]
    took = [5.0, 1.0]
    caused = caused_s(took, costs)
    assert sum(caused) == pytest.approx(6.0)
    weights = weights_s / (3.0 + weights_s)
    alone = [6.0 * c.time_s / sum(c.time_s for c in costs) for c in costs]
    share = min(1.0, weights / ALL_FROM)
    want = [(1 - share) * a + share * b for a, b in zip(took, alone, strict=True)]
    assert caused == pytest.approx(want)


def test_of_two_strategies_whose_mix_is_slower_than_either() -> None:
    """As it was measured, in milliseconds of a layer: the mix took 133, the one 109, the other 121.
    By what blocks took it seems to take 92."""
    gathers_little = [TimeParts(23, 8, 0, 23, 3), TimeParts(27, 0, 0, 23, 3)]
    gathers_much = [TimeParts(22, 8, 31, 0, 31), TimeParts(23, 0, 0, 0, 58)]
    of = {}
    for name, parts, took in (
        ("megatron_ts", gathers_little, [57.0, 53.0]),
        ("megatron_cz", gathers_much, [86.0, 35.0]),
    ):
        hidden = [min(p.weights_s, p.compute_s) for p in parts]
        costs = [cost(p, sum(p) - h) for p, h in zip(parts, hidden, strict=True)]
        of[name] = caused_s(took, costs)
    assert sum(of["megatron_ts"]) == pytest.approx(110)
    assert of["megatron_ts"][0] + of["megatron_cz"][1] > 110
    assert of["megatron_cz"][0] < 70


def test_nothing_was_predicted() -> None:
    assert caused_s([1.0, 2.0], [cost(TimeParts()), cost(TimeParts())]) == [1.0, 2.0]
    assert caused_s([], []) == []
