"""The exact choice under a limit on the most held at any moment, against all plans there are."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from paradyse.planning.costs import NOTHING, BlockCost
from paradyse.planning.solver import Choices

NAMES = ("a", "b", "c", "d", "e")


def choices_of(
    table: Sequence[dict[str, BlockCost]], layers: int, rest: BlockCost = NOTHING
) -> Choices:
    """``layers`` times the blocks of ``table``, which take turns."""
    costs = [*table] * layers
    return Choices([tuple(c) for c in costs], costs, rest, 1000, 0, 0.0, 3)


def random_choices(seed: int, layers: int, names: Sequence[str], kinds: int = 2) -> Choices:
    """What is faster tends to need more memory."""
    rng = random.Random(seed)

    def cost(i: int, left: int) -> BlockCost:
        held = [rng.randrange(1, n) for n in (100 + 30 * (len(names) - i), 200)]
        return BlockCost(rng.uniform(1, 2 + i), *held, 0, left_bytes=left)

    lefts = [rng.randrange(40) for _ in range(kinds)]
    table = [{n: cost(i, left) for i, n in enumerate(names)} for left in lefts]
    rest = BlockCost(1.0, rng.randrange(50), rng.randrange(200), 0)
    return replace(
        choices_of(table, layers, rest),
        floor_bytes=rng.randrange(100),
        margin=rng.choice((0.0, 0.1)),
    )


@pytest.mark.parametrize("seed", range(20))
def test_equals_exhaustive_search(seed: int) -> None:
    choices = random_choices(seed, 3, NAMES[:3])
    every = {p: choices.peak(p) for p in itertools.product(NAMES[:3], repeat=6)}
    need, smallest = choices.smallest()
    assert need == every[smallest] == min(every.values())
    assert choices.fastest(need - 1) is None
    most = max(every.values())
    for share in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0):
        limit = need + share * (most - need)
        plan = choices.fastest(limit)
        assert plan is not None and every[plan] <= limit
        best = min(choices.time_s(p) for p in every if every[p] <= limit)
        assert choices.time_s(plan) == pytest.approx(best, rel=1e-7)


def counted(choices: Choices, points: Sequence[str]) -> int:
    """The peak, where the most that is fetched ahead for any block is there at every moment."""
    costs = choices.chosen(points)
    ahead = max(c.ahead_bytes for c in costs)
    alone = replace(choices, costs=[{p: replace(c, ahead_bytes=0)} for p, c in zip(points, costs)])
    rest = replace(choices.rest, saved_bytes=choices.rest.saved_bytes + ahead)
    return replace(alone, rest=rest).peak(points)


@pytest.mark.parametrize("seed", range(20))
def test_weights_fetched_ahead_are_there_while_a_neighbour_runs(seed: int) -> None:
    """Of three points one fetches all weights, one some and one none."""
    choices, rng = random_choices(seed, 3, NAMES[:3]), random.Random(seed)
    of = {n: rng.randrange(m) if m else 0 for n, m in zip(NAMES, (300, 90, 0))}
    costs = [{n: replace(c[n], ahead_bytes=of[n]) for n in NAMES[:3]} for c in choices.costs[:2]]
    choices = replace(choices, costs=costs * 3, names=[NAMES[:3]] * 6)
    every = {p: counted(choices, p) for p in itertools.product(NAMES[:3], repeat=6)}
    assert all(choices.peak(p) <= most for p, most in every.items())
    need, smallest = choices.smallest()
    assert need == choices.peak(smallest) <= min(every.values())
    for limit in (need - 1, need, need + 40, need + 120, need + 400, max(every.values())):
        plan = choices.fastest(limit)
        assert (plan is not None) == choices.feasible(limit) == (limit >= need)
        fit = [choices.time_s(p) for p, most in every.items() if most <= limit]
        if plan is not None:
            assert choices.peak(plan) <= limit
            assert choices.time_s(plan) <= min(fit, default=math.inf) * (1 + 1e-7)


def test_what_comes_for_a_block_is_beside_its_neighbours() -> None:
    """Not beside itself: it has taken it."""
    wide, narrow = BlockCost(1.0, 10, 0, 0, ahead_bytes=50), BlockCost(1.0, 10, 100, 0)
    assert choices_of([{"a": wide}, {"a": narrow}], 1).peak("aa") == 1003 + 20 + 100 + 50
    assert choices_of([{"a": narrow}, {"a": narrow}, {"a": wide}], 1).peak("aaa") == 1003 + 20 + 150
    costs = [replace(wide, workspace_bytes=100), NOTHING]
    assert choices_of([{"a": c} for c in costs], 1).peak("aa") == 1003 + 10 + 100


def test_no_blocks_and_no_time() -> None:
    nothing = choices_of([], 0)
    assert nothing.smallest() == (1003, ())
    assert (nothing.fastest(1003), nothing.fastest(1002)) == ((), None)
    free = choices_of([{"a": BlockCost(0.0, 10, 0, 0), "b": BlockCost(0.0, 9, 50, 0)}], 2)
    assert (free.fastest(1023), free.fastest(1022)) == (("a", "a"), None)


def test_what_needs_most_room_runs_first() -> None:
    """So that little is saved while it does."""
    roomy, small = BlockCost(1.0, 10, 100, 0), BlockCost(2.0, 10, 0, 0)
    choices = choices_of([{"small": small, "roomy": roomy}], 4)
    assert choices.fastest(1143) == ("roomy",) * 4
    assert choices.fastest(1142) == ("roomy", "roomy", "roomy", "small")
    assert choices.fastest(1113) == ("roomy", "small", "small", "small")
    assert choices.fastest(1112) == ("small",) * 4
    assert choices.smallest() == (1043, ("small",) * 4)


@pytest.mark.timeout(120)
def test_a_deep_model_of_many_kinds_is_solved() -> None:
    """And not slower than strategies for whole kinds of blocks, where these fit."""
    choices = random_choices(0, 40, NAMES, kinds=6)
    least, most = choices.smallest()[0], choices.peak(choices.fastest(10**9) or ())
    for share in (0.1, 0.5, 0.9):
        limit = least + share * (most - least)
        plan = choices.fastest(limit)
        assert plan is not None and choices.peak(plan) <= limit
        for name in NAMES:
            alone = (name,) * 240
            assert choices.peak(alone) > limit or choices.time_s(plan) <= choices.time_s(alone)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return import_module("choice").published


@pytest.mark.parametrize("seed", range(30))
def test_never_slower_than_the_published_heuristic(seed: int, published: Any) -> None:
    layers = random.Random(seed).choice([3, 12, 24])
    choices = random_choices(seed, layers, NAMES)
    least, most = choices.smallest()[0], choices.peak(choices.fastest(10**9) or ())
    for share in (0.0, 0.1, 0.5, 1.0):
        limit = least + share * (most - least)
        heuristic = published(choices, limit, layers)
        exact = choices.fastest(limit)
        assert exact is not None and choices.peak(exact) <= limit
        if choices.peak(heuristic) <= limit:
            assert choices.time_s(exact) <= choices.time_s(heuristic) * (1 + 1e-7)


def test_the_published_heuristic_by_hand(published: Any) -> None:
    """Four layers; fast and large, slow and small, and one that both beat."""
    costs = {s: BlockCost(t, n, 0, 0) for s, t, n in (("a", 1, 10), ("b", 2, 4), ("c", 3, 12))}
    choices = choices_of([costs], 4)
    assert published(choices, 1043, 4) == ("a",) * 4
    assert published(choices, 1037, 4) == ("a", "a", "a", "b")
    assert published(choices, 1019, 4) == ("b",) * 4
    assert published(choices, 1018, 4) == ("b",) * 4


def plain_search(choices: Choices, limit: float) -> float | None:
    """The least time by the recursion alone: all undominated choices for the last blocks, one block
    after the other, without a bound and without counts."""
    room, left = choices._room(limit, 0), 0
    states = [(0.0, choices.rest.workspace_bytes)]
    for names, costs in zip(reversed(choices.names), reversed(choices.costs)):
        found = sorted(
            (c.saved_bytes + max(held, left + c.workspace_bytes), time + c.time_s)
            for time, held in states
            for c in (costs[n] for n in names)
        )
        states = []
        for held, time in found:
            if held <= room and (not states or time < states[-1][0]):
                states.append((time, held))
        left += costs[names[0]].left_bytes
    return min((t for t, _ in states), default=None)


@pytest.mark.parametrize("seed", range(40))
def test_deep_models_are_solved_as_by_the_plain_recursion(seed: int) -> None:
    """Points in threes as levers make them: as it is, less kept and as much held, less of both;
    and one last block of its own, the head."""
    rng = random.Random(seed)
    layers, unsharded = rng.choice([4, 9, 16]), seed % 4 == 0

    def points(left: int) -> dict[str, BlockCost]:
        found = {}
        for name in NAMES[: rng.randrange(1, 4)]:
            time, saved, work = rng.randrange(4, 40), rng.randrange(20, 60), rng.randrange(1, 80)
            kept = rng.randrange(1, 8)
            found[name] = BlockCost(time, saved, work, 0, left)
            found[f"{name}+recompute"] = BlockCost(
                time + rng.randrange(1, 20), kept, saved + work - kept, 0, left
            )
            found[f"{name}+tiled"] = BlockCost(
                time + rng.randrange(1, 24), kept, rng.randrange(1, 20), 0, left
            )
        return found

    kinds = [points(rng.randrange(30) * unsharded) for _ in range(rng.randrange(1, 4))]
    head = points(rng.randrange(30) * unsharded)
    costs = [*kinds * layers, head]
    rest = BlockCost(1.0, 5, rng.randrange(60), 0)
    choices = Choices([tuple(c) for c in costs], costs, rest, 1000, 0, 0.0, 3)
    least, most = choices.smallest()[0], choices.peak(choices.fastest(10**9) or ())
    for share in (0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95):
        limit = least + int(share * (most - least))
        plan = choices.fastest(limit)
        assert plan is not None and choices.peak(plan) <= limit
        want = plain_search(choices, limit)
        assert want is not None
        assert choices.time_s(plan) - rest.time_s == pytest.approx(want, rel=1e-9)
    assert plain_search(choices, least - 1) is None and choices.fastest(least - 1) is None


def paired_choices(seed: int, layers: int) -> Choices:
    """Attention that may run again and make the MLP's input, MLPs that may keep that alone."""
    rng = random.Random(seed)

    def points(left: int, levers: Sequence[str]) -> dict[str, BlockCost]:
        found = {}
        for name in NAMES[: rng.randrange(1, 3)]:
            found[name] = BlockCost(rng.uniform(4, 9), rng.randrange(30, 60), 20, 0, left)
            for lever in levers:
                held = rng.randrange(10, 90)
                cost = BlockCost(rng.uniform(6, 12), rng.randrange(12, 20), held, 0, left)
                found[f"{name}+{lever}"] = cost
        return found

    left = rng.randrange(20) * (seed % 2)
    kinds = [points(left, ["recompute", "selective"]), points(left, ["recompute", "tiled"])]
    choices = replace(choices_of(kinds, layers), rest=BlockCost(1.0, 5, rng.randrange(60), 0))
    return replace(choices, inputs=(0, 12) * layers)


