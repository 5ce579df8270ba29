"""Events of a GPU, by which the host learns how far it is."""

from __future__ import annotations

from typing import Any

import torch


def event_on(device: torch.device, timed: bool = False) -> Any:
    """An event behind what ``device`` was given so far on its current stream. The device that the
    thread has as its current one may be another: a model lies where it was moved to.

    Args:
        device: a CUDA device.
        timed: have it tell the time that passes until another one.
    """
    event = torch.cuda.Event(enable_timing=timed)
    event.record(torch.cuda.current_stream(device))
    return event
