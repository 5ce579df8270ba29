"""Which rows of a tensor lie on which rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from paradyse.distributed.axis import SINGLE, Axis, Runs
from paradyse.distributed.host_numbers import on_host
from paradyse.torch_private import foreach_copy


@dataclass(frozen=True)
class ShardLayout:
    """Which rows (indices along ``dim``) of a tensor lie on which rank, each on exactly one.

    A rank holds its rows as one tensor, stretch after stretch.
    """

    axis: Axis
    dim: int
    runs: tuple[Runs, ...]
    """Per rank its rows as stretches (first, how many), in the order in which it holds them."""

    @cached_property
    def num_rows(self) -> tuple[int, ...]:
        """How many rows each rank holds."""
        return tuple(sum(n for _, n in runs) for runs in self.runs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardLayout:
        return self  # a value, whose process group cannot be copied

    def shape(self, size: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of what ``rank`` holds of a tensor of shape ``size``."""
        return (*size[: self.dim], self.num_rows[rank], *size[self.dim + 1 :])

    def numel(self, size: Sequence[int], rank: int) -> int:
        """How many elements ``rank`` holds of a tensor of shape ``size``."""
        return math.prod(self.shape(size, rank))

    def stretches(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """Each stretch of ``rank``: its first row, how many it has, and where ``rank`` has it."""
        at = 0
        for start, n in self.runs[rank]:
            yield start, n, at
            at += n

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """Rows of ``rank`` in ``whole``: a view where they are one stretch."""
        parts = [whole.narrow(self.dim, start, n) for start, n in self.runs[rank]]
        if not parts:
            return whole.narrow(self.dim, 0, 0)
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def take_own(self, whole: Tensor) -> Tensor:
        """This rank's rows of ``whole``: contiguous, with memory of their own."""
        return self.take(whole, self.axis.rank).clone(memory_format=torch.contiguous_format)

    def put(self, whole: Tensor, rank: int, rows: Tensor) -> None:
        """Write ``rows``, which ``rank`` holds, to their places in ``whole``."""
        copy_all(self.places(whole, rank, rows))

    def places(self, whole: Tensor, rank: int, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each stretch of ``rank`` in ``whole``, and in the ``rows`` that it holds."""
        for start, n, at in self.stretches(rank):
            yield whole.narrow(self.dim, start, n), rows.narrow(self.dim, at, n)


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write to the first tensor of each of ``pairs`` the second one: on a GPU, of those that lie in
    adjacent memory and have one dtype, by one launch for many."""
    together: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for to, of in pairs:
        if to.is_contiguous() and of.is_contiguous():
            mine = together.setdefault((to.dtype, of.dtype), ([], []))
            mine[0].append(to)
            mine[1].append(of)
        else:
            to.copy_(of)
    for to_all, of_all in together.values():
        foreach_copy(to_all, of_all)


@dataclass(frozen=True)
class GradientSum:
    """How the gradients of a sharded tensor are brought together."""

    dtype: torch.dtype | None = None
    """In which they are added up; None: that of the tensor."""
    replicas: Axis = SINGLE
    """The data-parallel axis, over which they are averaged."""

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientSum:
        return self  # as ``ShardLayout``


class Shard(Protocol):
    """A tensor of which this rank holds some rows."""

    placement: ShardLayout

    @property
    def local(self) -> Tensor:
        """The rank's rows at rest."""

    @property
    def for_use(self) -> Tensor:
        """The rank's rows on the device that computes, in the dtype in which the tensor is
        gathered."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""

    @property
    def trained_dtype(self) -> torch.dtype:
        """Dtype of the tensor at rest, and of its gradient."""

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype in which its gradients are added up."""

    def new_whole(self) -> Tensor:
        """Memory for the whole tensor, in the dtype in which it is gathered."""


def even_layout(axis: Axis, num_rows: int, dim: int = 0) -> ShardLayout:
    """One stretch per rank, and numbers of rows that differ by at most one.

    Args:
        axis: the ranks.
        num_rows: size of the tensor along ``dim``; ranks without a row are allowed.
        dim: the dim that is split.
    """
    ends = [num_rows * r // axis.size for r in range(axis.size + 1)]
    pairs = zip(ends[:-1], ends[1:], strict=True)
    return ShardLayout(axis, dim, tuple(((a, b - a),) if b > a else () for a, b in pairs))


def to_host(rows: Tensor, axis: Axis = SINGLE) -> Tensor:
    """``rows`` on the host; those of a device in pinned memory, which it copies from by itself.

    Args:
        axis: whose messages ``rows`` may wait for.
    Raises:
        DroppedCallError: another rank failed, so that they never come.
    """
    return on_host(rows, axis)
