"""Norms of whole tensors from those of the rows that ranks hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten


def local_norms(rows: Sequence[Tensor], ord: float, dtype: torch.dtype) -> list[Tensor]:
    """Norms, each [], of what this rank holds of some tensors; of nothing it is what changes no
    norm that it is joined with.

    Args:
        rows: on one device.
        ord: as of ``torch.linalg.vector_norm``.
        dtype: of the norms.
    """
    of_nothing = rows[0].new_full((), math.inf if ord < 0 else 0, dtype=dtype)
    norms = [of_nothing] * len(rows)
    filled = [i for i, x in enumerate(rows) if x.numel()]
    if filled:
        found = aten._foreach_norm.Scalar([rows[i] for i in filled], ord, dtype=dtype)
        for i, norm in zip(filled, found, strict=True):
            norms[i] = norm
    return norms


def joined_norms(every: Tensor, ord: float) -> Tensor:
    """Norms [n] of whole tensors.

    Args:
        every: ``local_norms`` of each rank, [p, n].
        ord: of which kind they are.
    """
    if ord == 0:  # how many elements are not zero
        return every.sum(0)
    if math.isinf(ord):
        return every.amax(0) if ord > 0 else every.amin(0)
    return torch.linalg.vector_norm(every, ord, dim=0)
