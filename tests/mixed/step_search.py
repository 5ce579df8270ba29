"""The fastest step of a small batch, by trying all of them, and ways of groups to try it with."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paradyse.mixed.ways import Way

DENSE = 1e-9
"""Seconds for the square of a token, of attention; linears take ``LINEAR`` for a token."""
LINEAR = 1e-5
MESSAGES_S = 1e-4
"""Seconds that a sequence of any length spends in messages where a group has several ranks."""


def ways_by_formula(
    degrees: Sequence[int], room: int, fixed_s: float, messages: float = 0.2
) -> list[Way]:
    """A way for each of ``degrees``: FlexSP's formula, with ``room`` tokens a rank.

    Args:
        fixed_s: seconds of a group of one rank whatever is in it.
        messages: of a token, in ``LINEAR``, where messages stay within a node of 8 ranks.
    """
    found = []
    for d in degrees:
        most = room * d
        lengths = (*(1 << k for k in range(6, 40) if 1 << k < most), most)
        share = messages * (d - 1) / d if d <= 8 else 3 * messages
        times = tuple(
            (DENSE * n * n + LINEAR * (1 + share) * n) / d + MESSAGES_S * (d > 1) for n in lengths
        )
        found.append(Way(d, fixed_s * (1 + 0.1 * math.log2(d)), most, lengths, times))
    return found


def small_case(seed: int) -> tuple[list[int], list[Way], int]:
    """Lengths, ways and ranks of a batch small enough to try all steps."""
    rng = random.Random(seed)
    num_ranks, room = rng.choice([2, 3, 4, 5, 6, 8]), rng.choice([1024, 4096, 16384])
    powers = [1 << k for k in range(4) if 1 << k <= num_ranks]
    degrees = rng.choice([powers, list(range(1, num_ranks + 1))])
    ways = ways_by_formula(degrees, room, rng.choice([0.0, 0.005, 0.05]), rng.choice([0, 0.2, 1]))
    least_s = rng.choice([0.0, 0.0, 0.03])
    ways = [replace(way, least_s=least_s) for way in ways]
    most = max(way.max_tokens for way in ways)
    spread = math.log(16), math.log(room * num_ranks)
    lengths = [min(most, int(math.exp(rng.uniform(*spread)))) for _ in range(rng.randint(3, 7))]
    return lengths, ways, num_ranks


def least_time_s(lengths: Sequence[int], ways: Sequence[Way], num_ranks: int) -> float:
    """Seconds of the fastest step: over all groups of all sets of sequences, all sets of groups
    that are a micro-batch, and all sets of micro-batches."""
    num_sets = 1 << len(lengths)
    group = _groups(lengths, ways, num_ranks)
    micro = np.full((num_sets, num_ranks + 1), np.inf)
    micro[0] = 0
    for whole in range(1, num_sets):
        for part in _parts_with_the_first(whole):
            for d in range(1, num_ranks + 1):
                if group[part, d] < np.inf:
                    rest = micro[whole ^ part, : num_ranks + 1 - d]
                    slower = np.maximum(group[part, d], rest)
                    micro[whole, d:] = np.minimum(micro[whole, d:], slower)
    step = [0.0, *[math.inf] * (num_sets - 1)]
    for whole in range(1, num_sets):
        step[whole] = min(
            float(micro[part, num_ranks]) + step[whole ^ part]
            for part in _parts_with_the_first(whole)
        )
    return step[-1]


def _groups(lengths: Sequence[int], ways: Sequence[Way], num_ranks: int) -> np.ndarray:
    """[sets of sequences, ranks + 1] Seconds of a group with the set on at most so many ranks."""
    found = np.full((1 << len(lengths), num_ranks + 1), np.inf)
    for way in ways:
        if way.degree > num_ranks:
            continue
        times, tokens = np.full(1, way.fixed_s), np.zeros(1)
        for adds, n in zip(way.sequence_s(lengths), lengths):
            times = np.concatenate([times, times + adds])
            tokens = np.concatenate([tokens, tokens + n])
        times = np.where(tokens <= way.max_tokens, np.maximum(times, way.least_s), np.inf)
        found[:, way.degree :] = np.minimum(found[:, way.degree :], times[:, None])
    return found


def _parts_with_the_first(whole: int) -> list[int]:
    """Subsets of ``whole``, as bits, that have its lowest bit."""
    first = whole & -whole
    rest = part = whole ^ first
    found = [part | first]
    while part:
        part = (part - 1) & rest
        found.append(part | first)
    return found
