"""Where Triton kernels are tested: natively on a GPU, else on the CPU under Triton's interpreter.

Imported by ``conftest`` before anything imports triton, which reads the variable when it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN until they are written."""
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled


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
