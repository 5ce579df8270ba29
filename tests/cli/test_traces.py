"""Where the lengths that are replayed come from; lengths of the published distributions: their
shares, their scale, their seed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from paradyse.cli import main as cli
from paradyse.cli.corpus import MIN_TOKENS
from paradyse.cli.traces import (
    DISTRIBUTIONS,
    sample_lengths,
    trace_of,
)


def trace(*flags: str) -> list[int]:
    return trace_of(cli.make_parser().parse_args(["bench", *flags]))[0]


@pytest.fixture
def words(tmp_path: Path) -> str:
    """Folder of a tokenizer whose tokens are words."""
    tokenizer = Tokenizer(WordLevel({"?": 0, "a": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    (tmp_path / "words").mkdir()
    tokenizer.save(str(tmp_path / "words" / "tokenizer.json"))
    return str(tmp_path / "words")


def test_a_file_has_lengths_in_any_layout_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("128, 64\n# nothing\n\n7; 9 # the last\n7\n")
    assert trace("--lengths", str(file)) == [128, 64, 7, 9, 7]


def test_a_distribution_has_its_longest_and_its_seed_from_the_flags() -> None:
    flags = ["--distribution", "grch38", "--steps", "20", "--cap", "900", "--seed", "5"]
    assert trace(*flags) == sample_lengths("GRCh38", 20, 900, 5)


def test_text_counts_in_bytes_or_by_a_tokenizer(tmp_path: Path, words: str) -> None:
    for name, count in (("few", 15), ("some", 20), ("more", 30), ("most", 31)):
        (tmp_path / f"{name}.txt").write_text("ab " * count)
    text = ["--text", str(tmp_path)]
    assert sorted(trace(*text, "--cap", "90", "--steps", "3")) == [45, 60, 90]
    by_words = ["--cap", "30", "--steps", "4", "--tokenizer", words]
    assert sorted(trace(*text, *by_words)) == [20, 20, 30, 30]


def test_text_without_a_file_of_such_a_length_is_refused(tmp_path: Path, words: str) -> None:
    (tmp_path / "a.txt").write_text("ab " * 10)
    with pytest.raises(ValueError, match="no text file of 16 to 4096 tokens below"):
        trace("--text", str(tmp_path), "--tokenizer", words)
    (tmp_path / "a.txt").write_text("ab")
    with pytest.raises(ValueError, match="no text file of 16 to 4096 bytes below"):
        trace("--text", str(tmp_path))


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
@pytest.mark.parametrize("longest", [MIN_TOKENS, 1000, 4096])
def test_the_longest_is_the_one_given_and_none_is_too_short(name: str, longest: int) -> None:
    lengths = sample_lengths(name, 2000, longest)
    assert min(lengths) >= MIN_TOKENS
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
