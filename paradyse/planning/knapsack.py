"""Blocks whose order does not matter: how many of each kind take which point.

Where nothing but the sum of what blocks save is limited, the fastest choice is a multiple-choice
knapsack (Kellerer, Pferschy, Pisinger: Knapsack Problems, 2004, chapter 11), and blocks of a kind
are alike. Its linear relaxation pays one price for a byte: every kind takes its best point at that
price, and one kind, the split one, two that are equally good. What differs from that is worth
looking at only as long as it costs less than is lost to the best plan known so far, so there is
little of it, and how many blocks of the split kind take the smaller point follows from the room.

Throughout, ``kinds`` are kinds of blocks, ``counts`` how many blocks there are of each, and
``room`` bytes that all may save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

Array = np.ndarray

MOST_STATES = 1 << 14
"""Choices looked at before a search is given up."""


@dataclass(frozen=True, eq=False)
class Kind:
    """What may be chosen for blocks of one kind, by arrays [points]."""

    points: tuple[tuple[str, ...], ...]
    """Each with the points of the blocks that are chosen together."""
    time: Array
    """Whole units, so that sums in another order are equal."""
    saved: Array
    workspace: Array
    """Bytes."""
    left: int
    """Bytes that any of them leaves behind."""

    def only(self, kept: Array) -> Kind:
        """The kind with those points alone that ``kept`` says, a bool array [points]."""
        if kept.all():
            return self
        points = tuple(point for point, keep in zip(self.points, kept.tolist()) if keep)
        return Kind(points, self.time[kept], self.saved[kept], self.workspace[kept], self.left)

    @cached_property
    def fastest(self) -> int:
        """The fastest point; of several the one that saves least."""
        return int(np.lexsort((self.saved, self.time))[0])

    @cached_property
    def useful(self) -> tuple[int, ...]:
        """The points of which no other has as little time and bytes saved."""
        return tuple(undominated(np.arange(len(self.time)), self.time, self.saved).tolist())

    @cached_property
    def chain(self) -> tuple[int, ...]:
        """The fastest point, and those that are the best at some price of a byte, by falling
        bytes."""
        time, saved, at = self.time.tolist(), self.saved.tolist(), self.fastest
        chain = [at]
        while below := [p for p in self.useful if saved[p] < saved[at]]:
            rates = ((time[p] - time[at]) / (saved[at] - saved[p]) for p in below)
            at = min(zip(rates, (saved[p] for p in below), below))[2]
            chain.append(at)
        return tuple(chain)


class Split(NamedTuple):
    """A kind of which some blocks take a larger point and the others a smaller one."""

    kind: int = -1
    """-1: there is none."""
    larger: int = -1
    smaller: int = -1


@dataclass(frozen=True)
class Price:
    """The linear relaxation's answer."""

    rate: float
    """Time that a byte is worth; 0 where all can take their fastest point."""
    split: Split


def price_of(kinds: Sequence[Kind], counts: Sequence[int], room: float) -> Price:
    """The price at which all ``counts`` blocks of ``kinds`` save ``room`` bytes, one kind split."""
    steps: list[tuple[float, int, int, int, int]] = []
    too_much = -room
    for k, (kind, count) in enumerate(zip(kinds, counts)):
        if not count:
            continue
        too_much += count * int(kind.saved[kind.fastest])
        for a, b in zip(kind.chain, kind.chain[1:]):
            less = int(kind.saved[a] - kind.saved[b])
            steps.append((int(kind.time[b] - kind.time[a]) / less, k, a, b, count * less))
    price = Price(0.0, Split())
    for rate, k, a, b, less in sorted(steps):
        if too_much <= 0:
            break
        price = Price(rate, Split(k, a, b))
        too_much -= less
    return price


@dataclass(frozen=True)
class Filling:
    """Blocks added to one of the states that ``fill`` was given."""

    time: int
    """Of the state and of what was added."""
    state: int
    taken: tuple[Array, ...]
    """Per kind how many blocks take each point."""


def fill(
    kinds: Sequence[Kind],
    counts: Sequence[int],
    room: int,
    states: tuple[Array, Array],
    best: int,
    exact: bool = True,
) -> Filling | None:
    """The fastest way to add all blocks to one of ``states`` within ``room``, if it beats ``best``.

    Args:
        states: time and bytes held, by arrays [states], before blocks are added.
        best: a time to beat.
        exact: False: no more than the linear relaxation, rounded.
    Returns:
        None: there is none.
    Raises:
        OverflowError: there is too much to look at.
    """
    search = _Fill(kinds, counts, room, states, best)
    if exact:
        for k in sorted(range(len(kinds)), key=lambda k: k == search.split.kind):
            search.vary(k)
    return search.finish()


class _Step(NamedTuple):
    """A stage of the search: so many ``blocks`` of a kind take a point instead of the best one."""

    kind: int
    point: int
    parent: Array
    blocks: Array


