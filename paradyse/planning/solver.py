"""Exact choice: the fastest assignment of options to groups of equal blocks within a memory budget.

Equal blocks only need counts, so this is a multiple-choice knapsack with few kinds of items. Memory
is sum saved + largest workspace (DESIGN 6). Every bound on the workspace is tried in turn. Within
one, the linear relaxation gives a price of memory; an assignment is worse than it by the reduced
costs of the options it uses, so only those are tried that could still beat the relaxation rounded
to whole blocks (Kellerer, Pferschy, Pisinger: Knapsack Problems, 2004, chapter 11).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """Moving blocks of a group from one choice to a smaller, slower one."""

    price: float
    """Seconds per byte spared."""
    group: int
    start: int
    end: int
    spared_bytes: int
    """By one block."""


@dataclass(frozen=True)
class _Relaxation:
    """The least time within a budget, if blocks could be divided."""

    picked: tuple[int, ...]
    """Per group the choice that its blocks take, before the critical step."""
    critical: _Step | None
    """The step that only some blocks of its group take; None where everything fits without."""
    time_s: float


def fastest(groups: Sequence[Group], budget_bytes: float) -> Counts | None:
    """Counts of least total time with sum saved + largest workspace <= ``budget_bytes``.

    A function of its arguments alone, ties included: every rank finds the same. None: nothing fits.
    """
    best: tuple[float, Counts] | None = None
    for limit in sorted({c.workspace_bytes for g in groups for c in g.choices}, reverse=True):
        kept = [_undominated(g, limit) for g in groups]
        if not all(kept):
            break
        relaxed = _relax(groups, kept, budget_bytes - limit)
        if relaxed is None or best and relaxed.time_s >= best[0]:
            continue
        found = _rounded_best(groups, kept, budget_bytes - limit, relaxed)
        if found and (best is None or found[0] < best[0]):
            best = found
    if not groups:
        return () if budget_bytes >= 0 else None
    return best[1] if best else None


def smallest(groups: Sequence[Group]) -> tuple[int, Counts]:
    """The least sum saved + largest workspace of any assignment, and that assignment."""
    return min(((_needed(groups, c), c) for c in frontier(groups)), default=(0, ()))


def frontier(groups: Sequence[Group]) -> list[Counts]:
    """Under every bound on the workspace that can be kept, the assignment that saves least."""
    out: list[Counts] = []
    for limit in sorted({c.workspace_bytes for g in groups for c in g.choices}):
        kept = [_undominated(g, limit) for g in groups]
        if all(kept):
            out.append(_counts(groups, [k[-1] for k in kept]))
    return list(dict.fromkeys(out))


def _needed(groups: Sequence[Group], counts: Counts) -> int:
    """Sum saved + largest workspace."""
    used = [(n, c) for g, row in zip(groups, counts) for n, c in zip(row, g.choices) if n]
    return sum(n * c.saved_bytes for n, c in used) + max(c.workspace_bytes for _, c in used)


def _undominated(group: Group, workspace_limit: int) -> list[int]:
    """Choices within the limit, fastest first; each saves less memory than all faster ones."""
    kept: list[int] = []
    choices = group.choices
    for i in sorted(range(len(choices)), key=lambda i: (choices[i].time_s, choices[i].saved_bytes)):
        smaller = not kept or choices[i].saved_bytes < choices[kept[-1]].saved_bytes
        if smaller and choices[i].workspace_bytes <= workspace_limit:
            kept.append(i)
    return kept


def _counts(groups: Sequence[Group], picked: Sequence[int]) -> Counts:
    """All blocks of each group take one choice."""
    return tuple(
        tuple(g.count * (i == j) for j in range(len(g.choices))) for g, i in zip(groups, picked)
    )


def _price(a: Choice, b: Choice) -> float:
    return (b.time_s - a.time_s) / (a.saved_bytes - b.saved_bytes)


def _relax(groups: Sequence[Group], kept: Sequence[list[int]], budget: float) -> _Relaxation | None:
    """From everything at its fastest, along the lower convex hull of each group's choices, until
    the saved bytes fit; None where they never do."""
    steps: list[_Step] = []
    for n, (g, k) in enumerate(zip(groups, kept)):
        hull = [k[0]]
        for i in k[1:]:
            while len(hull) > 1 and _price(g.choices[hull[-2]], g.choices[hull[-1]]) >= _price(
                g.choices[hull[-1]], g.choices[i]
            ):
                hull.pop()
            hull.append(i)
        for a, b in zip(hull, hull[1:]):
            spared = g.choices[a].saved_bytes - g.choices[b].saved_bytes
            steps.append(_Step(_price(g.choices[a], g.choices[b]), n, a, b, spared))
    picked = [k[0] for k in kept]
    time_s = sum(g.count * g.choices[i].time_s for g, i in zip(groups, picked))
    excess = sum(g.count * g.choices[i].saved_bytes for g, i in zip(groups, picked)) - budget
    if excess <= 0:
        return _Relaxation(tuple(picked), None, time_s)
    for s in sorted(steps, key=lambda s: s.price):
        spared = s.spared_bytes * groups[s.group].count
        if excess <= spared:
            return _Relaxation(tuple(picked), s, time_s + s.price * excess)
        picked[s.group] = s.end
        time_s, excess = time_s + s.price * spared, excess - spared
    return None


def _rounded_best(
    groups: Sequence[Group], kept: Sequence[list[int]], budget: float, relaxed: _Relaxation
) -> tuple[float, Counts] | None:
    """Least time of whole blocks with sum saved <= ``budget``."""
    step = relaxed.critical
    if step is None:
        return relaxed.time_s, _counts(groups, relaxed.picked)
    saved = sum(g.count * g.choices[i].saved_bytes for g, i in zip(groups, relaxed.picked))
    time_s = sum(g.count * g.choices[i].time_s for g, i in zip(groups, relaxed.picked))
    slower_s = groups[step.group].choices[step.end].time_s
    slower_s -= groups[step.group].choices[step.start].time_s

    best: tuple[float, tuple[tuple[int, int, int], ...], int] | None = None
    options = _deviations(groups, kept, relaxed)
    upper = time_s + -(-(saved - budget) // step.spared_bytes) * slower_s
    # Sums in another order differ in their last bits: the plan that rounds up must stay within.
    gap = upper - relaxed.time_s + 1e-9 * upper
    room = [g.count for g in groups]
    for moved, moved_s, moved_bytes in _within(options, gap, room, 0):
        used = sum(n for g, _, n in moved if g == step.group)
        excess = saved + moved_bytes - budget
        n = max(0, int(-(-excess // step.spared_bytes)))
        if n <= groups[step.group].count - used:
            found = (time_s + moved_s + n * slower_s, moved, n)
            best = found if best is None or found < best else best
    if best is None:
        return None
    total_s, moved, n = best
    counts = [list(row) for row in _counts(groups, relaxed.picked)]
    for g, i, m in (*moved, (step.group, step.end, n)):
        counts[g][relaxed.picked[g]] -= m
        counts[g][i] += m
    return total_s, tuple(tuple(row) for row in counts)


@dataclass(frozen=True)
class _Deviation:
    """A block of a group that takes another choice than the relaxation's."""

    group: int
    choice: int
    reduced_s: float
    """What it costs beyond the price of memory: at least 0."""
    time_s: float
    saved_bytes: int
    """Both against the relaxation's choice."""