@pytest.mark.parametrize("seed", range(12))
def test_pairs_are_chosen_together(seed: int) -> None:
    choices = paired_choices(seed, 2)
    every = {p: choices.peak(p) for p in itertools.product(*choices.names)}
    need, smallest = choices.smallest()
    assert need == every[smallest] == min(every.values())
    assert choices.fastest(need - 1) is None
    most = max(every.values())
    for share in (1.0, 0.7, 0.5, 0.3, 0.1, 0.0):
        limit = need + share * (most - need)
        plan = choices.fastest(limit)
        assert plan is not None and every[plan] <= limit
        best = min(choices.time_s(p) for p in every if every[p] <= limit)
        assert choices.time_s(plan) == pytest.approx(best, rel=1e-7)


def test_an_input_that_is_made_again_is_not_kept() -> None:
    attention = {"a": BlockCost(1.0, 50, 5, 0), "a+recompute": BlockCost(2.0, 10, 45, 0)}
    mlp = {"b": BlockCost(1.0, 60, 5, 0), "b+tiled": BlockCost(2.0, 10, 8, 0)}
    apart = choices_of([attention, mlp], 1)
    pair = replace(apart, inputs=(0, 10))
    for points in (("a", "b"), ("a", "b+tiled"), ("a+recompute", "b")):
        assert pair.chosen(points) == apart.chosen(points)
    first, second = pair.chosen(("a+recompute", "b+tiled"))
    assert first == attention["a+recompute"]
    assert (second.saved_bytes, second.workspace_bytes) == (0, 8 + 50)
