"""Whole weights made from shards for the time of a block, and the shards themselves as weights.

ZeRO-3 (arXiv 1910.02054, stage 3): a block's weights are gathered before it runs and given back
after it, in forward and again in backward; the sum of their gradients is scattered to the ranks'
rows. What autograd saves are tensors whose storage is emptied in between, as in PyTorch's
fully_shard, so any compiled function can be the block.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paradyse.torch_private import (
    at_end_of_backward,
    current_backward,
    is_traceable_wrapper_subclass,
)
from paradyse.weights.cast_shard import CastShard, at_rest
from paradyse.weights.no_sync import GradientSync
from paradyse.weights.partial_gradient import own_part
from paradyse.weights.shard_comm import Gathers, dense, gather_shards, start_gather, start_scatter
from paradyse.weights.sharded_tensor import ShardedTensor
from paradyse.weights.slices import Form, Rows
from paradyse.weights.versions import Read

Shards = Sequence[ShardedTensor | CastShard]
"""Weights at rest; those that a step casts, as it takes them."""


class Shelf:
    """The gathered weights of one call: those that are whole at present, and those on their way.

    Args:
        ahead: let weights be fetched before they are asked for.
        sync: of the call; None: gradients are sent as they come.
        group_size: of a group of ranks beside others, whose messages of weights are one sequence
            with those of all groups; 0: there are no others.
    """

    def __init__(self, ahead: bool, sync: GradientSync | None = None, group_size: int = 0) -> None:
        self.ahead, self.sync, self.group_size = ahead, sync or GradientSync(), group_size
        self.holds = ahead
        """Whether weights may start behind a block's own message (``distributed/held.py``)."""
        self.filled: Gathered | None = None
        self.made: list[Gathered] = []
        """Gathered weights in the order of forward; backward fetches the last ones first."""
        self.coming: tuple[Shards, Gathers] | None = None
        self._unsent: Gathered | None = None
        """Weights that backward has begun to use, whose gradients have not been sent yet."""
        self._held: Gathered | None = None

    def may_fetch_before(self, gathered: Gathered) -> bool:
        """Whether backward may start now on what comes before ``gathered``, whose own gradients
        are to come. Among groups that is after the gradients of what comes behind were sent,
        also where a block runs again earlier than under other plans."""
        if not self.group_size:
            return True
        if self._unsent is not None and self._unsent is not gathered:
            self._held = gathered
            return False
        self._unsent = gathered if any(at_rest(s).requires_grad for s in gathered.shards) else None
        return True

    def send(self) -> None:
        """Wait for the gradients of the block before, as others are to be sent."""
        self.sync.finish_scatters()

    def sent(self, gathered: Gathered) -> None:
        """The gradients of ``gathered`` are on their way."""
        if self._unsent is gathered:
            self._unsent, held, self._held = None, self._held, None
            if held is not None:
                held.fetch_before()

    def fetch(self, shards: Shards, block_id: int, held: bool = False) -> None:
        """Start gathering ``shards``, which the next step will ask for, for ``block_id``; if
        ``held``, behind the present block's own first message."""
        if self.ahead and shards and self.coming is None:
            self.coming = (shards, start_gather(shards, block_id, held and self.holds))

    def take(self, shards: Shards) -> Gathers | None:
        """The messages that bring ``shards``, if they were fetched; others are waited for and
        dropped."""
        if self.coming is None:
            return None
        (fetched, messages), self.coming = self.coming, None
        if list(map(id, fetched)) == list(map(id, shards)):
            return messages
        for _, pending in messages:
            pending.wait()
        return None


