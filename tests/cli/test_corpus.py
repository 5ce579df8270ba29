"""The demo's text: real files, equal on every rank, of lengths that spread."""

from __future__ import annotations

from pathlib import Path

import pytest

from paradyse.cli.corpus import MIN_TOKENS, VOCABULARY, draw_files, length_ranges


def test_files_come_whole_as_bytes() -> None:
    for file in draw_files(20, 2000):
        tokens = file.tokens()
        assert bytes(tokens) == Path(file.path).read_bytes()
        assert len(tokens) == file.num_tokens
        assert MIN_TOKENS <= file.num_tokens <= 2000
        assert max(tokens) < VOCABULARY


def test_a_seed_fixes_the_files_and_their_order() -> None:
    assert draw_files(30, 1000, seed=3) == draw_files(30, 1000, seed=3)
    assert draw_files(30, 1000, seed=3) != draw_files(30, 1000, seed=4)


def test_fewer_steps_see_the_first_of_the_same_files() -> None:
    assert draw_files(30, 1000)[:7] == draw_files(7, 1000)


def test_lengths_of_the_standard_library_have_a_long_tail() -> None:
    lengths = sorted(f.num_tokens for f in draw_files(200, 65536))
    assert lengths[len(lengths) // 2] < lengths[-1] / 4
    assert lengths[0] < 200 < 20_000 < lengths[-1]


def test_no_file_comes_twice_before_every_one_has_come_once(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("x" * (20 + i))
    files = draw_files(7, 64, folder=tmp_path)
    assert len({f.path for f in files[:3]}) == len({f.path for f in files[3:6]}) == 3


def test_files_that_are_too_short_too_long_or_no_text_are_left_out(tmp_path: Path) -> None:
    for name, size in {"a.txt": 15, "b.txt": 16, "c.md": 64, "d.txt": 65, "e.bin": 30}.items():
        (tmp_path / name).write_bytes(b"x" * size)
    assert {f.name for f in draw_files(9, 64, folder=tmp_path)} == {"b.txt", "c.md"}


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no folder .*nowhere"):
        draw_files(1, 100, folder=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no text file of 16 to 100 bytes below .*raise the cap"):
        draw_files(1, 100, folder=tmp_path)


def test_a_file_that_shrank_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 50)
    (file,) = draw_files(1, 64, folder=tmp_path)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="a.txt has changed: 1 bytes, not 50"):
        file.tokens()


@pytest.mark.parametrize("cap", [16, 17, 300, 4096, 100_000])
def test_ranges_cover_every_length_once(cap: int) -> None:
    ranges = length_ranges(cap)
    for n in {1, 2, 16, cap // 2, cap // 2 + 1, cap - 1, cap}:
        assert sum(n in r for r in ranges) == 1
    assert not any(cap + 1 in r for r in ranges)
