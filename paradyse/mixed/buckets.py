"""Lengths put into few buckets, so that a solver has few variables (FlexSP, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MOST_CANDIDATES = 192
"""Lengths at which buckets may end: more are thinned out, by how many sequences there are."""


def bucket_ends(lengths: Sequence[int], num_buckets: int) -> list[int]:
    """The longest length of each bucket, ascending, of at most ``num_buckets``.

    A sequence belongs to the first bucket whose end it does not exceed. The ends are those that
    leave the fewest tokens between sequences and the ends of their buckets, found by dynamic
    programming over the number of buckets and the last length in them.

    Args:
        lengths: tokens of each sequence, in any order.
    Raises:
        ValueError: no sequence, or no bucket.
    """
    if not len(lengths) or num_buckets < 1:
        raise ValueError(f"{len(lengths)} sequences in {num_buckets} buckets: give at least 1 each")
    ordered = np.sort(np.asarray(lengths, dtype=np.int64))
    ends = np.unique(ordered)
    if len(ends) > MOST_CANDIDATES:
        places = np.linspace(0, len(ordered) - 1, MOST_CANDIDATES).round().astype(int)
        ends = np.unique(ordered[places])
    if len(ends) <= num_buckets:
        return [int(end) for end in ends]
    upto = np.searchsorted(ordered, ends, side="right")
    count = np.concatenate(([0], upto))
    total = np.concatenate(([0], np.cumsum(ordered)[upto - 1]))
    # waste[i, j]: of sequences behind end i (0: from the first) up to end j in one bucket
    waste = ends[None, :] * (count[None, 1:] - count[:-1, None]) - (
        total[None, 1:] - total[:-1, None]
    )
    waste = np.where(np.triu(np.ones_like(waste, dtype=bool)), waste.astype(float), np.inf)
    best, back = waste[0], []
    for _ in range(1, num_buckets):
        before = np.concatenate(([np.inf], best[:-1]))[:, None] + waste
        back.append(before.argmin(0))
        best = before.min(0)
    found, last = [int(ends[-1])], len(ends) - 1
    for choice in reversed(back):
        last = int(choice[last]) - 1
        found.append(int(ends[last]))
    return found[::-1]
