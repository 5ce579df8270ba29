"""How a block takes its weights: whole (W), or only the rows or columns of this rank's group (W_r).

With replicated weights both are local; what a rank computed of their gradients is summed over
ranks in one message per block. A sharded layout serves the same two forms with other communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paradyse import comm
from paradyse.mesh import Axis


@dataclass(frozen=True)
class Rows:
    """Rows (dim 0) or columns (dim 1) of a weight that each group computes with; -1 is a row of
    zeros.
    """

    dim: int
    groups: tuple[tuple[int, ...], ...]
    """Per group the indices into the weight, equally many for each."""

    def take(self, weight: Tensor, group: int) -> Tensor:
        """W_g, with zeros for padding. Differentiable."""
        rows = self.groups[group]
        if rows == tuple(range(rows[0], rows[0] + len(rows))) and rows[0] >= 0:
            return weight.narrow(self.dim, rows[0], len(rows))
        index = torch.tensor(rows, device=weight.device)
        if min(rows) >= 0:
            return weight.index_select(self.dim, index)
        taken = weight.index_select(self.dim, index.clamp(min=0))
        shape = [1] * weight.ndim
        shape[self.dim] = -1
        return taken * (index >= 0).to(weight.dtype).view(shape)

    def put_back(self, out: Tensor, grads: Tensor) -> None:
        """Add ``grads`` [p, ..] of all groups into ``out``, the gradient of the whole weight."""
        for rows, grad in zip(self.groups, grads, strict=True):
            index = torch.tensor(rows, device=out.device)
            keep = index >= 0
            if not bool(keep.all()):
                index, grad = index[keep], grad.index_select(self.dim, keep.nonzero()[:, 0])
            out.index_add_(self.dim, index, grad)


Form = Rows | None
"""How a weight is taken: ``Rows`` for the rank's group, None for the whole."""


BUCKET_BYTES = 64 * 2**20
"""A message of summed gradients holds about this much: it bounds the copy that a message needs."""


class SumGradients(torch.autograd.Function):
    """Weights as they are; backward sums what each rank computed of their gradients.

    One message for many weights, since latency rules where weights are replicated; each block is
    booked the bytes of its own (``owners``: a block id per weight).
    """

    @staticmethod
    def forward(ctx: Any, axis: Axis, owners: Sequence[int], *weights: Tensor) -> Any:
        ctx.where = (axis, owners)
        ctx.set_materialize_grads(False)
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        axis, owners = ctx.where
        out: list[Tensor | None] = [None] * len(grads)
        for bucket in _buckets(grads):
            flat = torch.cat([grads[i].reshape(-1) for i in bucket])
            shares: dict[int, int] = {}
            for i in bucket:
                size = grads[i].numel() * grads[i].element_size()
                shares[owners[i]] = shares.get(owners[i], 0) + size
            total = comm.all_reduce_in_place(flat, axis, shares)
            for i, part in zip(
                bucket, total.split([grads[i].numel() for i in bucket]), strict=True
            ):
                out[i] = part.view(grads[i].shape)
        return None, None, *out


def _buckets(grads: Sequence[Tensor | None]) -> list[list[int]]:
    """Indices of the gradients there are, by dtype, in messages of about ``BUCKET_BYTES``."""
    buckets: list[list[int]] = []
    for dtype in dict.fromkeys(g.dtype for g in grads if g is not None):
        room = 0
        for i, g in enumerate(grads):
            if g is None or g.dtype != dtype:
                continue
            size = g.numel() * g.element_size()
            if size > room:
                buckets.append([])
                room = BUCKET_BYTES
            buckets[-1].append(i)
            room -= size
    return buckets
