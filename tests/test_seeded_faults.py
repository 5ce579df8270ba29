"""The table of seeded faults keeps up with the source; sowing them takes too long for here."""

from __future__ import annotations

from dataclasses import replace

from fault_table import FAULTS
from seeded_faults import misplaced


def test_every_fault_has_its_place_and_its_tests() -> None:
    assert len(FAULTS) >= 40
    assert not misplaced()


def test_the_check_sees_what_is_gone() -> None:
    gone = replace(FAULTS[0], old="no line has this", tests=("tests/test_gone.py",))
    text, file = misplaced([gone])
    assert "has the text 0 times" in text and file.endswith("no file tests/test_gone.py")
