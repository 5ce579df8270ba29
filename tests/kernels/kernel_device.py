"""Where Triton kernels are tested: natively on a GPU, else in Triton's interpreter on the CPU.

The interpreter has to be chosen before Triton is imported, so a file of kernel tests runs itself
once more in a process of its own (``run_in_interpreter``); here ``kernels`` skips what needs that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NATIVE = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if NATIVE else "cpu"

kernels = pytest.mark.skipif(
    not (NATIVE or INTERPRETED), reason="runs in the interpreter's process"
)
"""Tests that launch kernels."""
outside = pytest.mark.skipif(INTERPRETED, reason="runs outside the interpreter's process")
"""Tests that launch none."""
in_interpreter = pytest.mark.skipif(NATIVE or INTERPRETED, reason="this is the process")
"""The test that calls ``run_in_interpreter``."""


def run_in_interpreter(file: str) -> None:
    """The tests of ``file`` that are not slow, in a process whose kernels are interpreted."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", file]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def _let_loops_read_bounds() -> None:
    """The interpreter of Triton 3.6 takes ``int`` of an array of one element where a loop has
    run-time bounds, which numpy refuses from 2.4 on; that of 3.9 takes its one element.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if INTERPRETED and [int(x) for x in metadata.version("triton").split(".")[:2]] < [3, 9]:
    _let_loops_read_bounds()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN until they are written."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def among_nan(x: torch.Tensor, token_major: bool = True) -> torch.Tensor:
    """``x`` [B, H, S, D] on ``DEVICE``, as a view into a larger tensor of NaN."""
    b, h, s, d = x.shape
    if token_major:
        whole = torch.full((b, s + 2, h + 1, d + 3), torch.nan, dtype=x.dtype, device=DEVICE)
        place = whole[:, 1 : s + 1, :h, 1 : d + 1].transpose(1, 2)
    else:
        whole = torch.full((b, h + 1, s + 2, d + 3), torch.nan, dtype=x.dtype, device=DEVICE)
        place = whole[:, :h, 1 : s + 1, 1 : d + 1]
    place.copy_(x)
    return place
