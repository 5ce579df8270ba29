"""Where Triton kernels are tested: natively on a GPU, else in Triton's interpreter on the CPU.

The interpreter has to be chosen before Triton is imported, so ``test_interpreter`` runs the tests
that are marked ``kernels``, of all files, in one process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NATIVE = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if NATIVE else "cpu"

kernels = pytest.mark.kernels
"""Tests that launch kernels."""


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


def _patch_once_per_launch() -> None:
    """The interpreter replaces Triton's functions at a launch, and again at every call of a device
    function, which takes half of its time. What Triton's own device functions see stays replaced.
    """
    from triton.runtime.interpreter import InterpretedFunction

    replace, seen = InterpretedFunction.__call__, set[str]()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__module__
        if module in seen or module.startswith("paradyse."):
            return self.rewrite()(*args, **kwargs)
        seen.add(module)
        return replace(self, *args, **kwargs)

    InterpretedFunction.__call__ = call


if INTERPRETED:
    _patch_once_per_launch()
    if [int(x) for x in metadata.version("triton").split(".")[:2]] < [3, 9]:
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
