"""The groups' weights of ``metp``, one group after the other, from the rank that holds them.

While a group is computed the next one's weights are under way; gradients travel to their owner the
same way in backward. At most two groups' weights are here at once besides the rank's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.weights.shard_comm import by_dtype
from paradyse.weights.sharded_tensor import ShardedTensor
from paradyse.weights.slices import Rows


class WeightStream:
    """The sharded ones among a block's weights, whose rank g holds the rows of group g."""

    def __init__(self, weights: Sequence[Tensor], groups: Sequence[int], block_id: int):
        self.shards = {i: w for i, w in enumerate(weights) if isinstance(w, ShardedTensor)}
        self.messages = [
            [list(self.shards)[k] for k in index] for index in by_dtype(list(self.shards.values()))
        ]
        self.groups, self.block_id = list(groups), block_id
        self._coming: dict[int, list[Any]] = {}
        self._leaving: list[tuple[int, list[int], Any]] = []

    def _start(self, group: int) -> None:
        sent = []
        for index in self.messages:
            shards = [self.shards[i] for i in index]
            axis = shards[0].placement.axis
            if axis.rank == group:
                flat = torch.cat([s.local.detach().reshape(-1) for s in shards])
            else:
                n = sum(s.placement.numel(s.shape, group) for s in shards)
                flat = shards[0].local.new_empty(n)
            sent.append(collectives.broadcast(flat, axis, group, self.block_id))
        self._coming[group] = sent

    def rows(self, group: int) -> dict[int, Tensor]:
        """Index of the weight -> the rows of ``group``; starts on those of the group after it."""
        if not self.shards:
            return {}
        if group not in self._coming:
            self._start(group)
        at = self.groups.index(group) + 1
        if at < len(self.groups):
            self._start(self.groups[at])
        out: dict[int, Tensor] = {}
        for index, pending in zip(self.messages, self._coming.pop(group), strict=True):
            out.update(self._split(pending.wait(), index, group))
        return out

    def _split(self, flat: Tensor, index: Sequence[int], group: int) -> dict[int, Tensor]:
        out, at = {}, 0
        for i in index:
            shape = self.shards[i].placement.shape(self.shards[i].shape, group)
            n = self.shards[i].placement.numel(self.shards[i].shape, group)
            out[i] = flat[at : at + n].view(shape)
            at += n
        return out

    def set_apart(
        self,
        where: Sequence[int],
        grads: list[Tensor | None],
        first: int,
        of_group: dict[int, Tensor],
    ) -> None:
        """Move the gradients of sharded weights from ``grads`` to ``of_group``.

        Args:
            where: per gradient the tensor it is of; weights begin at ``first``.
        """
        for k, i in enumerate(where):
            grad = grads[k]
            if i - first in self.shards and grad is not None:
                had = of_group.get(i - first)
                of_group[i - first] = grad if had is None else had + grad
                grads[k] = None

    def send_gradients(self, group: int, grads: Mapping[int, Tensor], uses: Sequence[Any]) -> None:
        """Start summing ``grads`` of W_g over ranks at the rank that holds the group."""
        for message in self.messages:
            index = [i for i in message if i in grads]
            if not index:
                continue
            parts = [real_rows(grads[i], uses[i].form, group).reshape(-1) for i in index]
            axis = self.shards[index[0]].placement.axis
            pending = collectives.reduce_to(torch.cat(parts), axis, group, self.block_id)
            self._leaving.append((group, index, pending))

    def gradients(self) -> dict[int, ShardedTensor]:
        """Index of the weight -> its gradient, when all groups are done."""
        out: dict[int, ShardedTensor] = {}
        for group, index, pending in self._leaving:
            flat = pending.wait()
            for i, rows in self._split(flat, index, group).items():
                like = self.shards[i]
                if group == like.placement.axis.rank:
                    out[i] = ShardedTensor(rows, like.placement, like.shape)
                elif i not in out and like.placement.axis.rank not in self.groups:
                    empty = torch.zeros_like(like.local)  # this rank's group has nothing to do
                    out[i] = ShardedTensor(empty, like.placement, like.shape)
        return out


def padded_rows(rows: Tensor, form: Rows, group: int) -> Tensor:
    """W_g from the rows that exist: zeros for those that are missing."""
    return rows if -1 not in form.groups[group] else form.packed(group).take(rows, 0)


def real_rows(grad: Tensor, form: Rows, group: int) -> Tensor:
    """Of the gradient of W_g the rows that exist."""
    if -1 not in form.groups[group]:
        return grad
    shape = list(grad.shape)
    shape[form.dim] = sum(row >= 0 for row in form.groups[group])
    out = grad.new_zeros(shape)
    form.packed(group).add(out, 0, grad)
    return out
