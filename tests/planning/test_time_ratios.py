"""Estimates of how far off predicted times are: shared, a variant's own, noisy, changing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from paradyse.planning.time_ratios import OWN_OF_PRIOR, OWN_OF_PROFILE, Key, Ratios, TimeRatios

KIND = "attention"
HERE, FAR = 9, 3
"""Scales."""


def key(variant: str) -> Key:
    return KIND, variant


def measured(rows: Sequence[tuple[str, int, float]], own: float = OWN_OF_PRIOR) -> Ratios:
    times = TimeRatios(own)
    for variant, scale, ratio in rows:
        times.add(key(variant), scale, ratio)
    return times.estimate()


def test_what_was_not_measured_is_as_predicted() -> None:
    assert TimeRatios(OWN_OF_PRIOR).empty
    times = measured([("metp", HERE, 2.0)])
    assert times.ratio(("mlp", "metp"), HERE) == 1
    assert times.knows(key("metp")) and not times.knows(key("ulysses_z"))


def test_little_is_made_of_one_measurement_and_much_of_many() -> None:
    once, often = (measured([("metp", HERE, 1.2)] * n) for n in (1, 8))
    assert 1.1 < once.ratio(key("metp"), HERE) < often.ratio(key("metp"), HERE) < 1.2
    assert often.ratio(key("metp"), HERE) > 1.19


def test_a_variant_that_never_ran_is_as_far_off_as_the_others() -> None:
    rows = [(v, HERE, 1.5) for v in ("metp", "ulysses_z") for _ in range(8)]
    times = measured(rows, OWN_OF_PROFILE)
    assert times.ratio(key("megatron_cz"), HERE) == pytest.approx(1.5, rel=0.06)
    assert 1.1 < times.ratio(key("megatron_cz"), FAR) < times.ratio(key("megatron_cz"), HERE)


def test_one_variant_is_off_and_at_other_lengths_too() -> None:
    rows = [(v, HERE, 2.0 if v == "metp" else 1.0) for v in ("metp", "ulysses_z")] * 8
    times = measured(rows)
    at = {v: times.ratio(key(v), HERE) for v in ("metp", "ulysses_z", "megatron_cz")}
    assert at["metp"] > 1.8 and at["ulysses_z"] < 1.1
    assert at["ulysses_z"] < at["megatron_cz"] < at["metp"]
    assert times.ratio(key("metp"), FAR) > 1.2 * times.ratio(key("ulysses_z"), FAR)


def test_what_becomes_slow_at_once_is_that_variant() -> None:
    steady = [("metp", HERE, 1.0)] * 8
    times = measured([*steady, *[("metp", HERE, 10.0)] * 2])
    assert times.ratio(key("metp"), HERE) > 2.5
    assert times.ratio(key("ulysses_z"), HERE) < 1.05
    again = measured([*steady, *[("metp", HERE, 10.0)] * 4, *[("metp", HERE, 1.0)] * 4])
    assert again.ratio(key("metp"), HERE) < 1.3


def test_order_and_ranks_do_not_matter() -> None:
    """The same measurements give the same estimate; plans of all ranks hang on it."""
    rows = [(v, s, 1 + 0.01 * s) for v in ("metp", "ulysses_z", "colossal_z") for s in range(5, 13)]
    one, other = measured(rows), measured(rows)
    for variant in ("metp", "megatron_cz"):
        for scale in range(20):
            assert one.ratio(key(variant), scale) == other.ratio(key(variant), scale)
    back = measured(rows[::-1])
    assert back.ratio(key("metp"), 7) == pytest.approx(one.ratio(key("metp"), 7), abs=2e-6)


TRUE = {"megatron_cz": 1.0, "ulysses_z": 1.1, "megatron_ts": 1.3, "metp": 1.5}
"""Seconds at every length."""


def regret(seed: int, own: float, error: float, follows: bool, steps: int = 100) -> float:
    """Share of time lost by choosing by predictions, or by those and noisy steps.

    Args:
        error: standard deviation of the predictions' logarithms; ``own``: what it is taken for.
    """
    rng, times, lost = random.Random(seed), TimeRatios(own), 0.0
    predicted = {v: t * rng.lognormvariate(0, error) for v, t in TRUE.items()}
    for _ in range(steps):
        known = times.estimate()
        taken = min(TRUE, key=lambda v: predicted[v] * known.ratio(key(v), HERE))
        lost += TRUE[taken] - min(TRUE.values())
        if follows:
            disturbed = 1.6 if rng.random() < 0.05 else 1.0
            seconds = TRUE[taken] * rng.lognormvariate(0.1, 0.1) * disturbed
            times.add(key(taken), HERE, seconds / predicted[taken])
    return lost / steps


@pytest.mark.parametrize(
    ("own", "error", "share", "more"),
    [(OWN_OF_PROFILE, 0.05, 1.0, 0.01), (OWN_OF_PRIOR, 0.3, 0.7, 0.0)],
)
def test_what_is_lost_by_choosing(own: float, error: float, share: float, more: float) -> None:
    """By noisy steps as well as predictions, against by predictions alone: the less, the more these
    are off; where they are right, measuring costs little."""
    seeds = range(100)
    trusted, followed = (
        sum(regret(s, own, error, follows) for s in seeds) / len(seeds) for follows in (False, True)
    )
    assert 0 < followed < share * trusted + more, (followed, trusted)
