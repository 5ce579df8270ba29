"""The scripts of this folder that lose ranks, train for long, and join nodes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fault_points import POINTS

HERE = Path(__file__).resolve().parent
NOT_ALLOWED = 77
"""Exit status of ``two_nodes.py`` where no network namespaces may be made."""


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / script), *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_ranks_are_lost_at_enough_points() -> None:
    assert len(POINTS) >= 25
    for point in POINTS.values():
        re.compile(point.says)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_survivors_of_a_lost_rank_say_where(ranks: int) -> None:
    done = run("faults.py", "--ranks", str(ranks))
    assert done.returncode == 0, done.stderr[-8000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_steps_follow_one_process() -> None:
    done = run("soak.py", "--steps", "1500")
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_nodes_train_die_and_start_again() -> None:
    done = run("two_nodes.py")
    if done.returncode == NOT_ALLOWED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-8000:]