class Gathered:
    """Whole weights of one block (or piece between blocks) in one call."""

    def __init__(self, shards: Shards, block_id: int, summed: bool, shelf: Shelf):
        """With ``summed`` each rank computes a part of the gradients, else each the whole."""
        self.shards, self.block_id, self.summed, self.shelf = shards, block_id, summed, shelf
        self.wholes: list[Tensor] = []
        self._read: list[Read] = []
        """The weights at rest."""
        self.again: Sequence[int] = range(len(shards))
        """Which of the weights backward reads."""
        self.is_filled = False
        self.stays = False
        """Nothing brings the weights back, so that they lie here as long as a backward may come."""
        self.holds = False
        """Whether the block begins with a message, behind which weights start that backward needs
        next."""

    def make(self) -> list[Tensor]:
        """The whole tensors, for the first time."""
        out = gather_shards(self.shards, self.block_id, coming=self.shelf.take(self.shards))
        self.wholes = [w.data for w in out]  # a version counter of their own
        self._read = [Read.of(at_rest(s)) for s in self.shards]
        self.is_filled = True
        return out

    def fill(self) -> None:
        """Gather again for backward what ``free`` gave back, and start on what comes next there."""
        shelf = self.shelf
        if shelf.filled is not None and shelf.filled is not self:
            shelf.filled.free()
        shelf.filled = self
        if not self.is_filled:
            shards, wholes = self.read_again(), [self.wholes[i] for i in self.again]
            for i in self.again:
                self._read[i].again()
            coming = shelf.take(shards)
            for w in wholes:
                w.untyped_storage().resize_(w.numel() * w.element_size())
            gather_shards(shards, self.block_id, wholes, coming)
            self.is_filled = True
        self.fetch_before()

    def fetch_before(self) -> None:
        """Start on the weights that backward will ask for after these."""
        made = self.shelf.made
        if self.shelf.may_fetch_before(self) and (at := made.index(self)):
            before = made[at - 1]
            self.shelf.fetch(before.read_again(), before.block_id, self.holds)

    def leave(self) -> None:
        """Give the memory back after the forward of a block that gathers its weights anew when it
        runs again in backward."""
        self.shelf.made.append(self)
        self.free()

    def free(self) -> None:
        if self.stays:
            return
        for w in self.wholes:
            w.untyped_storage().resize_(0)
        self.is_filled = False

    def scattered(self, grads: Mapping[int, Tensor]) -> None:
        """``grads``, by the places of their weights, have begun to be scattered."""

    def read_again(self) -> Shards:
        """Those whose weights backward reads."""
        return [self.shards[i] for i in self.again]

    def release(self, outputs: Sequence[Any], again: Sequence[int] | None = None) -> list[Any]:
        """Give the memory back after forward; the block's ``outputs`` bring it back in backward.

        Args:
            again: which of the weights backward reads; default all.
        """
        self.again = self.again if again is None else again
        mine = {w.untyped_storage().data_ptr() for w in self.wholes}
        # An output may be a part of a weight itself, such as a slice of a table of positions.
        result = [
            x.clone() if isinstance(x, Tensor) and _storage(x) in mine else x for x in outputs
        ]
        needs = [i for i, x in enumerate(result) if isinstance(x, Tensor) and x.requires_grad]
        if needs:
            self.shelf.made.append(self)
            held = _FillInBackward.apply(self, *(result[i] for i in needs))
            for i, x in zip(needs, held, strict=True):
                result[i] = x
        self.free()
        return result


def _storage(x: Tensor) -> int:
    """Address of the tensor's memory; 0 where it has none of its own."""
    return 0 if is_traceable_wrapper_subclass(x) else x.untyped_storage().data_ptr()


class _FillInBackward(torch.autograd.Function):
    """Outputs of a block as they are; their gradients come when its weights are whole again."""

    @staticmethod
    def forward(ctx: Any, gathered: Gathered, *outputs: Tensor) -> Any:
        ctx.gathered = gathered
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in outputs)  # of views none may be written in place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gathered: Gathered = ctx.gathered
        gathered.fill()
        if not any(at_rest(s).requires_grad for s in gathered.shards):
            at_end_of_backward(gathered.free)  # no gradient of theirs comes by to do so
        return None, *grads


