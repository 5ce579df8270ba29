"""``paradyse.no_sync``: backwards that send no gradients of weights, until one sends them all.

With k calls before a step, gradients cross ranks once instead of k times, as with the ``no_sync``
of DistributedDataParallel and ``set_requires_gradient_sync`` of FSDP2. Until then each rank holds a
whole ``PartialGradient`` of every weight of which it computes a part. The first backward outside
keeps its own gradients in the same way, and sends what has piled up when it ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from paradyse.distributed import collectives
from paradyse.distributed.axis import SINGLE, Axis
from paradyse.distributed.calls import Call
from paradyse.distributed.collectives import Pending
from paradyse.distributed.held import forget_held
from paradyse.distributed.lanes import GRADIENTS, Overlap, lane_of
from paradyse.distributed.replicas import average
from paradyse.torch_private import at_end_of_backward, current_backward, only_accumulates
from paradyse.weights.coming_gradient import ComingGradient
from paradyse.weights.partial_gradient import NOT_SUMMED, PartialGradient, kept_dtype, rest_part
from paradyse.weights.shard import Model, check_module
from paradyse.weights.shard_comm import flatten, in_buckets, scatter_gradients, unflatten
from paradyse.weights.sharded_tensor import (
    ShardedTensor,
    reduce_dtype_of,
    relayout,
    rows_for_use,
    rows_here,
)

AT_ONCE = "sent at once"
"""What ranks tell each other of gradients, where none are kept back."""

_INSIDE = WeakTensorKeyDictionary()
"""The registry of weights whose models are inside ``no_sync`` -> how often."""


@contextmanager
def no_sync(model: Model) -> Iterator[None]:
    """A context inside which backward sends no gradients of the weights of ``model``.

    The first backward outside sends those that have piled up with its own, and leaves ``.grad`` as
    it would be without this. Enter it on every rank alike. Until the last backward a rank holds its
    part of the gradient of each whole weight, added up over calls in 32 bits where weights have 16:
    sharded weights take the memory of whole ones, which plans are chosen with. Such a ``.grad``
    raises when an optimizer or ``clip_grad_norm_`` would use it; ``zero_grad()`` drops it.

    Args:
        model: compiled or not; where a graph reads weights of other models too, their gradients
            are sent at the end of each backward. With one rank there is nothing to keep back.
    Raises:
        ValueError: ``model`` is no module.

    Example:

        with paradyse.no_sync(compiled):
            for batch in batches[:-1]:
                compiled(**batch).loss.backward()
        compiled(**batches[-1]).loss.backward()
        optimizer.step()
    """
    weights = list(check_module(model).parameters())
    for w in weights:
        _INSIDE[w] = _INSIDE.get(w, 0) + 1
    try:
        yield
    finally:
        for w in weights:
            _INSIDE[w] -= 1
            if not _INSIDE[w]:
                del _INSIDE[w]


class _Kept:
    """Weights of one axis whose gradients are kept back, or were."""

    def __init__(self) -> None:
        self.replicas = WeakTensorKeyDictionary()
        """Weight -> the data-parallel axis, in an order that ranks share."""
        self._hook: Callable[[], object] | None = None
        """What removes the hook of all optimizers, while there is one."""

    def add(self, weight: Tensor, replicas: Axis) -> None:
        """Have the gradient of ``weight``, averaged over ``replicas``, sent later: over those of
        an earlier call too, of which something is kept."""
        goes_on = weight in self.replicas and isinstance(weight.grad, PartialGradient)
        if replicas.size > 1 or not goes_on:
            self.replicas[weight] = replicas
        if self._hook is None:
            hook = register_optimizer_step_pre_hook(_refuse_to_step)
            self._hook = weakref.finalize(self, hook.remove)

    def waiting(self) -> list[Any]:
        """Those whose gradients are partial."""
        return [w for w in self.replicas if isinstance(w.grad, PartialGradient)]

    def remove(self, weights: Sequence[Tensor]) -> None:
        """``weights`` have their gradients."""
        for w in weights:
            del self.replicas[w]
        if not self.waiting() and self._hook is not None:
            self._hook()
            self._hook = None


def _refuse_to_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A hook of all optimizers, before any weight has changed."""
    for group in optimizer.param_groups:
        if any(isinstance(w.grad, PartialGradient) for w in group["params"]):
            raise RuntimeError(f"{type(optimizer).__name__} cannot step: {NOT_SUMMED}")


