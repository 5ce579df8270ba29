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


class TakeWeights(torch.autograd.Function):
    """Weights of one block in the forms asked for; backward sums their gradients over ranks."""

    @staticmethod
    def forward(
        ctx: Any, axis: Axis, block_id: int, forms: Sequence[Form], *weights: Tensor
    ) -> Any:
        ctx.where = (axis, block_id, forms, [w.shape for w in weights])
        ctx.set_materialize_grads(False)
        return tuple(
            w.view_as(w) if form is None else form.take(w, axis.rank)
            for w, form in zip(weights, forms, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        axis, block_id, forms, shapes = ctx.where
        out: list[Tensor | None] = [None] * len(grads)
        for dtype in dict.fromkeys(g.dtype for g in grads if g is not None):
            mine = [i for i, g in enumerate(grads) if g is not None and g.dtype == dtype]
            whole = [i for i in mine if forms[i] is None]
            parts = [i for i in mine if forms[i] is not None]
            if whole:
                total = comm.all_reduce(_flat(grads, whole), axis, block_id)
                for i, part in zip(
                    whole, total.split([grads[i].numel() for i in whole]), strict=True
                ):
                    out[i] = part.view(shapes[i])
            if parts:
                gathered = comm.all_gather(_flat(grads, parts), axis, block_id)
                sizes = [grads[i].numel() for i in parts]
                for i, part in zip(parts, gathered.split(sizes, 1), strict=True):
                    full = part.new_zeros(shapes[i])
                    forms[i].put_back(full, part.view(axis.size, *grads[i].shape))
                    out[i] = full
        return None, None, None, *out


def _flat(grads: Sequence[Any], which: Sequence[int]) -> Tensor:
    return torch.cat([grads[i].reshape(-1) for i in which])
