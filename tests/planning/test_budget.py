"""Plans under a memory limit that is looked at moment by moment, against all plans there are."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from paradyse.planning.budget import Choices
from paradyse.planning.costs import BlockCost, Machine

MACHINE = Machine(1e12, 1e12, 1e-5, 1e9, communicator_bytes=3)
NAMES = ("a", "b", "c")


def random_choices(seed: int, layers: int) -> Choices:
    """Two kinds of blocks that take turns, three strategies each."""
    rng = random.Random(seed)

    def cost() -> BlockCost:
        held = [rng.randrange(1, n) for n in (100, 200)]
        return BlockCost(rng.uniform(1, 3), *held, 0, left_bytes=rng.randrange(40))

    costs = [{n: cost() for n in NAMES} for _ in range(2)]
    blocks = 2 * layers
    return Choices(
        ["even", "odd"] * layers,
        [NAMES] * blocks,
        [(n,) * blocks for n in NAMES],
        costs * layers,
        [BlockCost(1.0, rng.randrange(50), rng.randrange(200), 0)],
        1000,
        rng.randrange(100),
        rng.choice((0.0, 0.1)),
        MACHINE,
    )


@pytest.mark.parametrize("seed", range(20))
def test_plans_fit_and_are_near_the_best_of_all(seed: int) -> None:
    choices = random_choices(seed, 3)
    every = list(itertools.product(NAMES, repeat=6))
    peaks = {p: choices.peak(p) for p in every}
    least, (need, smallest) = min(peaks.values()), choices.smallest()
    assert need == peaks[smallest] <= 1.1 * least
    most = max(peaks.values())
    slower = []
    for share in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0):
        limit = need + share * (most - need)
        plan = choices.fastest(limit)
        assert plan is not None and peaks[plan] <= limit
        time_s = choices.time_s(plan)
        for name in NAMES:
            alone = (name,) * 6
            assert peaks[alone] > limit or time_s <= choices.time_s(alone)
        slower.append(time_s / min(choices.time_s(p) for p in every if peaks[p] <= limit))
    assert slower[0] == pytest.approx(1)
    assert statistics.median(slower) < 1.03
    assert choices.fastest(least - 1) is None


def test_what_needs_most_room_runs_first() -> None:
    """So that little is saved while it does."""
    roomy, small = BlockCost(1.0, 10, 100, 0), BlockCost(2.0, 10, 0, 0)
    choices = Choices(
        ["block"] * 4,
        [("small", "roomy")] * 4,
        [],
        [{"roomy": roomy, "small": small}] * 4,
        (),
        0,
        0,
        0.0,
        Machine(1e12, 1e12, 1e-5, 1e9),
    )
    assert choices.fastest(140) == ("roomy",) * 4
    assert choices.fastest(139) == ("small",) * 4
    assert choices.smallest() == (40, ("small",) * 4)
