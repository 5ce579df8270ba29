"""What the groups of ``metp`` compute with, one group after the other, and the gradients of it.

A whole tensor lends each group its rows. Of a sharded weight rank g holds the rows of group g:
while a group is computed the next one's are under way, behind the last one those of the block that
comes next, and gradients travel to their owner the same way in backward. At most two groups'
weights are here at once besides the rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.collectives import Pending
from paradyse.distributed.lanes import GATHERS, GRADIENTS, lane_of
from paradyse.weights.cast_shard import CastShard, at_rest
from paradyse.weights.no_sync import GradientSync
from paradyse.weights.partial_gradient import kept_dtype, own_part
from paradyse.weights.shard_comm import by_dtype, split_rows
from paradyse.weights.sharded_tensor import ShardedTensor
from paradyse.weights.slices import Form

Casts = Sequence[torch.dtype | None]
"""The smaller dtype that groups cast each tensor to before they read it, if any."""


class WeightStream:
    """Those of a block's tensors that are sharded by groups, whose rows come group by group.

    Args:
        tensors: of the block.
        groups: those with something to compute, in order.
        block_id: what messages are booked to.
        casts: of the tensors.
    """

    def __init__(
        self, tensors: Sequence[Any], groups: Sequence[int], block_id: int, casts: Casts
    ) -> None:
        self.groups, self.block_id = groups, block_id
        self.shards: dict[int, ShardedTensor | CastShard] = {
            i: t if cast is None else CastShard(t, cast)
            for i, (t, cast) in enumerate(zip(tensors, casts, strict=True))
            if isinstance(t, ShardedTensor)
        }
        """By index of the tensor."""
        at, shards = list(self.shards), list(self.shards.values())
        self.messages = [
            [at[k] for k in index] for index in by_dtype(shards, [s.reduce_dtype for s in shards])
        ]
        """Indices of those that travel together."""
        self._coming: dict[int, list[Pending]] = {}

    def unstarted(self) -> WeightStream:
        """The same, of which nothing is on its way."""
        other = copy(self)
        other._coming = {}
        return other

    def start(self, group: int) -> None:
        """Start on the rows of ``group``, unless they are on their way."""
        if group in self._coming:
            return
        sent = []
        for index in self.messages:
            shards = [self.shards[i] for i in index]
            axis = lane_of(shards[0].placement.axis, GATHERS)
            if axis.rank == group:
                flat = torch.cat([s.for_use.detach().reshape(-1) for s in shards])
            else:
                n = sum(s.placement.numel(s.shape, group) for s in shards)
                first = shards[0]
                flat = torch.empty(n, dtype=first.dtype, device=at_rest(first).used_on)
            sent.append(collectives.broadcast(flat, axis, group, self.block_id))
        self._coming[group] = sent

    def rows(self, group: int, behind: Callable[[], None]) -> dict[int, Tensor]:
        """Index of a sharded tensor -> the rows of ``group``. Starts on the next group's; where
        there is none calls ``behind``."""
        self.start(group)
        at = self.groups.index(group) + 1
        if at < len(self.groups):
            self.start(self.groups[at])
        else:
            behind()
        out: dict[int, Tensor] = {}
        for index, pending in zip(self.messages, self._coming.pop(group), strict=True):
            out.update(self.split(pending.wait(), index, group))
        return out

    def split(self, flat: Tensor, index: Sequence[int], group: int) -> dict[int, Tensor]:
        """The parts of a message, by index of the tensor.

        Args:
            flat: the message.
            index: of the tensors that travel in it.
            group: whose rows it brings.
        """
        parts = split_rows(flat, [self.shards[i] for i in index], group)
        return dict(zip(index, parts, strict=True))

    def gradients(
        self, group: int, index: Sequence[int], own: Sequence[int], flat: Tensor
    ) -> list[Tensor]:
        """Gradients of the tensors ``own``, in rows of this rank.

        Args:
            group, index, flat: as of ``split``.
            own: what of ``index`` this rank holds rows of.
        """
        rows = self.split(flat, index, group) if own else {}
        like = {i: at_rest(self.shards[i]) for i in own}
        return [like[i].with_rows(rows[i].to(like[i].trained_dtype)) for i in own]

    def drop(self) -> None:
        """Wait for what nobody will take."""
        for sent in self._coming.values():
            for pending in sent:
                pending.wait()
        self._coming.clear()


class Streams:
    """The weight streams of one call: behind its last group each starts on the first group of the
    next step, in backward of the step before.

    Args:
        ahead: whether they do.
        of_step: a method that gives the stream of the step at a position, if it has one. Whose
            method it is, is not kept alive.
    """

    def __init__(self, ahead: bool, of_step: Callable[[int], WeightStream | None]) -> None:
        self.ahead, self._of_step = ahead, WeakMethod(of_step)
        self.in_forward, self.position = True, 0
        """Of the present step, in forward."""
        self._positions: dict[int, int] = {}
        """By block id, the position of its step, where that has a stream."""
        self._made: dict[int, WeightStream] = {}
        """By position."""
        self._coming: WeightStream | None = None

    def take(
        self,
        tensors: Sequence[Tensor],
        groups: Sequence[int],
        block_id: int,
        casts: Casts,
        again: bool,
    ) -> WeightStream:
        """The stream of a block, which may be on its way.

        Args:
            tensors, groups, block_id, casts: as of ``WeightStream``.
            again: whether backward will ask for it.
        """
        coming, self._coming = self._coming, None
        if coming is not None and coming.block_id != block_id:
            coming.drop()
            coming = None
        stream = coming or WeightStream(tensors, groups, block_id, casts)
        if self.in_forward and again and stream.shards:
            self._positions[block_id] = self.position
            self._made[self.position] = stream.unstarted()
        return stream

    def begin_following(self) -> None:
        """In forward, start on the first group of the step behind the present one."""
        of_step = self._of_step()
        if self.ahead and self.in_forward and of_step is not None:
            self._begin(of_step(self.position + 1))

    def begin_before(self, block_id: int) -> None:
        """In backward, start on the first group of the step before that of the block
        ``block_id``."""
        if self.ahead and block_id in self._positions:
            before = self._made.get(self._positions[block_id] - 1)
            self._begin(None if before is None else before.unstarted())

    def _begin(self, stream: WeightStream | None) -> None:
        if stream is not None and stream.shards and stream.groups and self._coming is None:
            stream.start(stream.groups[0])
            self._coming = stream


class GroupTensors:
    """Tensors that groups take their part of; those that are sharded are streamed.

    Args:
        tensors: values of the rank's tokens and weights, whole or sharded by groups.
        forms: how a group takes each: by rows, or whole.
        stream: of those that are sharded.
        sync: of the call: where it has gradients sent later, those of streamed weights are kept on
            this rank, whole.
        behind: called when the last group's weights are on their way.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        forms: Sequence[Form],
        stream: WeightStream,
        sync: GradientSync,
        behind: Callable[[], None],
    ):
        self.tensors, self.forms, self.stream, self.behind = tensors, forms, stream, behind
        self.sync, self.shards, self.groups = sync, stream.shards, stream.groups
        self._leaving: list[tuple[int, list[int], Pending]] = []
        self._streamed: dict[int, Tensor] = {}
        """Index of a sharded weight -> the present group's gradient."""
        self._totals: list[Tensor | None] = [None] * len(tensors)
        self._kept: dict[int, Tensor] = {}
        """Index of a sharded weight -> its whole gradient, of the groups that are done."""

    def take(self, group: int, needs: Sequence[bool]) -> list[Tensor]:
        """The part of ``group`` of every tensor, detached; those of ``needs`` require gradients."""
        streamed = self.stream.rows(group, self.behind)
        out = []
        for i, (t, form, need) in enumerate(zip(self.tensors, self.forms, needs, strict=True)):
            if i in streamed:
                assert form is not None
                part = form.pad(streamed[i], group)
            else:
                part = t.detach() if form is None else form.take(t.detach(), group)
            out.append(part.contiguous().requires_grad_(need))
        return out

    def add(self, group: int, at: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """Add ``grads`` of the part of ``group`` of the tensors ``at``; None is nothing."""
        for i, grad in zip(at, grads, strict=True):
            form, total = self.forms[i], self._totals[i]
            if grad is None:
                continue
            if i in self.shards:
                self._streamed[i] = self._streamed[i] + grad if i in self._streamed else grad
            elif form is not None:
                if total is None:
                    like = self.tensors[i]
                    dtype = sum_dtype(like) if form.overlap else like.dtype
                    total = torch.zeros_like(
                        like, dtype=dtype, memory_format=torch.contiguous_format
                    )
                    self._totals[i] = total
                form.add(total, group, grad)
            elif total is None:
                self._totals[i] = grad.to(sum_dtype(grad), copy=True)
            else:
                total.add_(grad)

    def send(self, group: int) -> None:
        """Start summing the gradients of streamed weights at the rank that holds ``group``, or keep
        them."""
        grads, self._streamed = self._streamed, {}
        if self.sync.later:
            return self._keep(group, grads)
        for message in self.stream.messages:
            index = [i for i in message if i in grads]
            if not index:
                continue
            parts = [_real_rows(grads[i], self.forms[i], group).reshape(-1) for i in index]
            like = self.shards[index[0]]
            summands = torch.cat(parts).to(like.reduce_dtype)
            lane = lane_of(like.placement.axis, GRADIENTS)
            pending = collectives.reduce_to(summands, lane, group, self.stream.block_id)
            self._leaving.append((group, index, pending))

    def _keep(self, group: int, grads: Mapping[int, Tensor]) -> None:
        for i, grad in grads.items():
            like = at_rest(self.shards[i])
            if i not in self._kept:
                shape, dtype = like.shape, kept_dtype(like)
                self._kept[i] = torch.zeros(shape, dtype=dtype, device=like.used_on)
            rows = _real_rows(grad, self.forms[i], group)
            like.placement.put(self._kept[i], group, rows)

    def gradients(self, nodes: Sequence[Any]) -> list[Tensor | None]:
        """The gradient of each tensor, when all groups are done. The last group's are left under
        way where nothing else is to have them; those of the block before have come then.

        Args:
            nodes: of autograd's graph, that the gradients go to: one for each tensor.
        """
        out: list[Tensor | None] = [
            None if total is None else total.to(t.dtype)
            for total, t in zip(self._totals, self.tensors, strict=True)
        ]
        self.sync.finish_scatters()
        for group, index, pending in self._leaving:
            like = [at_rest(self.shards[i]) for i in index]
            at = like[0].placement.axis
            own = index if group == at.rank else []
            # A message may outlive the block, so it keeps none of the values of ``tensors`` alive.
            message = pending.then(partial(self.stream.gradients, group, index, own))
            if group == self.groups[-1]:
                to = [nodes[i] for i in own]
                coming = self.sync.arrive(message, like[: len(own)], to, scatter=True)
            else:
                coming = message.wait()
            for i, rows in zip(own, coming, strict=True):
                out[i] = rows
            if at.rank not in self.groups:  # this rank's group has nothing to do
                for i, x in zip(index, like, strict=True):
                    out[i] = x.with_rows(torch.zeros_like(x.local))
        for i, whole in self._kept.items():
            out[i] = own_part(at_rest(self.shards[i]), whole)
        return out


def sum_dtype(x: Tensor) -> torch.dtype:
    """Dtype of a sum over groups of values like ``x``: 32 bits for those of 16."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def _real_rows(grad: Tensor, form: Form, group: int) -> Tensor:
    """The rows of the gradient of W_g that are not padding."""
    assert form is not None
    (runs,) = form.packed(group).runs
    parts = zip(runs, grad.split([n for _, n in runs], form.dim), strict=True)
    real = [rows for (start, _), rows in parts if start >= 0]
    return real[0] if len(real) == 1 else torch.cat(real, form.dim)
