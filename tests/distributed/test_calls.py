"""What a call of a model tells the other ranks, and when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from models import make_batch
from test_failures import NO_MEMORY, Loop, failing

import paradyse
from paradyse.distributed.axis import SINGLE
from paradyse.distributed.calls import Call
from paradyse.distributed.failures import Failure, OutOfMemoryError, RankFailedError, error_of
from paradyse.distributed.running_backward import Backward


class Ranks:
    """What stands for the agreement of a call's ranks: it notes what is said."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.failure: Failure | None = None
        self.running: Backward | None = None

    def compare(self, doing: str, facts: Mapping[str, Any], together: bool = False) -> None:
        self.told.append(f"compares: {doing}")

    def tell(self, doing: str, *args: Any) -> None:
        self.told.append(f"tells: {doing}")

    def fail(self, failure: Failure, together: bool) -> NoReturn:
        self.failure = failure
        raise error_of([failure])

    def watch_backward(self, call: Call) -> Backward:
        self.running = self.running or Backward(call)
        return self.running

    def fail_backward(self, call: Call, out_of_memory: bool) -> None:
        """The test lets go of it."""


def called(ranks: Any) -> Call:
    return Call(ranks, "training call 3", True, ())


def test_the_end_of_a_forward_is_compared_unless_a_message_has_told_of_it() -> None:
    ranks = Ranks()
    call = called(ranks)
    assert call.forward(lambda: 5) == 5
    assert ranks.told == ["compares: ends forward of training call 3"]

    def compute() -> int:
        call.all_ended = True
        return 6

    assert call.forward(compute) == 6
    assert len(ranks.told) == 1


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.OutOfMemoryError("20 GiB"), OutOfMemoryError),
        (ZeroDivisionError("by zero"), ZeroDivisionError),
    ],
)
def test_an_error_is_told_with_its_block(error: Exception, raised: type[Exception]) -> None:
    ranks = Ranks()
    call = called(ranks)

    def compute() -> None:
        call.at = SINGLE, 0
        raise error

    with patch.object(dist, "get_rank", lambda: 1), pytest.raises(raised) as caught:
        call.forward(compute)
    assert ranks.failure is not None
    assert ranks.failure.rank == 1 and ", block '" in ranks.failure.place
    assert ranks.failure.out_of_memory == isinstance(error, torch.OutOfMemoryError)
    assert not isinstance(caught.value, RankFailedError)
    assert call.at is None


def test_a_read_is_told_of_before_and_behind() -> None:
    ranks = Ranks()
    assert called(ranks).read("logits", lambda: 7) == 7
    what = "the output logits of training call 3"
    assert ranks.told == [f"tells: reads {what}", f"compares: ends the read of {what}"]


def test_a_backward_is_told_of_at_once_or_left_for_its_first_message() -> None:
    ranks = Ranks()
    call = called(ranks)
    call.backward("loss", {})
    assert ranks.told == ["tells: runs backward of training call 3 from loss"]
    assert ranks.running is not None and ranks.running.outputs == []
    call.backward("loss", {"a fact": 1}, at_once=False)
    call.backward("logits", {"a fact": 1}, at_once=False)
    assert len(ranks.told) == 1
    assert ranks.running.outputs == ["loss", "logits"]
    assert ranks.running.common == {"a fact": 1}


def in_backward_of_an_earlier_call() -> dict[int, str]:
    """The plans after backward of a call has run out of memory behind a call of another length, as
    a policy's does behind its reference's."""
    loop = Loop(False, plan="auto", strategies=["megatron_cz", "metp"], splits=[])
    longer = make_batch("plain", 2, 20)

    def reference() -> None:
        with torch.no_grad():
            loop.compiled(**longer)

    loop.step()
    reference()
    loop.model.zero_grad()
    with failing(2, NO_MEMORY if loop.fails else None, in_backward=True):
        loss = loop.compiled(**loop.batch).loss
    reference()
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    del loss
    reference()
    assert loop.is_exact()
    return dict(paradyse.stats(loop.compiled).plan_per_length)


def test_the_call_whose_backward_ran_out_of_memory_has_another_plan(pool2: RankPool) -> None:
    first, second = pool2.run(in_backward_of_an_earlier_call)
    assert first == second
    assert "metp" in first[12] and "metp" not in first[20]
