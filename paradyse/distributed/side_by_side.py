"""Groups of ranks side by side, each with work of its own: what fails in one ends the step of all.

Ranks of one group agree among themselves (``agreement``), and hear of nothing else before the end
of the step. So whoever fails, or hears of it in its group, rings in the store of the world. The
others ask there in passing, now and then when they start a message and while they wait for one.
Who hears of it fails in its own group, which drops its work and is in step again, then in every
group of which it has work left in this step, as others may wait for it there, in the order of the
micro-batches, and last with all ranks: all of them come there, and all raise the same.

Where a rank is gone nothing can be in step again: whoever hears of that raises at once.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paradyse.distributed.agreement import Agreement, agreement_of
from paradyse.distributed.axis import Axis, ranks_of, resolve_axis
from paradyse.distributed.collectives import CollectiveError, Started, Watchers
from paradyse.distributed.control import world_store
from paradyse.distributed.failures import (
    Dropped,
    DroppedCallError,
    Failure,
    RanksDisagreeError,
    error_of,
    first_line,
    is_out_of_memory,
    lacked_memory,
    num_out_of_memory,
)
from paradyse.torch_private import at_end_of_backward

ASK_S = 0.5
"""The store is asked so often at most."""


class SideBySide:
    """One step, as this rank goes through it; one at a time.

    Args:
        world: the axis of all ranks, each of which makes this object at the same time.
        meshes: of this rank's groups, one for each micro-batch in which it has work, in order;
            None: it is alone in it.
        doing: what errors call the step.
    """

    def __init__(self, world: Axis, meshes: Sequence[Any], doing: str) -> None:
        self._world, self._doing = world, doing
        self._all = agreement_of(world)
        self._groups = [_agreement_of(mesh) for mesh in meshes]
        self._axes = [world, *(resolve_axis(mesh) for mesh in meshes if mesh is not None)]
        self._dropped = world.session.of(Dropped)
        self._dropped.heard = None
        self._before = Counter(self._dropped.times)
        self._at, self._backward, self._is_lost = 0, "", False
        self._num_out_of_memory = num_out_of_memory()
        listener = world.session.of(_Listener)
        listener.step = None if self._all is None else self
        for axis in self._axes:
            axis.session.of(Started).notice = listener.notice

    def enter(self, number: int) -> None:
        """This rank comes to its micro-batch ``number``, and so do the others of its group.

        Raises:
            DroppedCallError: a rank has failed.
            CollectiveError: a rank is gone.
        """
        self._at, self._backward = number, ""
        group = self._groups[number]
        if group is not None:
            group.compare(f"comes to a micro-batch of {self._doing}", {})
        elif self._all is not None:
            self.listen()

    def computed(self, loss: Tensor) -> None:
        """Forward of the micro-batch gave ``loss``; its backward comes next."""
        self._before = Counter(self._dropped.times)  # what was repeated is well
        if loss.requires_grad:
            loss.register_hook(self._begin_backward)

    def leave(self) -> None:
        """The micro-batch is over.

        Raises:
            DroppedCallError: its backward failed, and the loop has gone on all the same.
        """
        if (failure := self._failed_in_backward()) is not None:
            raise error_of([failure])
        self._before = Counter(self._dropped.times)
        self._at += 1

    def end(self) -> None:
        """The step is over on this rank, well or not."""
        self._world.session.of(_Listener).step = None
        self._dropped.heard = None

    def fail(self, error: BaseException) -> None:
        """The step failed here with ``error``; all ranks are told.

        Args:
            error: ``GeneratorExit`` where a loop over the micro-batches was left.
        Raises:
            DroppedCallError: what all raise; not for an error that is this rank's own, nor where a
                loop was left.
            CollectiveError: a rank is gone.
        """
        if self._all is None or not dist.is_initialized() or self._settled():
            return
        left = isinstance(error, GeneratorExit)
        sessions = [axis.session for axis in self._axes]
        if self._is_lost or any(session.of(Started).broken for session in sessions):
            for session in sessions:
                session.of(Started).broken = True
            if not self._is_lost:
                why = str(error) or "a message of a backward did not complete"
                who = f"rank {dist.get_rank()} has lost another one in {self._doing}"
                self._ring((None, f"{who}: {why}"))
            return
        failure = self._why_left() if left else self._failure_of(error)
        if failure is None:
            return
        try:
            self._tell(replace(failure, elsewhere=True, is_late=True, holds_graph=False))
        except (DroppedCallError, CollectiveError):
            of_others = isinstance(error, DroppedCallError | CollectiveError)
            if of_others and not left and not isinstance(error, RanksDisagreeError):
                raise

    def listen(self, inside: bool = False) -> None:
        """Ask whether a rank has failed, if that was not asked just now.

        Args:
            inside: of a call that a group computes, whose other ranks are to be told first.
        Raises:
            DroppedCallError: one has.
            CollectiveError: one is gone.
        """
        listener = self._world.session.of(_Listener)
        if self._dropped.heard is not None or time.monotonic() < listener.asked + ASK_S:
            return
        key, answer = self._key(), None
        with contextlib.suppress(RuntimeError):  # the store is gone: the next message will say so
            answer = world_store().ask(lambda store: store.get(key) if store.check([key]) else b"")
        listener.asked = time.monotonic()
        if not answer:
            return
        failure, lost = pickle.loads(answer)  # ranks trust each other
        if failure is None:
            self._is_lost = True
            raise CollectiveError(lost)
        self._dropped.heard = failure
        error = error_of([failure])
        error.untold = inside
        raise error

    def _settled(self) -> bool:
        """All ranks have dropped the step already."""
        everyone = ranks_of(self._world)
        return self._dropped.times[everyone] > self._before[everyone]

    def _failed_in_backward(self) -> Failure | None:
        """What ended the backward under way; None: nothing did."""
        if self._dropped.heard is not None:
            return self._dropped.heard
        dropped = self._dropped.times != self._before
        if dropped and self._dropped.failures:
            return self._dropped.failures[0]
        if not dropped and self._backward != "begun":
            return None
        no_memory = not dropped and lacked_memory(self._num_out_of_memory)  # else ranks disagreed
        what = "its own error says more", no_memory
        return Failure(dist.get_rank(), f"backward of {self._doing}", "", *what)

    def _why_left(self) -> Failure:
        """What ended the loop over the micro-batches."""
        doing, error = f"the loop over the losses of {self._doing}", "it was left before its end"
        return self._failed_in_backward() or Failure(dist.get_rank(), doing, "", error, False)

    def _failure_of(self, error: BaseException) -> Failure | None:
        if isinstance(error, DroppedCallError) and error.failures:
            return error.failures[0]
        if not isinstance(error, Exception):
            return None
        what = first_line(error), is_out_of_memory(error)
        return Failure(dist.get_rank(), self._doing, "", *what)

    def _tell(self, failure: Failure) -> None:
        """Tell the ranks of all groups that this one has work left with, then all ranks."""
        if self._dropped.heard is None:
            self._ring((failure, ""))
        for group in dict.fromkeys(self._groups[self._at :]):
            if group is not None and not self._settled() and not self._has_dropped(group):
                with contextlib.suppress(DroppedCallError):
                    group.fail(failure, together=False)
        if self._settled():
            raise error_of(self._dropped.failures or [failure])
        assert self._all is not None
        self._all.fail(failure, together=False)

    def _has_dropped(self, group: Agreement) -> bool:
        return self._dropped.times[group.ranks] > self._before[group.ranks]

    def _ring(self, what: tuple[Failure | None, str]) -> None:
        key, text = self._key(), pickle.dumps(what)
        with contextlib.suppress(RuntimeError):  # without the store others hear of it later
            world_store().ask(lambda store: store.set(key, text))

    def _key(self) -> str:
        everyone = ranks_of(self._world)
        return f"paradyse/side by side/{self._dropped.times[everyone]}"

    def _begin_backward(self, gradient: Tensor) -> None:
        if not self._backward:
            self._backward = "begun"
            at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._backward = "ended"


class _Listener:
    """Asks for the step under way, in the session of the world."""

    def __init__(self) -> None:
        self.step: SideBySide | None = None
        self.asked = 0.0
        resolve_axis().session.of(Watchers).append(self._waits)

    def notice(self) -> None:
        """A message of a group is about to start."""
        if self.step is not None:
            self.step.listen(inside=True)

    def _waits(self, axis: Axis) -> None:
        step = self.step
        if step is not None and any(axis.session is a.session for a in step._axes):
            step.listen(inside=True)


def _agreement_of(mesh: Any) -> Agreement | None:
    return None if mesh is None else agreement_of(resolve_axis(mesh), mesh)
