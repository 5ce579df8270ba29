"""What a process keeps for an axis, for as long as the axis' process group lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class Session:
    """State of this process that belongs to one axis: what was measured, compiled and sent on it.

    Each module keeps its own state as a class of its own, of which a session has one instance. An
    ``Axis`` holds its session, so a process group that is made anew begins with none of it.
    """

    def __init__(self) -> None:
        self._held: dict[type, Any] = {}
        self.at_end: list[Callable[[], None]] = []
        """Called once the axis' process group has been found destroyed."""

    def of(self, kind: type[T]) -> T:
        """This session's instance of ``kind``, made by ``kind()`` when it is first asked for."""
        if kind not in self._held:
            self._held[kind] = kind()
        found: T = self._held[kind]
        return found

    def forget(self, kind: type) -> None:
        """Let ``of`` begin anew with ``kind``."""
        self._held.pop(kind, None)

    def end(self) -> None:
        """The axis' process group is gone."""
        ends, self.at_end = self.at_end, []
        for call in ends:
            call()


class Recent(dict[K, V]):
    """A cache of the last ``CAPACITY`` entries made: lengths never end."""

    CAPACITY = 512

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self and len(self) >= self.CAPACITY:
            del self[next(iter(self))]
        super().__setitem__(key, value)
