"""Exact choice: the fastest assignment of options to groups of equal blocks within a memory budget.

Equal blocks only need counts, so this is a multiple-choice knapsack with few items. Memory is sum
saved + largest workspace (DESIGN 6). Every bound on the workspace is tried in turn; within one, a
dynamic program over the blocks keeps the states that no other beats in both time and memory and
whose linear relaxation is no slower than a plan already known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """One option of a block."""

    time_s: float
    saved_bytes: int
    workspace_bytes: int


@dataclass(frozen=True)
class Group:
    """Blocks that cost the same."""

    count: int
    choices: tuple[Choice, ...]


Counts = tuple[tuple[int, ...], ...]
"""Per group, how many of its blocks take each choice."""


@dataclass(frozen=True)
class _Step:
    """Moving blocks from one choice to a smaller, slower one."""

    price: float
    """Seconds per byte spared."""
    spared_bytes: int
    time_s: float
    count: int
    """How many blocks can take the step; the first two fields' units are of one block."""


@dataclass(frozen=True)
class _Relaxation:
    """The least time of some blocks within a budget, if blocks could be divided."""

    time_s: float
    saved_bytes: int
    steps: tuple[_Step, ...]
    """Cheapest first."""

    def bound(self, budget: float) -> float | None:
        """Seconds that no assignment within ``budget`` bytes can beat; None: nothing fits."""
        excess, time_s = self.saved_bytes - budget, self.time_s
        for s in self.steps:
            if excess <= 0:
                break
            time_s += s.price * min(excess, s.spared_bytes * s.count)
            excess -= s.spared_bytes * s.count
        return time_s if excess <= 0 else None

    def rounded(self, budget: float) -> float | None:
        """Seconds of an assignment of whole blocks that fits; None: nothing fits."""
        excess, time_s = self.saved_bytes - budget, self.time_s
        for s in self.steps:
            if excess <= 0:
                break
            n = min(s.count, int(-(-excess // s.spared_bytes)))
            time_s, excess = time_s + n * s.time_s, excess - n * s.spared_bytes
        return time_s if excess <= 0 else None


def fastest(groups: Sequence[Group], budget_bytes: float) -> Counts | None:
    """Counts of least total time with sum saved + largest workspace <= ``budget_bytes``.

    A function of its arguments alone, ties included: every rank finds the same. None: nothing fits.
    """
    best: tuple[float, Counts] | None = None
    for limit in sorted({c.workspace_bytes for g in groups for c in g.choices}, reverse=True):
        kept = [_undominated(g, limit) for g in groups]
        if not all(kept):
            break
        if best and _relax(groups, kept).time_s >= best[0]:
            break  # smaller workspaces only allow less
        found = _within(groups, kept, budget_bytes - limit, best[0] if best else None)
        if found and (best is None or found[0] < best[0]):
            best = found
    if not groups:
        return () if budget_bytes >= 0 else None
    return best[1] if best else None


def smallest(groups: Sequence[Group]) -> tuple[int, Counts]:
    """The least sum saved + largest workspace of any assignment, and that assignment."""
    options: list[tuple[int, Counts]] = []
    for limit in sorted({c.workspace_bytes for g in groups for c in g.choices}):
        kept = [_undominated(g, limit) for g in groups]
        if all(kept):
            picked = [k[-1] for k in kept]
            saved = sum(g.count * g.choices[i].saved_bytes for g, i in zip(groups, picked))
            counts = tuple(
                tuple(g.count * (i == j) for j in range(len(g.choices)))
                for g, i in zip(groups, picked)
            )
            options.append((limit + saved, counts))
    return min(options, default=(0, ()))


def _undominated(group: Group, workspace_limit: int) -> list[int]:
    """Choices within the limit, fastest first; each saves less memory than all faster ones."""
    kept: list[int] = []
    choices = group.choices
    for i in sorted(range(len(choices)), key=lambda i: (choices[i].time_s, choices[i].saved_bytes)):
        smaller = not kept or choices[i].saved_bytes < choices[kept[-1]].saved_bytes
        if smaller and choices[i].workspace_bytes <= workspace_limit:
            kept.append(i)
    return kept


def _price(a: Choice, b: Choice) -> float:
    return (b.time_s - a.time_s) / (a.saved_bytes - b.saved_bytes)


def _step(a: Choice, b: Choice, count: int) -> _Step:
    return _Step(_price(a, b), a.saved_bytes - b.saved_bytes, b.time_s - a.time_s, count)


def _relax(groups: Sequence[Group], kept: Sequence[list[int]]) -> _Relaxation:
    """From everything at its fastest, along the lower convex hull of each group's choices."""
    time_s, saved, steps = 0.0, 0, []
    for g, k in zip(groups, kept):
        hull = [g.choices[k[0]]]
        time_s += g.count * hull[0].time_s
        saved += g.count * hull[0].saved_bytes
        for i in k[1:]:
            c = g.choices[i]
            while len(hull) > 1 and _price(hull[-2], hull[-1]) >= _price(hull[-1], c):
                hull.pop()
            hull.append(c)
        steps += [_step(a, b, g.count) for a, b in zip(hull, hull[1:])]
    return _Relaxation(time_s, saved, tuple(sorted(steps, key=lambda s: s.price)))


def _within(
    groups: Sequence[Group], kept: Sequence[list[int]], budget: float, known_s: float | None
) -> tuple[float, Counts] | None:
    """Least time with sum saved <= ``budget``; None where nothing fits or beats ``known_s``."""
    known = [t for t in (known_s, _relax(groups, kept).rounded(budget)) if t is not None]
    # Sums in another order differ in their last bits: do not prune the very plan known.
    upper = min(known) * (1 + 1e-9) if known else float("inf")
    states: list[tuple[float, int, Counts]] = [
        (0.0, 0, tuple((0,) * len(g.choices) for g in groups))
    ]
    for n, group in enumerate(groups):
        for left in range(group.count - 1, -1, -1):
            rest = _relax(
                [*([Group(left, group.choices)] if left else []), *groups[n + 1 :]],
                [*([kept[n]] if left else []), *kept[n + 1 :]],
            )
            grown = []
            for time_s, saved, counts in states:
                for i in kept[n]:
                    choice, row = group.choices[i], counts[n]
                    t, m = time_s + choice.time_s, saved + choice.saved_bytes
                    bound = rest.bound(budget - m)
                    if bound is not None and t + bound <= upper:
                        row = (*row[:i], row[i] + 1, *row[i + 1 :])
                        grown.append((t, m, (*counts[:n], row, *counts[n + 1 :])))
            states = _front(grown)
    return (states[0][0], states[0][2]) if states else None


def _front(states: list[tuple[float, int, Counts]]) -> list[tuple[float, int, Counts]]:
    """States, fastest first, each smaller than all faster ones."""
    kept: list[tuple[float, int, Counts]] = []
    for s in sorted(states):
        if not kept or s[1] < kept[-1][1]:
            kept.append(s)
    return kept
