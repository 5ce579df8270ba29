"""What one rank raises all ranks raise; a rank that is gone is named."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import PATIENCE, RankFailure, RankPool, run_ranks

from paradyse.distributed.agreement import agreement_of
from paradyse.distributed.axis import SINGLE, resolve_axis
from paradyse.distributed.collectives import TIMEOUT_VARIABLE
from paradyse.distributed.together import Together

TIMEOUT_S = 3.0 * PATIENCE


class Odd(Exception):
    """Of a kind that other processes need not know, and that does not pickle."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"odd {one} {two}")


ERRORS: dict[str, tuple[Callable[[], Exception], type[Exception], str]] = {
    "value": (lambda: ValueError("wrong"), ValueError, "wrong"),
    "absent": (lambda: FileNotFoundError("no file"), FileNotFoundError, "no file"),
    "denied": (lambda: PermissionError("no"), RuntimeError, "PermissionError: no"),
    "memory": (lambda: torch.OutOfMemoryError("full"), torch.OutOfMemoryError, "full"),
    "odd": (lambda: Odd(1, 2), RuntimeError, "Odd: odd 1 2"),
}
"""What a rank raises, and what all ranks raise."""


def fail_on(rank: int, name: str, first: bool) -> tuple[str, str]:
    """Kind and text of what this rank hears."""
    ranks = Together(resolve_axis(), "counting")

    def work() -> int:
        if dist.get_rank() == rank:
            raise ERRORS[name][0]()
        return dist.get_rank()

    with pytest.raises(Exception) as error:
        (ranks.first if first else ranks.each)(work)
    assert ranks.each(dist.get_rank) == [0, 1, 2]  # they are in step
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize("name", ERRORS)
def test_what_one_rank_raises_all_ranks_raise(name: str, pool3: RankPool) -> None:
    _, kind, text = ERRORS[name]
    heard = pool3.run(fail_on, 1, name, False)
    assert heard == [(kind.__name__, f"on rank 1: {text}" if r != 1 else text) for r in range(3)]
    assert pool3.run(fail_on, 0, name, True) == [(kind.__name__, text)] * 3


def give() -> tuple[list[int], int, int]:
    ranks = Together(resolve_axis(), "counting")
    rank = dist.get_rank()
    return ranks.each(lambda: rank), ranks.all_of(lambda: rank), ranks.first(lambda: rank + 7)


def test_results(pool3: RankPool) -> None:
    assert pool3.run(give) == [([0, 1, 2], rank, 7) for rank in range(3)]


def test_one_rank_alone() -> None:
    ranks = Together(SINGLE, "counting")
    assert ranks.alone and ranks.is_first and ranks.rank == 0
    assert (ranks.each(lambda: 3), ranks.all_of(lambda: 4), ranks.first(lambda: 5)) == ([3], 4, 5)
    for call in (ranks.each, ranks.all_of, ranks.first):
        with pytest.raises(RuntimeError, match=r"^PermissionError: no$"):
            call(lambda: (_ for _ in ()).throw(PermissionError("no")))


def do_other_things() -> str:
    rank = dist.get_rank()
    with pytest.raises(ValueError) as error:
        if rank == 2:
            agreement = agreement_of(resolve_axis())
            assert agreement is not None
            agreement.compare("calling", {})
        else:
            Together(resolve_axis(), "saving" if rank else "loading")
    Together(resolve_axis(), "counting")
    return str(error.value)


def test_ranks_that_do_other_things_are_told(pool3: RankPool) -> None:
    for text in pool3.run(do_other_things):
        assert "rank 0: loading, rank 1: saving, rank 2: calling" in text


def lose(rank: int, how: str) -> None:
    """``rank`` does not come to the second message; the others raise."""
    dist.barrier()  # imports take some ranks longer
    os.environ[TIMEOUT_VARIABLE] = str(TIMEOUT_S)
    do_other_things()  # which leaves all in step
    ranks = Together(resolve_axis(), "counting sheep")
    ranks.each(dist.get_rank)
    if dist.get_rank() == rank:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(TIMEOUT_S + 2)
        raise SystemExit
    start = time.monotonic()
    try:
        ranks.each(dist.get_rank)
    finally:
        took = time.monotonic() - start
        assert took < (2 if how == "killed" else TIMEOUT_S) + 3, took


@pytest.mark.parametrize(
    ("how", "rank"),
    [("killed", 2), ("killed", 0), pytest.param("stalled", 1, marks=pytest.mark.slow)],
)
def test_who_is_missing_is_named(how: str, rank: int) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(lose, 3, rank, how, timeout_s=30)
    errors: Any = failure.value.errors
    assert errors.keys() - {rank} == {0, 1, 2} - {rank}
    for other in {0, 1, 2} - {rank}:
        assert errors[other].type_name == "CollectiveError"
        text = f"rank {other} of 3: counting sheep did not complete: rank {rank} died, stalled"
        assert re.match(text, errors[other].text), errors[other].text
        assert f"{TIMEOUT_VARIABLE} (now {TIMEOUT_S:g} s)" in errors[other].text
