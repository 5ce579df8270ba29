"""What makes the frames of calls: ``Frame``, or what a caller of a compiled model asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from paradyse.runtime.frame import Frame
from paradyse.runtime.program import Program, StepConstants

MakeFrame = Callable[[Program, Sequence[Any], StepConstants], Frame]

_MAKE_FRAME: ContextVar[MakeFrame] = ContextVar("make_frame", default=Frame)


@contextmanager
def frames_by(make: MakeFrame) -> Iterator[None]:
    """Inside, this thread's calls of compiled models run in the frames that ``make`` gives: a
    caller of a compiled model has no other way to hand it over."""
    token = _MAKE_FRAME.set(make)
    try:
        yield
    finally:
        _MAKE_FRAME.reset(token)


def current_frames() -> MakeFrame:
    """What makes the frame of a call: ``Frame``, or as ``frames_by`` says."""
    return _MAKE_FRAME.get()