class _Gather(torch.autograd.Function):
    """Shards to whole weights; backward starts to scatter the sum of the gradients, or keeps the
    rank's summand."""

    @staticmethod
    def forward(ctx: Any, gathered: Gathered, *shards: Tensor) -> Any:
        ctx.gathered = gathered
        ctx.set_materialize_grads(False)
        wholes = gathered.make()
        frozen = [w for w, s in zip(wholes, shards, strict=True) if not s.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gathered: Gathered = ctx.gathered
        gathered.free()
        grads = dense(grads)
        if gathered.shelf.group_size:
            grads = tuple(_of_group(gathered, grads))
        found = [i for i, g in enumerate(grads) if g is not None]
        out: list[Tensor | None] = [None] * len(grads)
        like = [gathered.shards[i] for i in found]
        given = [grads[i] for i in found]
        if gathered.summed and gathered.shelf.sync.later:
            for i, shard in zip(found, like, strict=True):
                out[i] = own_part(at_rest(shard), grads[i])
            return None, *out
        if not gathered.summed and not gathered.shelf.group_size:
            for i, shard, grad in zip(found, like, given, strict=True):
                rows = shard.placement.take_own(grad).to(shard.trained_dtype)
                out[i] = at_rest(shard).with_rows(rows)
            return None, *out
        sync = gathered.shelf.sync
        gathered.shelf.send()
        for index, message in start_scatter(given, like, gathered.block_id):
            shards = [at_rest(like[k]) for k in index]
            nodes = [ctx.next_functions[found[k]][0] for k in index]
            message.then(partial(_with_rows, shards))
            coming = sync.arrive(message, shards, nodes, scatter=True)
            for k, grad in zip(index, coming, strict=True):
                out[found[k]] = grad
        gathered.scattered(dict(zip(found, given, strict=True)))
        gathered.shelf.sent(gathered)
        return None, *out


def _of_group(gathered: Gathered, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What this rank of a group adds to the gradients of all groups, one for each weight that is
    trained, as ranks of other groups have them."""
    share = 1 if gathered.summed else gathered.shelf.group_size
    out: list[Tensor | None] = []
    for shard, grad in zip(gathered.shards, grads, strict=True):
        if grad is None and at_rest(shard).requires_grad:
            out.append(shard.new_whole().zero_())
        else:
            out.append(grad if grad is None or share == 1 else grad / share)
    return out


def _with_rows(shards: Sequence[ShardedTensor], rows: Sequence[Tensor]) -> list[Tensor]:
    return [s.with_rows(x) for s, x in zip(shards, rows, strict=True)]


def gather(
    shards: Collection[ShardedTensor | CastShard], block_id: int, summed: bool, shelf: Shelf
) -> tuple[list[Tensor], Gathered | None]:
    """Whole weights, differentiable, and what must ``release`` them where backward will come.

    Args:
        shards: the weights, of one axis.
        block_id: what the messages are booked to.
        summed: each rank (of a group) computes a part of the gradients; else each the whole.
        shelf: of the call, where they may be on their way.
    """
    return gather_by(Gathered([*shards], block_id, summed, shelf))


def gather_by(gathered: Gathered) -> tuple[list[Tensor], Gathered | None]:
    """What ``gather`` gives, of the weights that ``gathered`` was made for."""
    if not torch.is_grad_enabled():
        return gathered.make(), None
    wholes = _Gather.apply(gathered, *map(at_rest, gathered.shards))
    return list(wholes), gathered


@torch.no_grad()
def write_back(shards: Sequence[ShardedTensor], wholes: Sequence[Tensor]) -> None:
    """Have ``shards`` hold what was written into ``wholes``, which were gathered of them. The
    values are compared, as writes through ``.data`` are not counted."""
    for shard, whole in zip(shards, wholes, strict=True):
        rows = shard.placement.take_own(whole.detach())
        if not torch.equal(rows, shard.for_use):
            shard.data.copy_(whole.detach())


class _AsItLies(torch.autograd.Function):
    """The rank's rows as a plain tensor."""

    @staticmethod
    def forward(ctx: Any, shard: ShardedTensor) -> Tensor:
        ctx.like = shard
        rows = shard.for_use
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        like: ShardedTensor = ctx.like
        return like.with_rows(_for_one_weight(grad))


_GIVEN: tuple[int, set[int]] = (-1, set())
"""The number of the latest backward, and where gradients lie that it gave to weights as rows."""


def _for_one_weight(grad: Tensor) -> Tensor:
    """``grad``, or a copy where another weight has that memory: autograd takes rows for new."""
    global _GIVEN
    backward = current_backward()
    if backward != _GIVEN[0]:
        _GIVEN = backward, set()
    if grad.untyped_storage().data_ptr() in _GIVEN[1]:
        grad = grad.clone()
    _GIVEN[1].add(grad.untyped_storage().data_ptr())
    return grad


def group_rows(shard: ShardedTensor, form: Rows) -> Tensor:
    """W_r, the rows of this rank's group, from those that ``shard`` holds (``form`` fits them)."""
    return form.pad(_AsItLies.apply(shard), shard.placement.axis.rank)


def fits(shard: ShardedTensor, form: Form) -> bool:
    """Whether the rows of ``shard`` that lie here are those of the rank's group in ``form``."""
    at = shard.placement
    return form is not None and form.dim == at.dim and form.present == at.runs


def streams(x: Any, form: Form) -> bool:
    """Whether groups that take the weight ``x`` in ``form`` have their rows from the ranks, each
    from that which holds them."""
    return isinstance(x, ShardedTensor) and fits(x, form)
