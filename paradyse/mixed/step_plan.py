"""The plan of a step: micro-batches, groups with their degrees, and which sequence goes where.

FlexSP (arXiv 2412.01523) cuts the sequences, ordered by length, into micro-batches with as many
tokens each, and solves an integer program for each. Here this is one of three kinds of candidates.
Another has groups for the whole batch first, all done in one time, and puts them side by side
afterwards, so that a micro-batch may have long sequences beside short ones. The third has groups of
one degree for the whole batch, so that no plan is slower than the best of these. The fastest
candidates are made faster by the integer program (``assignment``) and by moving sequences
(``polish``), as long as there is time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from paradyse.mixed.assignment import tighten
from paradyse.mixed.packing import (
    Bin,
    Table,
    as_plan,
    longest_first,
    search,
    spread,
    total_s,
)
from paradyse.mixed.polish import Polish
from paradyse.mixed.ways import StepPlan, Way

MORE_COUNTS = 4
"""How many numbers of micro-batches are tried, from the least that memory allows."""
KEPT, TIGHTENED = 8, 2
"""How many candidates have sequences moved, and how many of them the integer program's answer."""
KICKS = 24
"""How often the best step is left for one at random near it, to see whether that leads further."""

Micros = list[list[Bin]]


def plan_step(
    lengths: Sequence[int], ways: Sequence[Way], num_ranks: int, limit_s: float = 5.0
) -> StepPlan:
    """The fastest step found for a batch.

    It is never slower than ``static_steps`` of any degree. The same arguments give the same plan
    where ``limit_s`` is long enough for all that is tried.

    Args:
        lengths: tokens of each sequence.
        ways: that groups may take, in any order, of any degrees.
        num_ranks: of the axis.
        limit_s: seconds; when they are over the best plan so far is taken.
    Raises:
        ValueError: there is no sequence or an empty one, or one is longer than any group of
            ``num_ranks`` has room for.
    """
    end = time.perf_counter() + limit_s
    table = _checked(lengths, ways, num_ranks)
    order = longest_first(table)
    found = [s for p in range(len(ways)) if (s := spread(table, order, p, num_ranks)) is not None]
    found += _candidates(table, order, num_ranks, end)
    found = sorted(found, key=total_s)[:KEPT]
    best, polish = found[0], Polish(table, num_ranks, end)
    for k, candidate in enumerate(found):
        now = time.perf_counter()
        if now >= end:
            break
        share = (end - now) / (len(found) - k)
        if k < TIGHTENED:
            candidate = tighten(table, candidate, num_ranks, now + share / 2)
        polish.until = now + share
        best = min(best, polish.run(candidate), key=total_s)
    polish.until = end
    if time.perf_counter() < end:
        best = min(best, polish.kicked(best, KICKS), key=total_s)
    return as_plan(table, best)


def static_steps(
    lengths: Sequence[int], ways: Sequence[Way], num_ranks: int
) -> dict[int, StepPlan]:
    """By degree the step with groups of that degree alone, sequences dealt out so that all take
    equally long; degrees that have no room for the longest sequence are left out.

    Args:
        lengths: tokens of each sequence.
        ways: of which, for each degree, the fastest is taken for all groups.
        num_ranks: of the axis.
    Raises:
        ValueError: as ``plan_step``.
    """
    table = _checked(lengths, ways, num_ranks)
    order, best = longest_first(table), dict[int, Micros]()
    for p, way in enumerate(ways):
        step = spread(table, order, p, num_ranks)
        if step is not None:
            known = best.get(way.degree)
            best[way.degree] = step if known is None else min(known, step, key=total_s)
    return {degree: as_plan(table, best[degree]) for degree in sorted(best)}


def _checked(lengths: Sequence[int], ways: Sequence[Way], num_ranks: int) -> Table:
    if not len(lengths) or min(lengths) < 1:
        raise ValueError(
            f"{len(lengths)} sequences, the shortest of {min(lengths, default=0)} tokens: give at "
            "least one, and at least 1 token each"
        )
    usable = [way.max_tokens for way in ways if way.degree <= num_ranks]
    if max(lengths) > max(usable, default=0):
        raise ValueError(
            f"a sequence of {max(lengths)} tokens fits no group of up to {num_ranks} ranks: the "
            f"longest that fits has {max(usable, default=0)} tokens; leave it out, cut it, or "
            "use more ranks"
        )
    return Table(lengths, ways)


def _candidates(
    table: Table, order: Sequence[int], num_ranks: int, until: float
) -> Iterator[Micros]:
    """Steps of a few numbers of micro-batches, from the fewest on, while there is time."""
    usable = [w for w in table.ways if w.degree <= num_ranks]
    most = max(num_ranks / w.degree * w.max_tokens for w in usable)
    fewest = math.ceil(sum(table.lengths) / most)
    tried = 0
    for num_micro in range(fewest, len(order) + fewest):
        if time.perf_counter() > until:
            return
        together = search(table, order, num_ranks, num_micro)
        if together is None:
            continue
        yield together
        if num_micro > 1 and time.perf_counter() < until:
            parts = by_tokens(table, order, num_micro)
            alone = [search(table, part, num_ranks, 1) for part in parts]
            if all(micros is not None for micros in alone):
                yield [bins for micros in alone if micros is not None for bins in micros]
        tried += 1
        if tried == MORE_COUNTS:
            return


def by_tokens(table: Table, order: Sequence[int], num_parts: int) -> list[list[int]]:
    """``order`` cut into at most ``num_parts`` so that the most tokens of one are the fewest.

    Args:
        table: the batch.
        order: the sequences, the longest first.
        num_parts: at least 1.
    """
    lengths = [table.lengths[i] for i in order]

    def cut(most: int) -> list[list[int]]:
        parts: list[list[int]] = [[]]
        held = 0
        for i, n in zip(order, lengths):
            if held + n > most and parts[-1]:
                parts.append([])
                held = 0
            parts[-1].append(i)
            held += n
        return parts

    low, high = max(lengths), sum(lengths)
    while low < high:
        middle = (low + high) // 2
        if len(cut(middle)) <= num_parts:
            high = middle
        else:
            low = middle + 1
    return cut(low)
