"""A rank that dies or stalls while a checkpoint is saved or loaded ends the others, soon."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import PATIENCE, RankFailure, run_ranks
from test_checkpoint import contents, equal
from test_checkpoint_files import save_small, small_run
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import paradyse
from paradyse.distributed.collectives import TIMEOUT_VARIABLE

TIMEOUT_S = 3.0 * PATIENCE


def lose(folder: str, doing: str, how: str) -> None:
    """The second rank is lost amid its files; the first one raises."""
    dist.barrier()  # imports take some ranks longer
    os.environ[TIMEOUT_VARIABLE] = str(TIMEOUT_S)
    save_small(folder)
    run = small_run(1)
    if dist.get_rank() == 1:

        def lost(*args: Any) -> None:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(TIMEOUT_S + 2)
            raise SystemExit

        FileSystemWriter.write_data = FileSystemReader.read_data = lost  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        if doing == "saving":
            paradyse.save_checkpoint(folder, *run, step=2)
        else:
            paradyse.load_checkpoint(folder, *run)
    finally:
        assert time.monotonic() - start < TIMEOUT_S + 3


@pytest.mark.broad(but="loading-killed")
@pytest.mark.parametrize(
    ("doing", "how"),
    [
        ("saving", "stalled"),
        ("loading", "killed"),
        pytest.param("saving", "killed", marks=pytest.mark.slow),
        pytest.param("loading", "stalled", marks=pytest.mark.slow),
    ],
)
def test_the_others_are_told(doing: str, how: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(lose, 2, str(tmp_path), doing, how, timeout_s=40)
    error = failure.value.errors[0]
    assert error.type_name == "CollectiveError", failure.value
    what = "checkpoint 2 to" if doing == "saving" else "checkpoint"
    text = f"rank 0 of 2: {doing} {what} {tmp_path} did not complete: rank 1 died, stalled or left"
    assert re.match(re.escape(text), error.text), error.text
    model, optimizer = small_run(1)
    assert paradyse.load_checkpoint(tmp_path, model, optimizer).step == 1
    assert equal(contents(model, optimizer), contents(*small_run()))
