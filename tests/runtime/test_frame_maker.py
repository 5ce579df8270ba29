"""What makes frames: that of the innermost caller who asks, in this thread, and no longer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny import Tiny, tokens

from paradyse.runtime.frame import Frame
from paradyse.runtime.frame_maker import current_frames, frames_by


class Outer(Frame): ...


class Inner(Frame): ...


def test_the_innermost_maker_is_taken_and_goes_with_its_scope() -> None:
    assert current_frames() is Frame
    with frames_by(Outer):
        with frames_by(Inner):
            assert current_frames() is Inner
        assert current_frames() is Outer
    assert current_frames() is Frame


def test_other_threads_have_their_own() -> None:
    with frames_by(Outer), ThreadPoolExecutor(1) as threads:
        assert threads.submit(current_frames).result() is Frame


def test_a_maker_that_fails_does_not_stay() -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("no frame")

    torch._dynamo.reset()
    compiled = torch.compile(Tiny().double(), backend="paradyse", options={"inner": "eager"})
    with pytest.raises(RuntimeError, match="no frame"), frames_by(fail):
        compiled(tokens(2, 7))
    assert current_frames() is Frame
