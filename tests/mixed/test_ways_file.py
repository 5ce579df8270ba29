"""Files of ways: read as they were written; anything else is refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from step_search import ways_by_formula

from paradyse.mixed.ways_file import SHARDED, WHOLE, check_weights, read_ways, write_ways

WAYS = ways_by_formula([1, 2, 3], 1000, 0.01)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    write_ways(tmp_path / "ways.json", WAYS, WHOLE)
    assert read_ways(tmp_path / "ways.json") == (WAYS, WHOLE)


def test_ways_with_weights_that_lie_otherwise_are_refused() -> None:
    check_weights(SHARDED, SHARDED)
    check_weights("", SHARDED)
    with pytest.raises(ValueError, match="plan with --weights replicated"):
        check_weights(SHARDED, WHOLE)


@pytest.mark.parametrize(
    "change",
    [
        {"degree": 0}, {"degree": 1.5}, {"degree": "2"}, {"max_tokens": None}, {"lengths": []},
        {"lengths": [5, 3]}, {"times_s": [1.0]}, {"times_s": "x"}, {"fixed_s": -1.0},
        {"least_s": None}, {"fixed_s": float("nan")}, {"name": 3}, {"more": 1},
    ],
)  # fmt: skip
def test_what_is_no_way_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    write_ways(tmp_path / "ways.json", WAYS, WHOLE)
    found = json.loads((tmp_path / "ways.json").read_text())
    found["ways"][1].update(change)
    (tmp_path / "ways.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"ways\.json has no ways of groups"):
        read_ways(tmp_path / "ways.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weights": "replicated", "ways": 3}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "ways.json").write_text(text)
    with pytest.raises(ValueError, match="has no ways of groups"):
        read_ways(tmp_path / "ways.json")
    with pytest.raises(ValueError, match="cannot be read"):
        read_ways(tmp_path / "nothing.json")
