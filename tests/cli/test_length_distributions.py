"""Lengths drawn from the published distributions: their shares, their scale, their seed."""

from __future__ import annotations

from itertools import pairwise

import pytest

from paradyse.cli.length_distributions import DISTRIBUTIONS, SHORTEST, sample_lengths


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("parts", [1, 4])
def test_each_range_has_its_share(name: str, parts: int) -> None:
    """At the data set's own scale, and at a quarter of it."""
    edges, shares = DISTRIBUTIONS[name].edges, DISTRIBUTIONS[name].shares
    lengths = sample_lengths(name, 2000, edges[-1] // parts)
    for (low, high), share in zip(pairwise(edges), shares, strict=True):
        found = sum(low <= n * parts < high for n in lengths) / len(lengths)
        assert found == pytest.approx(share / sum(shares), abs=2e-3)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("longest", [SHORTEST, 1000, 4096])
def test_the_longest_is_the_one_given_and_none_is_too_short(name: str, longest: int) -> None:
    lengths = sample_lengths(name, 2000, longest)
    assert min(lengths) >= SHORTEST
    assert 0.95 * longest <= max(lengths) <= longest
    assert DISTRIBUTIONS[name].draw(1.0, longest) == longest


def test_a_short_trace_has_the_long_tail_too() -> None:
    lengths = sorted(sample_lengths("GitHubCode", 16, 8192))
    assert sum(n < 8192 * 4 / 309 for n in lengths) in (10, 11)
    assert lengths[-1] > 8192 * 32 / 309


def test_lengths_inside_a_range_spread_on_a_logarithmic_scale() -> None:
    inside = [n for n in sample_lengths("GRCh38", 4000, 624 * 1024) if 8192 <= n < 16384]
    assert sum(n < 8192 * 2**0.5 for n in inside) / len(inside) == pytest.approx(0.5, abs=0.01)


def test_a_seed_fixes_the_lengths_and_their_order() -> None:
    first = sample_lengths("grch38", 50, 4096, seed=1)
    assert first == sample_lengths("GRCh38", 50, 4096, seed=1) != sorted(first)
    assert sorted(first) != sorted(sample_lengths("GRCh38", 50, 4096, seed=2))


def test_errors_name_the_value_and_the_way_out() -> None:
    with pytest.raises(ValueError, match="unknown distribution 'pile': give one of GitHubCode, GR"):
        sample_lengths("pile", 4, 100)
    with pytest.raises(ValueError, match="longest length 8: give at least 16 tokens"):
        sample_lengths("GRCh38", 4, 8)
    with pytest.raises(ValueError, match="0 lengths"):
        sample_lengths("GRCh38", 0, 100)
