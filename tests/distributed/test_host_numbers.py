"""Numbers that go between host and device."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest
import torch

from paradyse.distributed import host_numbers
from paradyse.distributed.axis import SINGLE, resolve_axis
from paradyse.distributed.collectives import Watchers
from paradyse.distributed.failures import RankFailedError
from paradyse.distributed.host_numbers import numbers_of, on_device, wait_until


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