def _deviations(
    groups: Sequence[Group], kept: Sequence[list[int]], relaxed: _Relaxation
) -> list[_Deviation]:
    step = relaxed.critical
    assert step is not None
    out = []
    for n, (g, k) in enumerate(zip(groups, kept)):
        usual = g.choices[relaxed.picked[n]]
        for i in k:
            if i == relaxed.picked[n] or (n == step.group and i == step.end):
                continue
            time_s = g.choices[i].time_s - usual.time_s
            saved = g.choices[i].saved_bytes - usual.saved_bytes
            out.append(_Deviation(n, i, max(0.0, time_s + step.price * saved), time_s, saved))
    return sorted(out, key=lambda d: -d.reduced_s)


def _within(
    options: Sequence[_Deviation], gap: float, room: list[int], at: int
) -> Iterator[tuple[tuple[tuple[int, int, int], ...], float, int]]:
    """Every set of deviations whose reduced costs sum to at most ``gap``: (group, choice, blocks)
    of each, their seconds and bytes.

    Args:
        room: per group the blocks that have not deviated; changed and restored.
    """
    if at == len(options):
        yield (), 0.0, 0
        return
    d = options[at]
    most = room[d.group]
    if d.reduced_s > 0:
        most = min(most, int(gap / d.reduced_s))
    for n in range(most + 1):
        room[d.group] -= n
        for moved, time_s, saved in _within(options, gap - n * d.reduced_s, room, at + 1):
            this = ((d.group, d.choice, n),) if n else ()
            yield (*this, *moved), time_s + n * d.time_s, saved + n * d.saved_bytes
        room[d.group] += n
