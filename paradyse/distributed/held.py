"""Weights that are held back until a block's own first message is there.

Lanes share links. Where a block has to wait for a message of its own before most of its work,
weights for the next block on their way would make that come later, and be there long before they
are needed. So they start behind it, and hide behind the work. Gradients are not held back: where a
hook on one rank alone reads one at once, that rank would wait for a message that the others start
behind one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paradyse.distributed.axis import Axis
from paradyse.distributed.collectives import Pending


class Held:
    """A message that starts when it is its turn (``start_held``), or when it is waited for.

    Args:
        start: starts it.
        turn: what it waits in meanwhile.
    """

    def __init__(self, start: Callable[[], Pending], turn: list[Held]) -> None:
        self._start: Callable[[], Pending] | None = start
        self._turn = turn
        self._pending: Pending | None = None

    def begin(self) -> Pending:
        """Start it, if it has not started."""
        if self._pending is None:
            start, self._start = self._start, None
            if self in self._turn:
                self._turn.remove(self)
            assert start is not None, "it failed to start before"
            self._pending = start()
        return self._pending

    def wait(self) -> Any:
        """As of ``Pending``."""
        return self.begin().wait()


Coming = Pending | Held
"""A message that is on its way, or will be."""


class _Waiting(list[Held]):
    """Those of one axis and its lanes, in the order in which they start."""


def hold(start: Callable[[], Pending], axis: Axis) -> Held:
    """A message over ``axis``, or a lane of it, that ``start`` starts: behind the next one of a
    block on that axis."""
    waiting = axis.session.of(_Waiting)
    waiting.append(Held(start, waiting))
    return waiting[-1]


def start_held(axis: Axis) -> None:
    """A block's own message over ``axis`` is there: start those that were held back, on all ranks
    alike."""
    waiting = axis.session.of(_Waiting)
    while waiting:
        waiting[0].begin()


def forget_held(axis: Axis) -> None:
    """A call over ``axis``, or its backward, begins: what is still held back starts where it is
    waited for, and no more in its turn. Of a call that has failed some ranks hold messages back
    and others do not."""
    axis.session.of(_Waiting).clear()