class _Fill:
    """The search of ``fill``: states by arrays, in which every kind takes its best point, then some
    blocks of them others, and last as many of the split kind the smaller one as there must be."""

    def __init__(
        self,
        kinds: Sequence[Kind],
        counts: Sequence[int],
        room: int,
        states: tuple[Array, Array],
        best: int,
    ) -> None:
        self.kinds, self.counts, self.room, self.best = kinds, counts, room, best
        time, held = states
        price = price_of(kinds, counts, room - int(held[len(held) // 2]))
        self.split, self.rate = price.split, price.rate
        self.costs = [kind.time + self.rate * kind.saved for kind in kinds]
        self.base = [int(cost.argmin()) for cost in self.costs]
        if self.split.kind >= 0:
            self.base[self.split.kind] = self.split.larger
        of = list(zip(kinds, counts, self.base))
        self.time = time + sum(n * int(kind.time[b]) for kind, n, b in of)
        self.held = held + sum(n * int(kind.saved[b]) for kind, n, b in of)
        self.used = np.zeros(len(time), np.int64)
        """Blocks of the present kind that do not take its best point."""
        self.steps: list[_Step] = []

    def vary(self, k: int) -> None:
        """Have blocks of kind ``k`` take other points; the split kind comes last."""
        kind, is_split = self.kinds[k], k == self.split.kind
        self.used = np.zeros(len(self.time), np.int64)
        for p in kind.useful if self.counts[k] else ():
            if p != self.base[k] and not (is_split and p == self.split.smaller):
                self._vary(k, p)
        if not is_split:
            kept = undominated(np.arange(len(self.time)), self.time, self.held)
            self._keep(k, self.base[k], kept, np.zeros(len(kept), np.int64))

    def _vary(self, k: int, p: int) -> None:
        """Have blocks of kind ``k`` take the point ``p``, as many as may still beat the best."""
        kind, base = self.kinds[k], self.base[k]
        extra = max(0.0, float(self.costs[k][p] - self.costs[k][base]))
        lost = self.time + self.rate * (self.held - self.room)
        spare = float((self.best - lost).max(initial=0.0))
        most = self.counts[k] if extra * self.counts[k] <= spare else int(spare / extra)
        if most * len(self.time) > MOST_STATES:
            raise OverflowError("too many choices are nearly as good as the best")
        fits = self.used[:, None] + np.arange(most + 1) <= self.counts[k]
        worth = lost[:, None] + extra * np.arange(most + 1) < self.best
        parent, count = np.nonzero(fits & worth)
        self._keep(k, p, parent, count)
        self.time = self.time + count * int(kind.time[p] - kind.time[base])
        self.held = self.held + count * int(kind.saved[p] - kind.saved[base])
        self.used = self.used + count

    def _keep(self, k: int, p: int, parent: Array, count: Array) -> None:
        self.steps.append(_Step(k, p, parent, count))
        self.time, self.held, self.used = (x[parent] for x in (self.time, self.held, self.used))

    def finish(self) -> Filling | None:
        """The fastest state that fits, with what led to it."""
        time, smaller, fits = self.time, np.zeros(len(self.time), np.int64), self.held <= self.room
        if self.split.kind >= 0:
            kind = self.kinds[self.split.kind]
            less, more = (int(x[a] - x[b]) for x, a, b in (
                (kind.saved, self.split.larger, self.split.smaller),
                (kind.time, self.split.smaller, self.split.larger),
            ))  # fmt: skip
            smaller = np.maximum(0, -((self.room - self.held) // less))
            fits = smaller <= self.counts[self.split.kind] - self.used
            time = time + smaller * more
        fits = fits & (time < self.best)
        if not fits.any():
            return None
        at = int(np.where(fits, time, np.iinfo(np.int64).max).argmin())
        return self._filling(at, int(time[at]), int(smaller[at]))

    def _filling(self, at: int, time: int, smaller: int) -> Filling:
        taken = [np.zeros(len(kind.points), np.int64) for kind in self.kinds]
        for of, n, b in zip(taken, self.counts, self.base):
            of[b] = n
        moved = [(self.split.kind, self.split.smaller, smaller)] * (self.split.kind >= 0)
        for step in reversed(self.steps):
            moved.append((step.kind, step.point, int(step.blocks[at])))
            at = int(step.parent[at])
        for k, p, n in moved:
            taken[k][self.base[k]] -= n
            taken[k][p] += n
        return Filling(time, at, tuple(taken))


def undominated(of: Array, time: Array, held: Array) -> Array:
    """Those indices ``of`` which no other has as little of both ``time`` and ``held``; least held
    and longest first."""
    of = of[np.lexsort((time[of], held[of]))]
    least = np.minimum.accumulate(time[of])
    return of[np.concatenate([of[:1] >= 0, time[of][1:] < least[:-1]])]
