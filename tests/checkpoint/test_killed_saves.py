"""A hundred killed saves: the script ``killed_saves.py``."""

from __future__ import annotations

import pytest
from killed_saves import main


@pytest.mark.slow
def test_a_hundred_killed_saves(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--kills", "100"])
    assert "each newest checkpoint was whole" in capsys.readouterr().out


def test_a_few_killed_saves(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--kills", "2", "--seed", "1"])
    assert "2 kills" in capsys.readouterr().out
