"""Where the lengths that are replayed come from."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from paradyse.cli import main as cli
from paradyse.cli.length_distributions import sample_lengths
from paradyse.cli.traces import read_lengths, trace_of


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
    assert trace("--lengths-file", str(file)) == [128, 64, 7, 9, 7]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("12\n0\n", "line 2: '0' is no length"),
        ("1.5", "line 1: '1.5' is no length"),
        ("length\n4", "line 1: 'length' is no length"),
        ("# none\n", "has no lengths in it"),
    ],
)
def test_a_file_that_is_no_list_of_lengths_is_refused(text: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text(text)
    with pytest.raises(ValueError, match=part):
        read_lengths(str(tmp_path / "f"))


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


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json is no tokenizer.json"):
        trace("--tokenizer", str(tmp_path))
