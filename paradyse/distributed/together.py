"""Work that succeeds on all ranks of an axis or fails on all of them, in bounded time.

What one rank raises all ranks raise, so that none waits for one that has given up. A rank that died
or stalled ends the wait of the others after the time-out of ``collectives.timeout``, named where
that is known. Ranks trust each other: what one sends, the others unpickle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from paradyse.distributed import collectives
from paradyse.distributed.agreement import agreement_of
from paradyse.distributed.axis import Axis, ranks_of
from paradyse.distributed.control import control_of, world_store
from paradyse.distributed.failures import DroppedCallError

T = TypeVar("T")

SHARED_KINDS = (FileNotFoundError, ImportError, ValueError, torch.OutOfMemoryError)
"""Exceptions that all ranks raise as what they are; any other one as a RuntimeError."""

LATE_S = 2.0
"""How long ranks that are only slow may take to arrive, once a message has failed, before they are
called missing."""


class Together:
    """The ranks of one axis while they do one thing together.

    Args:
        axis: whose ranks make this object, each of them; of one rank, nothing is sent.
        doing: what errors call it: "saving checkpoint 20 to run".
    Raises:
        ValueError: on every rank, where another one does something else.
        CollectiveError: another rank died or stalled, as in all methods.
    """

    def __init__(self, axis: Axis, doing: str) -> None:
        self.doing = doing
        self.rank, self.is_first, self.alone = axis.rank, axis.rank == 0, axis.size == 1
        self._agreement = agreement_of(axis)
        self._control = None
        if axis.size > 1:
            self._control = control_of(ranks_of(axis)).axis
        self.compare({})

    def compare(self, facts: Mapping[str, Any]) -> None:
        """Compare what ranks do, and ``facts`` of it.

        Raises:
            ValueError: on every rank, naming what differs, which rank holds what, the way out.
        """
        if self._agreement is not None and self._control is not None:
            with self._message(self._control):
                self._agreement.compare(self.doing, facts)

    def each(self, work: Callable[[], T]) -> list[T]:
        """What ``work`` gave on each rank, once it has succeeded on all; else every rank raises.

        Raises:
            FileNotFoundError, ImportError, ValueError, torch.OutOfMemoryError: as ``work`` did.
            RuntimeError: ``work`` raised anything else.
        """
        result, error = _attempt(work)
        answers = self._gather((result, _described(error)))
        if error is not None:
            _raise(error)
        for rank, (_, failure) in enumerate(answers):
            if failure is not None:
                raise failure[0](f"on rank {rank}: {failure[1]}")
        return [answer for answer, _ in answers]

    def all_of(self, work: Callable[[], T]) -> T:
        """What ``work`` gave here, once it has succeeded on all ranks; raises as ``each``."""
        held: list[T] = []
        self.each(lambda: held.append(work()))
        return held[0]

    def first(self, work: Callable[[], T]) -> T:
        """What ``work`` gave on the first rank, on every rank; raises as ``each``."""
        result, error = _attempt(work) if self.is_first else (None, None)
        result, failure = self._broadcast((result, _described(error)))
        if error is not None:
            _raise(error)
        if failure is not None:
            raise failure[0](failure[1])
        out: T = result
        return out

    def _gather(self, x: Any) -> list[Any]:
        if self._control is None:
            return [x]
        every: list[Any] = [None] * self._control.size
        with self._message(self._control) as group:
            dist.all_gather_object(every, x, group=group)
        return every

    def _broadcast(self, x: Any) -> Any:
        if self._control is None:
            return x
        given = [x]
        with self._message(self._control) as group:
            dist.broadcast_object_list(given, dist.get_process_group_ranks(group)[0], group=group)
        return given[0]

    @contextmanager
    def _message(self, control: Axis) -> Iterator[Any]:
        """Around one message over the group that this gives: names who is missing if it fails."""
        arrivals = control.session.of(_Arrivals)
        try:
            arrivals.note(control)
            yield control.group
        except torch.OutOfMemoryError:
            raise
        except (DroppedCallError, ValueError):  # another rank failed, or came to something else
            arrivals.take_back()
            raise
        except RuntimeError as e:
            cause = e.__cause__ if isinstance(e, collectives.CollectiveError) else e
            missing = arrivals.missing(control)
            who = f"rank {', '.join(map(str, missing))}" if missing else "another rank"
            raise collectives.CollectiveError(
                f"rank {control.rank} of {control.size}: {self.doing} did not complete: {who} "
                f"died, stalled or left the program ({cause}). Look at its output first; "
                f"{collectives.TIMEOUT_VARIABLE} (now {collectives.timeout().total_seconds():g} s) "
                "sets how long a rank waits."
            ) from e


class _Arrivals:
    """How many messages this rank has come to, which it tells the store that ranks met at."""

    def __init__(self) -> None:
        self._count = 0

    def note(self, control: Axis) -> None:
        """This rank has come to its next message over ``control``."""
        self._count += 1
        key, count = _key(control, control.rank), str(self._count)
        world_store().ask(lambda store: store.set(key, count))

    def take_back(self) -> None:
        """The last message that was noted was none that all ranks come to."""
        self._count -= 1

    def missing(self, control: Axis) -> list[int]:
        """The ranks of ``control`` that have not come as far; none where the store is gone."""
        others = [rank for rank in range(control.size) if rank != control.rank]
        if len(others) == 1:
            return others
        deadline = time.monotonic() + LATE_S
        try:
            while True:
                late = [rank for rank in others if self._is_late(_key(control, rank))]
                if len(late) <= 1 or time.monotonic() > deadline:
                    return late
                time.sleep(0.05)
        except RuntimeError:  # the store went with the rank that held it
            return []

    def _is_late(self, key: str) -> bool:
        count = world_store().ask(lambda store: int(store.get(key)) if store.check([key]) else 0)
        if count is None:
            raise RuntimeError("the store does not answer")
        return count < self._count


def _key(control: Axis, rank: int) -> str:
    return f"paradyse/arrivals/{control.name}/{rank}"


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as e:  # whatever it is, the other ranks must hear of it
        return None, e


def _described(error: Exception | None) -> tuple[type[Exception], str] | None:
    """Kind and text of what all ranks raise for ``error``, as some exceptions do not pickle."""
    if error is None:
        return None
    kind = next((k for k in SHARED_KINDS if isinstance(error, k)), None)
    return (kind, str(error)) if kind else (RuntimeError, f"{type(error).__name__}: {error}")


def _raise(error: Exception) -> NoReturn:
    """Raise ``error``, or what all ranks raise in its place."""
    if isinstance(error, (*SHARED_KINDS, RuntimeError)):
        raise error
    raise RuntimeError(f"{type(error).__name__}: {error}") from error
