"""Estimates of how far off predicted times are: shared, a variant's own, noisy, changing."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from unittest.mock import patch

import pytest

from paradyse.planning import time_ratios
from paradyse.planning.costs import TimeParts
from paradyse.planning.time_ratios import (
    MIXED,
    OF_PRIOR,
    OF_PROFILE,
    Errors,
    Key,
    Ratios,
    TimeRatios,
)

KIND = "attention"
HERE, FAR = 9, 3
"""Scales."""


def key(variant: str) -> Key:
    return KIND, variant


PARTS = {
    "megatron_cz": TimeParts(compute_s=3, attention_s=2, ring_s=1, weights_s=2),
    "metp": TimeParts(compute_s=4, attention_s=2, ring_s=1, exchange_s=1, weights_s=1),
    "ulysses_z": TimeParts(compute_s=3, attention_s=2, exchange_s=2, weights_s=2),
    "megatron_ts": TimeParts(compute_s=3, attention_s=2, exchange_s=3),
}
"""Of the predicted times, about as of 2,000 tokens on links of limited rate."""


def measured(rows: Sequence[tuple[str, int, float]], errors: Errors = OF_PRIOR) -> Ratios:
    times = TimeRatios(errors)
    for variant, scale, ratio in rows:
        times.add(key(variant), scale, ratio, PARTS[variant.removesuffix(MIXED)])
    return times.estimate()


def ratio_of(times: Ratios, variant: str, scale: int = HERE) -> float:
    return times.ratio(key(variant), scale, PARTS[variant.removesuffix(MIXED)])


def test_what_was_not_measured_is_as_predicted() -> None:
    assert TimeRatios(OF_PRIOR).empty
    times = measured([("metp", HERE, 2.0)])
    assert times.ratio(("mlp", "metp"), HERE) == 1
    assert times.knows(key("metp")) and not times.knows(key("ulysses_z"))


def test_little_is_made_of_one_measurement_and_much_of_many() -> None:
    once, often = (measured([("metp", HERE, 1.2)] * n) for n in (1, 8))
    assert 1.1 < ratio_of(once, "metp") < ratio_of(often, "metp") < 1.2
    assert ratio_of(often, "metp") > 1.19


def test_a_variant_that_never_ran_is_as_far_off_as_the_others() -> None:
    rows = [(v, HERE, 1.5) for v in ("metp", "ulysses_z") for _ in range(8)]
    times = measured(rows, OF_PROFILE)
    assert ratio_of(times, "megatron_cz") == pytest.approx(1.5, rel=0.06)
    assert 1.1 < ratio_of(times, "megatron_cz", FAR) < ratio_of(times, "megatron_cz")


def test_one_variant_is_off_and_at_other_lengths_too() -> None:
    rows = [(v, HERE, 2.0 if v == "metp" else 1.0) for v in ("metp", "ulysses_z")] * 8
    times = measured(rows)
    at = {v: ratio_of(times, v) for v in ("metp", "ulysses_z", "megatron_cz")}
    assert at["metp"] > 1.8 and at["ulysses_z"] < 1.1
    assert at["ulysses_z"] < at["megatron_cz"] < at["metp"]
    assert ratio_of(times, "metp", FAR) > 1.2 * ratio_of(times, "ulysses_z", FAR)


def test_variants_that_are_made_of_the_same_parts_are_wrong_alike() -> None:
    """Weights that hide less than was thought: so they will where another variant gathers them."""
    rows = [("megatron_cz", HERE, 1.3), ("megatron_ts", HERE, 1.0)] * 4
    times = measured(rows)
    at = {v: ratio_of(times, v) for v in PARTS}
    assert at["megatron_ts"] < 1.05 and 1.2 < at["megatron_cz"] < 1.3
    assert (at["metp"] - at["megatron_ts"]) > 0.4 * (at["megatron_cz"] - at["megatron_ts"])
    more = TimeParts(compute_s=3, attention_s=2, ring_s=1, weights_s=9)
    assert times.ratio(key("metp"), HERE, more) > at["metp"]


def test_who_does_the_same_and_more_is_wrong_alike() -> None:
    """What is ``megatron_cz``'s own is ``metp``'s, and its own with levers."""
    rows = [("megatron_cz", HERE, 1.5), ("ulysses_z", HERE, 1.0)] * 8
    times, parts = measured(rows), PARTS["ulysses_z"]  # of all alike
    at = {v: times.ratio(key(v), HERE, parts) for v in (*PARTS, "megatron_cz+recompute")}
    own = at["megatron_cz"] - at["megatron_ts"]
    assert own > 0.1
    for variant in ("metp", "megatron_cz+recompute"):
        assert at["megatron_ts"] + 0.7 * own < at[variant] < at["megatron_cz"]


@pytest.mark.parametrize("errors", [OF_PRIOR, OF_PROFILE], ids=["prior", "profile"])
def test_what_mixes_take_says_little_of_what_one_strategy_takes(errors: Errors) -> None:
    """Where lengths before and behind are as predicted; and it says much of other mixes."""
    rows = [(v, scale, 1.0) for v in PARTS for scale in (HERE - 1, HERE + 1)]
    mixed = [(v + MIXED, HERE, 1.2) for v in ("megatron_ts", "megatron_cz")]
    times = measured([*rows, *mixed] * 4, errors)
    at = {v: ratio_of(times, v) for v in ("megatron_cz", "megatron_cz+mixed", "ulysses_z+mixed")}
    assert at["megatron_cz"] < 1.1 < 1.13 < at["megatron_cz+mixed"] < 1.2
    assert at["megatron_cz+mixed"] > 1.07 * at["megatron_cz"]
    assert at["ulysses_z+mixed"] > 1.05


def test_what_becomes_slow_at_once_is_that_variant() -> None:
    steady = [("metp", HERE, 1.0)] * 8
    times = measured([*steady, *[("metp", HERE, 10.0)] * 2])
    assert ratio_of(times, "metp") > 2.5
    assert ratio_of(times, "ulysses_z") < 1.05
    again = measured([*steady, *[("metp", HERE, 10.0)] * 4, *[("metp", HERE, 1.0)] * 4])
    assert ratio_of(again, "metp") < 1.3


def test_order_and_ranks_do_not_matter() -> None:
    """The same measurements give the same estimate; plans of all ranks hang on it."""
    rows = [
        (v, s, 1 + 0.01 * s) for v in ("metp", "ulysses_z", "megatron_ts") for s in range(5, 13)
    ]
    one, other = measured(rows), measured(rows)
    for variant in ("metp", "megatron_cz"):
        for scale in range(20):
            assert ratio_of(one, variant, scale) == ratio_of(other, variant, scale)
    back = measured(rows[::-1])
    assert ratio_of(back, "metp", 7) == pytest.approx(ratio_of(one, "metp", 7), abs=2e-6)


TRUE = {"megatron_cz": 1.0, "ulysses_z": 1.1, "megatron_ts": 1.3, "metp": 1.5}
"""Seconds at every length."""


def choices(
    rng: random.Random,
    true: Mapping[str, float],
    predicted: Mapping[str, float],
    errors: Errors,
    follows: bool = True,
    steps: int = 100,
) -> list[str]:
    """The variants of so many steps, chosen by ``predicted`` seconds, or by those and noisy steps.

    Args:
        true: seconds of each variant.
        errors: what predictions are taken to be wrong of.
    """
    times, taken = TimeRatios(errors), list[str]()
    for _ in range(steps):
        known = times.estimate()
        best = min(true, key=lambda v: predicted[v] * ratio_of(known, v))
        taken.append(best)
        if follows:
            disturbed = 1.6 if rng.random() < 0.05 else 1.0
            seconds = true[best] * rng.lognormvariate(0.1, 0.1) * disturbed
            times.add(key(best), HERE, seconds / predicted[best], PARTS[best])
    return taken


def regret(seed: int, errors: Errors, error: float, follows: bool) -> float:
    """Share of time lost by choosing; ``error``: standard deviation of predictions' logarithms."""
    rng = random.Random(seed)
    predicted = {v: t * rng.lognormvariate(0, error) for v, t in TRUE.items()}
    taken = choices(rng, TRUE, predicted, errors, follows)
    return statistics.fmean(TRUE[v] for v in taken) - min(TRUE.values())


