"""Ways of groups, as a planner predicts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paradyse.mixed.ways import Way
from paradyse.planning.planner import Planner
from paradyse.types import Plan, Workload

LOADS = 6
"""How many loads plans are asked for: the most tokens that fit, half of them, and so on."""
SHORTEST = 64
"""Tokens of the first length, after one, at which a plan's time is asked for."""


def ways_of(
    planner: Planner, workload: Workload, most_tokens: int, least_s: float = 0.0
) -> list[Way]:
    """How a group may compute sequences packed into one: a way for each plan of ``planner`` that is
    the fastest for some number of tokens.

    The plan for one sequence of so many tokens is taken for shorter ones that have as many
    together. What all of them need of memory depends on the tokens alone, and of their time all but
    attention does.

    Args:
        planner: of the ranks of one group.
        workload: of one sequence; its length does not matter.
        most_tokens: of a group.
        least_s: seconds of messages under way meanwhile, as of ``Way``.
    Returns:
        None that another beats in time at all lengths and in memory; an empty list: nothing fits.
    """
    longest = planner.longest(workload, most_tokens)
    ways: list[Way] = []
    seen = set[str]()
    for load in dict.fromkeys(longest >> k for k in range(LOADS)):
        if not load:
            continue
        plan = planner.plan(replace(workload, seq_len=load))
        if plan.key not in seen:
            seen.add(plan.key)
            ways.append(way_of(planner, workload, plan, most_tokens, least_s))
    return undominated(ways)


def way_of(
    planner: Planner, workload: Workload, plan: Plan, most_tokens: int, least_s: float = 0.0
) -> Way:
    """A group that computes by ``plan``.

    Args:
        planner: of the ranks of the group.
        workload: of one sequence; its length does not matter.
        most_tokens: of a group.
        least_s: as of ``ways_of``.
    Raises:
        ValueError: nothing fits.
    """
    room = planner.longest(workload, most_tokens, plan)
    if not room:
        raise ValueError(f"no sequence fits {planner.num_ranks} ranks under the plan {plan.key}")
    lengths = [1]
    while lengths[-1] < room:
        lengths.append(min(room, max(SHORTEST, lengths[-1] * 2)))
    times = [planner.predict(plan, replace(workload, seq_len=n))[0] for n in lengths]
    fixed = min(times)
    adds = tuple(max(0.0, t - fixed) for t in times)
    return Way(planner.num_ranks, fixed, room, tuple(lengths), adds, plan.key, least_s)


def undominated(ways: Sequence[Way]) -> list[Way]:
    """Those of ``ways`` that no other of the same degree with as much room beats at every length
    that they have room for; of equal ones the first."""
    kept: list[Way] = []
    for way in sorted(ways, key=lambda w: (w.degree, -w.max_tokens)):
        if not any(_beats(other, way) for other in kept):
            kept.append(way)
    return kept


def _beats(other: Way, way: Way) -> bool:
    if other.degree != way.degree or other.max_tokens < way.max_tokens:
        return False
    faster = other.sequence_s(way.lengths) <= way.times_s
    sooner = other.fixed_s <= way.fixed_s and other.least_s <= way.least_s
    return sooner and bool(faster.all())
