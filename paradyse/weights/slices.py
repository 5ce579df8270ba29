"""How a block takes its weights: whole (W), or only the rows or columns of one group (W_g).

A strategy asks for one of the two forms and does not know how weights lie at rest: replicated
weights give both without a message, sharded ones are gathered for W, and for the W_g of the rank's
own group give the rows that lie here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paradyse.torch_private import FakeTensor

MANY_RUNS = 64
"""Rows in more stretches than this are taken by one index, as each stretch costs a launch."""


@dataclass(frozen=True)
class Rows:
    """Rows (dim 0) or columns (dim 1) of a weight that each group computes with."""

    dim: int
    groups: tuple[tuple[int, ...], ...]
    """Per group its indices into the weight, equally many for each where one compiled function
    serves them all; -1 stands for a row of zeros, which pads a group."""

    @cached_property
    def runs(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per group its indices as ``stretches``."""
        return tuple(stretches(rows) for rows in self.groups)

    @cached_property
    def present(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """``runs`` without the rows of zeros."""
        return tuple(stretches(tuple(r for r in rows if r >= 0)) for rows in self.groups)

    @cached_property
    def overlap(self) -> bool:
        """Whether several groups compute with one row, such as that of a key head that they
        share."""
        rows = [row for group in self.groups for row in group if row >= 0]
        return len({*rows}) < len(rows)

    def take(self, weight: Tensor, group: int) -> Tensor:
        """W_g of ``group`` from ``weight`` W, differentiably; a view where it is one stretch."""
        if len(self.runs[group]) > MANY_RUNS:
            index, there = self._index("take", group, weight.device)
            shape = [-1 if d == self.dim else 1 for d in range(weight.ndim)]
            taken = weight.index_select(self.dim, index)
            return taken * there.to(weight.dtype).view(shape)
        parts = []
        for start, n in self.runs[group]:
            if start >= 0:
                parts.append(weight.narrow(self.dim, start, n))
            else:
                shape = [*weight.shape]
                shape[self.dim] = n
                parts.append(weight.new_zeros(shape))
        if all(start < 0 for start, _ in self.runs[group]):
            # All ranks must have a gradient for the same weights: one of zeros here.
            if weight.shape[self.dim] == 0:
                return torch.cat([weight, parts[0]], self.dim)
            return weight.narrow(self.dim, 0, 1) * parts[0]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    @cached_property
    def _indices(self) -> dict[tuple[str, int, torch.device], Tensor]:
        """What ``_index`` has made: on a GPU each would be a copy from the host, at every use."""
        return {}

    def _index(self, use: str, group: int, device: torch.device) -> Tensor:
        """int64 [2, n] on ``device``: to "take" rows of ``group``, each of them and 1, or 0 and 0
        for a row of zeros; to "add" to them, where those that are none lie in the group, and they.
        """
        key = use, group, device
        if key in self._indices:
            return self._indices[key]
        rows = self.groups[group]
        if use == "take":
            pairs = [(max(0, row), int(row >= 0)) for row in rows]
        else:
            pairs = [(i, row) for i, row in enumerate(rows) if row >= 0]
        index = torch.tensor(pairs, device=device).T.contiguous()
        if not isinstance(index, FakeTensor):
            self._indices[key] = index
        return index

    def packed(self, group: int) -> Rows:
        """The same rows of ``group``, as indices into a tensor of those that are not padding."""
        at = iter(range(len(self.groups[group])))
        return Rows(self.dim, (tuple(-1 if row < 0 else next(at) for row in self.groups[group]),))

    def pad(self, rows: Tensor, group: int) -> Tensor:
        """W_g of ``group`` from those of its ``rows`` that are not padding."""
        return self.packed(group).take(rows, 0) if -1 in self.groups[group] else rows

    def add(self, out: Tensor, group: int, grad: Tensor) -> None:
        """Add ``grad``, of the W_g of ``group``, to its rows of ``out``, the gradient of W."""
        if len(self.runs[group]) > MANY_RUNS:
            source, index = self._index("add", group, out.device)
            out.index_add_(self.dim, index, grad.index_select(self.dim, source))
            return
        at = 0
        for start, n in self.runs[group]:
            if start >= 0:
                out.narrow(self.dim, start, n).add_(grad.narrow(self.dim, at, n))
            at += n


def stretches(rows: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """``rows`` as stretches of consecutive ones, (first, how many); n times -1 are (-1, n)."""
    found: list[tuple[int, int]] = []
    for row in rows:
        start, n = found[-1] if found else (-2, 0)
        if row == start + n if start >= 0 else row == start:
            found[-1] = (start, n + 1)
        else:
            found.append((row, 1))
    return tuple(found)


Form = Rows | None
"""How a weight is taken: ``Rows`` for W_g, None for the whole W."""