@pytest.mark.broad(but="errors1-0.3-0.7-0.0")
@pytest.mark.parametrize(
    ("errors", "error", "share", "more"),
    [(OF_PROFILE, 0.05, 1.0, 0.01), (OF_PRIOR, 0.3, 0.7, 0.0)],
)
def test_what_is_lost_by_choosing(errors: Errors, error: float, share: float, more: float) -> None:
    """By noisy steps as well as predictions, against by predictions alone: the less, the more these
    are off; where they are right, measuring costs little."""
    seeds = range(100)
    trusted, followed = (
        sum(regret(s, errors, error, follows) for s in seeds) / len(seeds)
        for follows in (False, True)
    )
    assert 0 < followed < share * trusted + more, (followed, trusted)


def steps_under_metp(seed: int, related: float) -> int:
    """Where ``metp`` is a little slower than ``megatron_cz``, and its prediction as wrong."""
    rng, true = random.Random(seed), TRUE | {"metp": 1.08}
    predicted = {v: t * rng.lognormvariate(0, 0.05) for v, t in TRUE.items()}
    metp = true["metp"] * predicted["megatron_cz"] / true["megatron_cz"]
    predicted["metp"] = metp * rng.lognormvariate(0, 0.05)
    with patch.object(time_ratios, "OWN_OF_RELATED", related):
        return choices(rng, true, predicted, OF_PROFILE).count("metp")


def test_noise_of_one_does_not_lead_to_another_that_does_the_same_and_more() -> None:
    apart, related = (
        sum(steps_under_metp(seed, r) for seed in range(30))
        for r in (0.0, time_ratios.OWN_OF_RELATED)
    )
    assert related < apart / 2, (related, apart)
