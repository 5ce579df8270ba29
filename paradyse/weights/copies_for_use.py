"""Rows on the host that a device is still copying: what writes to them waits until it has them.

A device copies rows behind all that it has to do, and the host goes on (``ShardedTensor.for_use``).
After a backward it has waited for the gradients, and so for these copies; after a call without
gradients it has waited for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from paradyse.distributed.axis import Axis
from paradyse.distributed.device_events import event_on
from paradyse.distributed.host_numbers import wait_until


class CopiesUnderWay:
    """Copies that devices were given of rows of one axis; in its session."""

    def __init__(self) -> None:
        self._latest: dict[Any, Any] = {}
        """Stream of a device -> the event behind its latest copy."""

    def note(self, device: torch.device) -> None:
        """``device`` was given a copy, on its current stream."""
        if device.type == "cuda":
            self._latest[torch.cuda.current_stream(device)] = event_on(device)

    def wait(self, axis: Axis) -> None:
        """Wait until all are made, while messages over ``axis`` are, which they may be behind.

        Raises:
            DroppedCallError: another rank failed.
        """
        for event in list(self._latest.values()):
            wait_until(event.query, axis)


def wait_for_copies(written: Iterable[Any]) -> None:
    """Wait until no device copies rows of those of ``written`` that are sharded and lie on the
    host.

    Raises:
        DroppedCallError: another rank failed.
    """
    axes = (x.placement.axis for x in written if getattr(x, "on_host", False))
    for axis in {axis.name: axis for axis in axes}.values():
        axis.session.of(CopiesUnderWay).wait(axis)
