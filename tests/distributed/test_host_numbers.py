"""Numbers that go between host and device."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from paradyse.distributed import host_numbers
from paradyse.distributed.axis import SINGLE, resolve_axis
from paradyse.distributed.collectives import Watchers
from paradyse.distributed.failures import RankFailedError
from paradyse.distributed.host_numbers import numbers_of, on_device, on_host, wait_until
from paradyse.kernels import expert_rows
from paradyse.weights.layout import to_host


def test_numbers_are_those_of_the_tensor() -> None:
    numbers = on_device([3, 0, 2**40], torch.device("cpu"))
    assert numbers.dtype == torch.int64
    assert numbers_of(numbers, SINGLE) == [3, 0, 2**40]


def test_who_waits_for_a_device_hears_of_a_rank_that_failed() -> None:
    """The device waits for a message of that rank, so nothing but the watchers ends the wait."""

    def hear(axis: object) -> None:
        heard.append(axis)
        if len(heard) == 3:
            raise RankFailedError("rank 1 failed")

    heard: list[object] = []
    watchers = resolve_axis().session.of(Watchers)
    watchers.append(hear)
    try:
        with (
            patch.object(host_numbers, "WAKE_S", 0.01),
            pytest.raises(RankFailedError, match="rank 1 failed"),
        ):
            wait_until(lambda: False, SINGLE)
    finally:
        watchers.remove(hear)
    assert heard == [SINGLE] * 3


def test_a_short_wait_asks_nobody() -> None:
    def hear(axis: object) -> None:
        raise AssertionError("asked")

    start, watchers = time.monotonic(), resolve_axis().session.of(Watchers)
    watchers.append(hear)
    try:
        wait_until(lambda: time.monotonic() > start + 0.01, SINGLE)
    finally:
        watchers.remove(hear)


class _OnGPU:
    """A tensor of a GPU, whose copies to the host are there when they were asked for thrice."""

    is_cuda, shape, dtype = True, torch.Size([2]), torch.int32
    device = torch.device("cuda", 1)

    def __init__(self) -> None:
        self.num_asked = 0

    def event_on(self, device: torch.device) -> Any:
        assert device == self.device
        return SimpleNamespace(query=self._query)

    def _query(self) -> bool:
        self.num_asked += 1
        return self.num_asked == 3

    def empty(self, shape: Any, **kind: Any) -> Any:
        assert shape == self.shape and kind == {"dtype": self.dtype, "pin_memory": True}
        return self

    def copy_(self, x: Any, non_blocking: bool = False) -> Any:
        assert x is self and non_blocking
        return torch.tensor([3, 5], dtype=self.dtype)


@pytest.mark.parametrize("read", [on_host, to_host, numbers_of])
def test_the_host_asks_for_a_copy_in_place_of_waiting_for_it(read: Any) -> None:
    x: Any = _OnGPU()
    with (
        patch.object(host_numbers.torch, "empty", x.empty),
        patch.object(host_numbers, "event_on", x.event_on),
    ):
        found = read(x, SINGLE)
    assert [*found] == [3, 5] and x.num_asked == 3


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_lies_elsewhere_is_as_it_is(device: str) -> None:
    x = torch.ones(3, device=device)
    assert on_host(x, SINGLE) is x and to_host(x) is x


def test_ends_of_experts_are_read_so() -> None:
    ends, axes = torch.tensor([1, 3]), list[object]()

    def read(x: Any, axis: object) -> list[int]:
        axes.append(axis)
        found: list[int] = x.tolist()
        return found

    with patch.object(host_numbers, "numbers_of", read):
        stretches = list(expert_rows._stretches(["first", "second"], ends))  # type: ignore[arg-type]
    assert stretches == [("first", 0, 1), ("second", 1, 3)]
    assert axes == [resolve_axis()]
