"""Rows on their way to the ranks of their experts, and back.

How many rows an expert has is known when they are sorted. Ranks tell each other these numbers, p E
of them, and send the rows themselves in messages of just that size: no expert has a capacity, none
is padded, and none waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis
from paradyse.distributed.collectives import Counts
from paradyse.distributed.host_numbers import numbers_of
from paradyse.torch_private import FakeTensor

FEWEST = 2
"""Rows that a group is given at least, those that are missing as zeros: one program then serves any
number of them, as sizes 0 and 1 are special to compilers."""


def num_rows_of(ends: Tensor, num_rows: int, axis: Axis) -> list[int]:
    """How many of ``num_rows`` rows each expert has, where ``ends`` [E] int32 says where theirs
    end. Of fake tensors, which have no numbers, experts share them evenly.

    Args:
        axis: whose messages ``ends`` may wait for.
    """
    if isinstance(ends, FakeTensor):
        edges = [num_rows * e // len(ends) for e in range(len(ends) + 1)]
    else:
        edges = [0, *numbers_of(ends, axis)]
    return [b - a for a, b in zip(edges, edges[1:])]


def counts_of(ends: Tensor, num_rows: int, axis: Axis, block_id: int) -> list[list[int]]:
    """Rows of each rank of ``axis`` for each expert, [p][E].

    Args:
        ends, num_rows: as of ``num_rows_of``, on this rank.
        block_id: what the message is booked to.
    """
    if isinstance(ends, FakeTensor):
        return [num_rows_of(ends, num_rows, axis)] * axis.size
    counts = torch.diff(ends.long(), prepend=ends.new_zeros(1, dtype=torch.int64))
    return numbers_of(collectives.all_gather(counts, axis, block_id), axis)


@dataclass(frozen=True)
class Dealing:
    """Which rows go where."""

    axis: Axis
    block_id: int
    counts: Counts
    """[p][p], rows of rank i for the experts of rank j."""
    order: Tensor
    """[R] int64: rows that came, in the order of this rank's experts."""
    inverse: Tensor
    in_order: Tensor
    """[R] int64, the expert of each then, counted from the rank's first."""
    ends: Tensor
    """[experts of a group] int32."""
    num_missing: int
    """Rows of zeros among these R, behind those that came."""

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.order)

    def bring(self, rows: Tensor) -> Tensor:
        """``rows`` [n, ...] in the order of experts -> [R, ...] of all ranks for this rank's
        experts, in their order; differentiable."""
        came: Tensor = _Send.apply(self, False, rows)
        if self.num_missing:
            came = torch.cat([came, came.new_zeros(self.num_missing, *came.shape[1:])])
        taken: Tensor = torch.ops.paradyse.take_rows(came, self.order, self.inverse, 1)
        return taken

    def take_back(self, rows: Tensor) -> Tensor:
        """``rows`` [R, ...], of those that ``bring`` gave -> [n, ...] at the ranks and in the order
        that they came from; differentiable."""
        back = torch.ops.paradyse.take_rows(rows, self.inverse, self.order, 1)
        sent: Tensor = _Send.apply(self, True, back[: self.num_rows - self.num_missing])
        return sent


def deal_rows(
    ends: Tensor, num_rows: int, bounds: Sequence[tuple[int, int]], axis: Axis, block_id: int
) -> Dealing:
    """How the rows of all ranks of ``axis`` meet their experts.

    Args:
        ends, num_rows, block_id: as of ``counts_of``.
        bounds: per rank its first expert, and the one behind its last.
    """
    counts = counts_of(ends, num_rows, axis, block_id)
    (first, end), most = bounds[axis.rank], max(b - a for a, b in bounds)
    came = [n for row in counts for n in row[first:end]]
    num_missing = max(0, FEWEST - sum(came))
    numbers = torch.tensor(came, dtype=torch.int64, device=ends.device)
    local = torch.arange(end - first, device=ends.device).repeat(axis.size)
    local = local.repeat_interleave(numbers, output_size=sum(came))
    local = torch.cat([local, local.new_full([num_missing], most - 1)])
    in_order, order, inverse, own_ends = torch.ops.paradyse.route_rows(local, most)
    between = tuple(tuple(sum(row[a:b]) for a, b in bounds) for row in counts)
    return Dealing(axis, block_id, between, order, inverse, in_order, own_ends, num_missing)


class _Send(torch.autograd.Function):
    """Rows to the ranks of their experts, or ``back``; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, dealing: Dealing, back: bool, rows: Tensor) -> Tensor:
        ctx.of = dealing, back
        return _send(dealing, back, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dealing, back = ctx.of
        return None, None, _send(dealing, not back, grad)


def _send(dealing: Dealing, back: bool, rows: Tensor) -> Tensor:
    counts = tuple(zip(*dealing.counts)) if back else dealing.counts
    sent = collectives.start_rows(rows.detach(), counts, dealing.axis, dealing.block_id)
    came: Tensor = sent.wait()
    return came