def gradients_are(axis: Axis, weights: Iterable[Tensor]) -> str:
    """How a call with ``weights`` over ``axis`` leaves gradients, as ranks tell each other:
    ``AT_ONCE``, or kept back or sent with those of earlier calls, and how many these are."""
    kept = axis.session.of(_Kept)
    if not _INSIDE and not kept.replicas:
        return AT_ONCE
    inside, waiting = any(w in _INSIDE for w in weights), kept.waiting()
    if not inside and not waiting:  # which may be of no calls, where they were zeroed in place
        return AT_ONCE
    num = sum(w.grad.num_parts > 0 for w in waiting)  # which parts, goes by the plans of replicas
    return f"{'kept back' if inside else 'sent'} with {num} of earlier calls"


class GradientSync:
    """How the gradients of one call's weights come together: as its backward computes them, or
    later.

    Args:
        weights: of the call.
        axis: the sequence axis, over which parts are summed.
        replicas: the data-parallel axis, over which gradients are averaged.
        block_id: what messages at the end of a backward are booked to.
    """

    def __init__(
        self,
        weights: Sequence[Tensor] = (),
        axis: Axis = SINGLE,
        replicas: Axis = SINGLE,
        block_id: int = collectives.OPTIMIZER,
    ) -> None:
        self.weights = [w for w in weights if w.requires_grad and w.is_leaf]
        self.axis, self.replicas, self.block_id = axis, replicas, block_id
        self.later = False
        """Whether the backward under way keeps the gradients."""
        self._ends: list[Pending] | None = None
        """Messages that the end of the backward under way waits for; None: each is waited for at
        once."""
        self._scatters: list[Pending] = []
        """Those of them that hold copies of whole gradients."""
        self._call: Call | None = None
        self._backward = -1
        """The latest that began, by autograd's number of it."""

    def begin(self, call: Call | None = None) -> str:
        """From within a backward, before it computes gradients of weights: what ``gradients_are``
        then.

        Args:
            call: whose backward it is; None where ranks are not compared.
        """
        self._call = call
        if self._backward != (backward := current_backward()):
            self._backward, self._ends = backward, None  # the one before may have failed
            self._scatters.clear()
        forget_held(self.axis)
        state, kept = gradients_are(self.axis, self.weights), self.axis.session.of(_Kept)
        self.later = state != AT_ONCE
        if not self.later:
            if self._ends is None and self.axis.session.of(Overlap).on:
                self._ends = []
            at_end_of_backward(self._settle)
            return state
        for w in self.weights:
            kept.add(w, self.replicas)
            if w.grad is not None and not isinstance(w.grad, PartialGradient):
                w.grad = rest_part(w, w.grad, place=w.grad)
        at_end_of_backward(self._send)
        return state

    @property
    def sends(self) -> bool:
        """Whether a backward that begins now sends what earlier ones have kept back."""
        kept = self.axis.session.of(_Kept)
        return bool(kept.waiting()) and not any(w in _INSIDE for w in self.weights)

    def have_same(self, number: int) -> bool:
        """Whether the ranks of the call have this ``number``, as far as the message tells that
        tells of the backward under way.

        Raises:
            ValueError, DroppedCallError: as ``Call.have_same``.
        """
        return self._call is not None and self._call.have_same(number)

    def arrive(
        self, message: Pending, like: Sequence[Tensor], nodes: Sequence[Any], scatter: bool = False
    ) -> list[Tensor]:
        """The gradients that ``message`` brings, as autograd may have them now: they come by the
        end of the backward under way, where nothing but ``.grad`` is to have them.

        Args:
            message: its result is a list of gradients.
            like: have their shapes, dtypes and devices.
            nodes: of autograd's graph, that they go to.
            scatter: the message holds copies of whole gradients, of which there are to be few.
        """
        if self._ends is None or not all(map(only_accumulates, nodes)):
            gradients: list[Tensor] = message.wait()
            return gradients
        self._ends.append(message)
        if scatter:
            self._scatters.append(message)
        return [ComingGradient(x, message, i) for i, x in enumerate(like)]

    def finish_scatters(self) -> None:
        """Wait for the messages that hold copies of whole gradients."""
        while self._scatters:
            self._scatters.pop(0).wait()

    @torch.no_grad()
    def _settle(self) -> None:
        """At the end of a backward: gradients that were to come are there."""
        ends, self._ends = self._ends or (), None
        self._scatters.clear()
        if ends and self._call is not None:
            self._call.nears_end()
        for message in ends:
            message.wait()
        for w in self.weights:
            if isinstance(w.grad, ComingGradient):
                w.grad = w.grad.value()
            elif isinstance(w.grad, ShardedTensor):
                # autograd detached it: on this rank alone where it has come on others later
                w.grad.is_alias = False

    @torch.no_grad()
    def _send(self) -> None:
        """Send what is kept back of weights that are outside ``no_sync``, of other calls too."""
        kept = self.axis.session.of(_Kept)
        ready = [w for w in kept.waiting() if w not in _INSIDE]
        # Alike on all replicas, each of which has planned for lengths of its own.
        kinds = [(kept.replicas[w], type(w), w.dtype, reduce_dtype_of(w)) for w in ready]
        sizes = [w.numel() * kept_dtype(w).itemsize for w in ready]
        for index in in_buckets(sizes, kinds):
            self._send_bucket([ready[i] for i in index], kinds[index[0]][0])
        kept.remove(ready)

    def _send_bucket(self, weights: Sequence[Any], replicas: Axis) -> None:
        """Give ``weights``, which are alike, their gradients."""
        parts: list[PartialGradient] = [w.grad for w in weights]
        totals = [
            _with_rest(w, part.rest, summed).to(w.dtype)
            for w, part, summed in zip(weights, parts, self._summed(weights, parts), strict=True)
        ]
        if replicas.size > 1:
            joined = average(flatten(totals), replicas, reduce_dtype_of(weights[0]))
            totals = unflatten(joined, [x.shape for x in totals])
        for w, part, total in zip(weights, parts, totals, strict=True):
            grad = w.detach().with_rows(total) if isinstance(w, ShardedTensor) else total
            w.grad = grad if part.place is None else part.place.copy_(grad)

    def _summed(
        self, weights: Sequence[Any], parts: Sequence[PartialGradient]
    ) -> Sequence[Tensor | None]:
        """What this rank is to hold of the sums of what ranks computed apart; None where they did
        not."""
        pairs = zip(weights, parts, strict=True)
        own = {w: part.own for w, part in pairs if part.own is not None}
        summed = dict(zip(own, self._sums([*own], [*own.values()]), strict=True)) if own else {}
        return [summed.get(w) for w in weights]

    def _sums(self, weights: Sequence[Any], own: Sequence[Tensor]) -> Sequence[Tensor]:
        """As ``_summed``, of what this rank computed of each: ``own``."""
        if isinstance(weights[0], ShardedTensor):
            return scatter_gradients(own, weights, self.block_id)
        flat = flatten(own).to(weights[0].dtype)
        if self.axis.size > 1:
            lane = lane_of(self.axis, GRADIENTS)
            collectives.all_reduce_in_place(flat, lane, {self.block_id: flat.nbytes})
        return unflatten(flat, [x.shape for x in own])


def _with_rest(weight: Tensor, rest: Tensor | None, summed: Tensor | None) -> Tensor:
    """What this rank holds of the gradient of ``weight``, before replicas are averaged."""
    if rest is None:
        return torch.zeros_like(rows_here(weight)) if summed is None else summed
    if isinstance(rest, ShardedTensor) and isinstance(weight, ShardedTensor):
        relayout(rest, weight.placement)
    rows = rows_for_use(rest)
    return rows if summed is None else rows + summed


def bytes_kept(weights: Sequence[Tensor], axis: Axis) -> int:
    """Bytes on this rank that gradients of ``weights`` take while they are kept back over several
    ranks of ``axis``, beyond those of the gradients themselves."""
    if axis.size == 1:
        return 0
    trained = [w for w in weights if w.requires_grad]
    parts = sum(w.numel() * kept_dtype(w).itemsize for w in trained)
    return parts - sum(w.nbytes for w in trained if not isinstance(w, ShardedTensor))
