"""Choices by counts, against all counts there are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from paradyse.planning import knapsack
from paradyse.planning.knapsack import Kind, fill, price_of


def kind(*points: tuple[int, int]) -> Kind:
    """Of (time, bytes saved) each."""
    time, saved = (np.array(x, np.int64) for x in zip(*points))
    return Kind(tuple(map(str, range(len(points)))), time, saved, np.zeros_like(time), 0)


def random_kind(rng: random.Random) -> Kind:
    """What is faster tends to save more; some points are beaten, some lie on one line."""
    return kind(*((rng.randrange(1, 30), rng.randrange(1, 30)) for _ in range(rng.randrange(1, 6))))


def splits(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to share ``count`` among so many ``parts``."""
    for cuts in itertools.combinations(range(count + parts - 1), parts - 1):
        ends = (-1, *cuts, count + parts - 1)
        yield tuple(b - a - 1 for a, b in itertools.pairwise(ends))


def by_hand(
    kinds: Sequence[Kind], counts: Sequence[int], room: int, states: Sequence[tuple[int, int]]
) -> int | None:
    """The least time of all."""
    found = set(states)
    for of, count in zip(kinds, counts):
        ways = [np.array(w) for w in splits(count, len(of.points))]
        adds = {(int(w @ of.time), int(w @ of.saved)) for w in ways}
        found = {(a + c, b + d) for a, b in found for c, d in adds}
    return min((t for t, held in found if held <= room), default=None)


@pytest.mark.parametrize("seed", range(40))
def test_equals_all_counts(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [random_kind(rng) for _ in range(rng.randrange(1, 4))]
    counts = [rng.randrange(0, 6) for _ in kinds]
    states = sorted((rng.randrange(40), rng.randrange(40)) for _ in range(3))
    given = tuple(np.array(x, np.int64) for x in zip(*states))
    for room in (10, 60, 120, 200, 500):
        want = by_hand(kinds, counts, room, states)
        found = fill(kinds, counts, room, given, 10**6)
        assert (found.time if found else None) == want
        rounded = fill(kinds, counts, room, given, 10**6, exact=False)
        assert rounded is None or (want is not None and rounded.time >= want)
        if found is None:
            continue
        assert [int(n.sum()) for n in found.taken] == counts
        time, held = states[found.state]
        assert time + sum(int(n @ k.time) for n, k in zip(found.taken, kinds)) == found.time
        assert held + sum(int(n @ k.saved) for n, k in zip(found.taken, kinds)) <= room
        assert fill(kinds, counts, room, given, found.time) is None  # nothing beats it


def test_the_price_splits_one_kind() -> None:
    """By hand: 3 blocks of (1, 10) or (4, 4), half a unit of time a byte; 2 of (1, 5) or (6, 0)."""
    kinds = [kind((1, 10), (4, 4)), kind((1, 5), (6, 0))]
    assert price_of(kinds, [3, 2], 40).rate == 0.0
    price = price_of(kinds, [3, 2], 30)
    assert price.rate == 0.5 and tuple(price.split) == (0, 0, 1)
    price = price_of(kinds, [3, 2], 20)
    assert price.rate == 1.0 and tuple(price.split) == (1, 0, 1)


def test_too_much_to_look_at_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knapsack, "MOST_STATES", 4)
    line = kind(*((10 + i, 10 - i) for i in range(6)))  # all points are equally good
    given = np.zeros(1, np.int64), np.zeros(1, np.int64)
    with pytest.raises(OverflowError, match="nearly as good"):
        fill([line], [9], 60, given, 10**6)
