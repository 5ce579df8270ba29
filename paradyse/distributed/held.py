"""Messages that are held back until a block's own first message is there.

Lanes share links. Where a block has to wait for a message of its own before most of its work,
weights for the next block and gradients of the one before it on their way would make that come
later, and be there long before they are needed. So they start behind it, and hide behind the work.
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
    """

    def __init__(self, start: Callable[[], Pending]) -> None:
        self._start: Callable[[], Pending] | None = start
        self._pending: Pending | None = None
        self._finish: list[Callable[[Any], Any]] = []

    def begin(self) -> Pending:
        """Start it, if it has not started."""
        if self._pending is None:
            start, self._start = self._start, None
            assert start is not None, "it failed to start before"
            self._pending = start()
            for finish in self._finish:
                self._pending.then(finish)
        return self._pending

    def wait(self) -> Any:
        """As of ``Pending``."""
        return self.begin().wait()

    def then(self, finish: Callable[[Any], Any]) -> Held:
        """As of ``Pending``, of ``finish``."""
        if self._pending is None:
            self._finish.append(finish)
        else:
            self._pending.then(finish)
        return self


Coming = Pending | Held
"""A message that is on its way, or will be."""


class _Waiting(list[Held]):
    """Those of one axis and its lanes, in the order in which they start."""


def hold(start: Callable[[], Pending], axis: Axis) -> Held:
    """A message over ``axis``, or a lane of it, that ``start`` starts: behind the next one of a
    block on that axis."""
    held = Held(start)
    axis.session.of(_Waiting).append(held)
    return held


def start_held(axis: Axis) -> None:
    """A block's own message over ``axis`` is there: start those that were held back, on all ranks
    alike."""
    waiting = axis.session.of(_Waiting)
    while waiting:
        waiting.pop(0).begin()


def forget_held(axis: Axis) -> None:
    """Start none of those that are held back on ``axis``, but where they are waited for: they are
    of a call that has failed."""
    axis.session.of(_Waiting).clear()
