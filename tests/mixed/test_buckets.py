"""Buckets of lengths: as few tokens as possible between sequences and the ends of their buckets."""

from __future__ import annotations

import itertools
import random

import pytest

from paradyse.mixed.buckets import bucket_ends


def waste(lengths: list[int], ends: list[int]) -> int:
    return sum(min(e for e in ends if e >= n) - n for n in lengths)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_ends_waste_less(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 60) for _ in range(12)]
    distinct = sorted(set(lengths))
    for num_buckets in range(1, 6):
        ends = bucket_ends(lengths, num_buckets)
        assert ends == sorted(set(ends)) and len(ends) <= num_buckets
        others = itertools.combinations(distinct[:-1], min(num_buckets, len(distinct)) - 1)
        least = min(waste(lengths, [*some, distinct[-1]]) for some in others)
        assert waste(lengths, ends) == least


def test_many_lengths_are_thinned_out_and_all_are_in_a_bucket() -> None:
    lengths = [n * n for n in range(1, 3000)]
    ends = bucket_ends(lengths, 16)
    assert len(ends) == 16 and ends[-1] == max(lengths)
    even = [lengths[k * len(lengths) // 16 - 1] for k in range(1, 16)] + [max(lengths)]
    assert waste(lengths, ends) < waste(lengths, even)


def test_nothing_to_put_into_buckets_is_refused() -> None:
    for lengths, num_buckets in (([], 3), ([5], 0)):
        with pytest.raises(ValueError, match="at least 1 each"):
            bucket_ends(lengths, num_buckets)
