"""Which rows of a tensor lie on which rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed.axis import Axis, Runs


@dataclass(frozen=True)
class ShardLayout:
    """Which rows (indices along ``dim``) of a tensor lie on which rank, each on exactly one."""

    axis: Axis
    dim: int
    runs: tuple[Runs, ...]
    """Per rank its rows as stretches (first, how many), in the order in which the rank holds
    them."""

    @cached_property
    def num_rows(self) -> tuple[int, ...]:
        """Per rank."""
        return tuple(sum(n for _, n in runs) for runs in self.runs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardLayout:
        return self  # a value, whose process group cannot be copied

    def shape(self, size: Sequence[int], rank: int) -> tuple[int, ...]:
        """Of ``rank``'s rows of a tensor of ``size``."""
        return (*size[: self.dim], self.num_rows[rank], *size[self.dim + 1 :])

    def numel(self, size: Sequence[int], rank: int) -> int:
        return math.prod(self.shape(size, rank))

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """``rank``'s rows of ``whole``: a view where they are one stretch."""
        parts = [whole.narrow(self.dim, start, n) for start, n in self.runs[rank]]
        return (
            parts[0]
            if len(parts) == 1
            else torch.cat(parts, self.dim)
            if parts
            else whole.narrow(self.dim, 0, 0)
        )

    def put(self, whole: Tensor, rank: int, rows: Tensor) -> None:
        """Write ``rank``'s rows into ``whole``."""
        at = 0
        for start, n in self.runs[rank]:
            whole.narrow(self.dim, start, n).copy_(rows.narrow(self.dim, at, n))
            at += n


def even_layout(axis: Axis, num_rows: int, dim: int = 0) -> ShardLayout:
    """Contiguous rows, as many on each rank or one more on the first ones."""
    p = axis.size
    ends = [num_rows * r // p for r in range(p + 1)]
    pairs = zip(ends[:-1], ends[1:], strict=True)
    return ShardLayout(axis, dim, tuple(((a, b - a),) if b > a else () for a, b in pairs))
