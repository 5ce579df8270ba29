"""Events are those of the device that computes, which need not be the thread's current one.

There is no GPU in these tests: streams and events of PyTorch's are replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paradyse.distributed import checksums
from paradyse.distributed.checksums import BatchChecksum
from paradyse.distributed.device_events import event_on
from paradyse.profiling.marks import Clock
from paradyse.runtime import shown_keys
from paradyse.runtime.shown_keys import ShownKeys

SECOND = torch.device("cuda", 1)


class Event:
    """As PyTorch's; times are counted from the first one that is made."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.is_timed = enable_timing
        self.stream: Any = None

    def record(self, stream: Any = "of the current device") -> None:
        self.stream = stream

    def synchronize(self) -> None:
        assert self.stream is not None

    def elapsed_time(self, end: Any) -> float:
        assert self.is_timed and end.is_timed and self.stream == end.stream == f"of {SECOND}"
        return 2.0 if end is not self else 0.0


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    with (
        patch.object(torch.cuda, "Event", Event),
        patch.object(torch.cuda, "current_stream", lambda device=None: f"of {device}"),
    ):
        yield


@pytest.mark.parametrize("timed", [False, True])
def test_an_event_is_of_the_stream_of_its_device(timed: bool) -> None:
    event = event_on(SECOND, timed)
    assert event.stream == f"of {SECOND}" and event.is_timed is timed


def test_a_clock_reads_the_device_that_computes() -> None:
    clock = Clock(SECOND)
    clock.note()
    clock.note()
    assert clock.read() == [0.0, 0.002]


def test_what_is_known_a_call_later_is_of_the_device_that_has_it() -> None:
    """Tensors of the host stand for those of a GPU."""
    of: list[torch.device] = []

    def event(device: torch.device) -> Event:
        of.append(device)
        return event_on(device)

    with patch.object(shown_keys, "event_on", event):
        keys, shown = ShownKeys([]), torch.tensor([True, False])
        keys._later(0, shown)
        assert keys._later(0, shown).equal(shown)
    with patch.object(checksums, "event_on", event):
        batch = BatchChecksum()
        x: Any = torch.ones(3).as_subclass(_OnDevice)
        known = [batch.fact([x]) for _ in range(2)]
    assert [bool(*each.values()) for each in known] == [False, True]
    assert of == [torch.device("cpu")] * 4


class _OnDevice(Tensor):
    is_cuda = True  # type: ignore[assignment]
