"""A few numbers that go between host and device, such as how many rows each expert has."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed.axis import Axis, resolve_axis
from paradyse.distributed.collectives import WAKE_S, Watchers
from paradyse.distributed.device_events import event_on
from paradyse.kernels import expert_rows

_NAP_S = 5e-5


def numbers_of(x: Tensor, axis: Axis) -> list[Any]:
    """``x.tolist()``, where what ``x`` is made of may be a message over ``axis`` that never comes,
    as a rank has failed: while a device is not done, the host asks for that.

    Raises:
        DroppedCallError: another rank failed.
    """
    found: list[Any] = on_host(x, axis).tolist()
    return found


def on_host(x: Tensor, axis: Axis) -> Tensor:
    """``x``, of a GPU a copy in pinned memory once it is there; waits as ``numbers_of`` does.

    Args:
        axis: whose messages ``x`` may wait for.
    Raises:
        DroppedCallError: another rank failed.
    """
    if not x.is_cuda:
        return x
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    wait_until(event_on(x.device).query, axis)
    return copy


def wait_until(is_done: Callable[[], bool], axis: Axis) -> None:
    """Wait until ``is_done`` says so; those who watch waits for ``axis`` are called meanwhile.

    Raises:
        DroppedCallError: another rank failed; or what else a watcher raises.
    """
    asked = time.monotonic()
    while not is_done():
        if time.monotonic() - asked < WAKE_S:
            time.sleep(_NAP_S)
            continue
        for watch in resolve_axis().session.of(Watchers):
            watch(axis)
        asked = time.monotonic()


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """``numbers`` int64 on ``device``, behind what it has to do: the host waits for none of it."""
    there = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return there.to(device, non_blocking=True)


@expert_rows.read_by
def _ends_of_experts(ends: Tensor) -> list[int]:
    """``ends`` as the host reads them, be they made of messages over any axis."""
    return numbers_of(ends, resolve_axis())
