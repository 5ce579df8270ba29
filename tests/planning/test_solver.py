"""The exact solver against trying everything."""

from __future__ import annotations

import itertools
import random

import pytest

from paradyse.planning.solver import Choice, Counts, Group, fastest, smallest
from paradyse.planning.solver_published import published


def cost(groups: list[Group], counts: Counts) -> tuple[float, int]:
    used = [(n, c) for g, row in zip(groups, counts) for n, c in zip(row, g.choices) if n]
    saved = sum(n * c.saved_bytes for n, c in used)
    workspace = max((c.workspace_bytes for _, c in used), default=0)
    return sum(n * c.time_s for n, c in used), saved + workspace


def compositions(n: int, k: int) -> list[tuple[int, ...]]:
    return [c for c in itertools.product(range(n + 1), repeat=k) if sum(c) == n]


def random_groups(rng: random.Random) -> list[Group]:
    def choice() -> Choice:
        return Choice(rng.randint(1, 20) / 8, rng.randint(0, 30), rng.choice([1, 7, 20, 40]))

    return [
        Group(rng.randint(1, 4), tuple(choice() for _ in range(rng.randint(1, 4))))
        for _ in range(rng.randint(1, 3))
    ]


@pytest.mark.parametrize("seed", range(40))
def test_equals_exhaustive_search(seed: int) -> None:
    rng = random.Random(seed)
    groups = random_groups(rng)
    every = [
        cost(groups, c)
        for c in itertools.product(*(compositions(g.count, len(g.choices)) for g in groups))
    ]
    need, counts = smallest(groups)
    assert need == min(m for _, m in every)
    assert cost(groups, counts)[1] == need
    for budget in sorted({m for _, m in every} | {need - 1}):
        best = min((t for t, m in every if m <= budget), default=None)
        found = fastest(groups, budget)
        assert (found is None) == (best is None)
        if found is not None:
            t, m = cost(groups, found)
            assert t == pytest.approx(best)
            assert m <= budget
            assert [sum(row) for row in found] == [g.count for g in groups]


def test_no_blocks_and_no_room() -> None:
    assert fastest([], 0) == ()
    assert fastest([], -1) is None
    assert smallest([]) == (0, ())
    assert fastest([Group(2, (Choice(1.0, 5, 5),))], 14) is None
    assert fastest([Group(2, (Choice(1.0, 5, 5),))], 15) == ((2,),)


@pytest.mark.timeout(120)  # one that tried all mixes of six groups would not end
def test_a_deep_model_of_many_groups_is_solved() -> None:
    rng = random.Random(0)
    groups = [
        Group(40, tuple(Choice(rng.random(), rng.randint(1, 10**9), i) for i in range(5)))
        for _ in range(6)
    ]
    least, most = (
        smallest(groups)[0],
        sum(g.count * max(c.saved_bytes for c in g.choices) for g in groups),
    )
    for share in (0.1, 0.3, 0.5, 0.9):
        assert fastest(groups, least + share * (most - least)) is not None


@pytest.mark.parametrize("seed", range(60))
def test_never_slower_than_the_published_heuristic(seed: int) -> None:
    rng = random.Random(seed)
    layers = rng.choice([3, 12, 32])
    groups = [
        Group(
            layers,
            tuple(
                Choice(rng.uniform(1, 3), rng.randint(10**6, 10**7), rng.randint(10**6, 10**8))
                for _ in range(5)
            ),
        )
        for _ in range(2)
    ]
    least = smallest(groups)[0]
    for factor in (0.9, 1.0, 1.1, 1.5, 4.0):
        heuristic, fits = published(groups, factor * least)
        exact = fastest(groups, factor * least)
        assert (exact is None) == (factor < 1)
        if fits:
            assert exact is not None
            (fast_s, peak), (slow_s, other_peak) = cost(groups, exact), cost(groups, heuristic)
            assert peak <= factor * least and other_peak <= factor * least
            assert fast_s <= slow_s * (1 + 1e-12)
        else:
            assert cost(groups, heuristic)[1] > factor * least


def test_the_published_heuristic_by_hand() -> None:
    """Four layers; fast and large, slow and small, and one that both beat."""
    group = Group(4, (Choice(1.0, 10, 0), Choice(2.0, 4, 0), Choice(3.0, 12, 0)))
    assert published([group], 40) == (((4, 0, 0),), True)
    assert published([group], 34) == (((3, 1, 0),), True)
    assert published([group], 16) == (((0, 4, 0),), True)
    assert published([group], 15) == (((0, 4, 0),), False)
    with pytest.raises(ValueError, match=r"\[1, 3\] strategies"):
        published([group, Group(4, (Choice(1.0, 1, 0),))], 10)
