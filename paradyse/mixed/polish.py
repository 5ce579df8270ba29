"""A step made faster by moving sequences between its groups, a few at a time."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence

import numpy as np

from paradyse.mixed.packing import Bin, Table
from paradyse.mixed.ways import Floats

Parts = tuple[tuple[int, ...], ...]
"""The sequences of each group of a micro-batch."""

MOST_KNOWN, FEW_PARTS = 1 << 13, 32
"""How many answers are kept, and of how many groups a micro-batch has at most whose answer is."""
GAIN = 1 - 1e-9
"""What a time is multiplied by at the most for a change to count."""


class Polish:
    """Moves sequences; ways are chosen anew for every group that a move concerns.

    Args:
        table: the batch.
        num_ranks: of the axis.
        until: by ``time.perf_counter``.
    """

    def __init__(self, table: Table, num_ranks: int, until: float):
        self.table, self.num_ranks, self.until = table, num_ranks, until
        self.order = sorted(
            (p for p, w in enumerate(table.ways) if w.degree <= num_ranks),
            key=lambda p: table.ways[p].degree,
        )
        """Ways by degree."""
        self.degrees = np.array([table.ways[p].degree for p in self.order])
        self._times: dict[tuple[int, ...], Floats] = {}
        self._fits: dict[Parts, tuple[float, Floats]] = {}

    def times(self, part: tuple[int, ...]) -> Floats:
        """[ways by degree] Seconds of a group with ``part``; infinite where it has no room."""
        found = self._times.get(part)
        if found is None:
            if len(self._times) >= MOST_KNOWN:
                self._times.clear()
            found = np.array([self.table.time_s(p, part) for p in self.order])
            self._times[part] = found
        return found

    def fit(self, parts: Parts) -> tuple[float, Floats]:
        """The least time of a micro-batch with groups of these ``parts``, over all ways that leave
        enough ranks, infinite if none do; and the time of every part in every way."""
        if len(parts) > FEW_PARTS:
            return self._fit(parts)
        found = self._fits.get(parts)
        if found is None:
            if len(self._fits) >= MOST_KNOWN:
                self._fits.clear()
            found = self._fits[parts] = self._fit(parts)
        return found

    def _fit(self, parts: Parts) -> tuple[float, Floats]:
        if not parts:
            return 0.0, np.empty((0, len(self.order)))
        times = np.stack([self.times(part) for part in parts])
        tried = np.unique(times[np.isfinite(times)])
        low, high = 0, len(tried)
        while low < high:
            middle = (low + high) // 2
            if self._ranks(times, tried[middle]) <= self.num_ranks:
                high = middle
            else:
                low = middle + 1
        return (float(tried[low]) if low < len(tried) else math.inf), times

    def _ranks(self, times: Floats, most_s: float) -> float:
        """Ranks that all parts take to be done in ``most_s``."""
        done = times <= most_s
        if not done.any(1).all():
            return math.inf
        return float(self.degrees[done.argmax(1)].sum())

    def bins(self, parts: Parts) -> list[Bin]:
        """Groups of the fewest ranks with which ``parts`` take the least time."""
        most_s, times = self.fit(parts)
        found = []
        for part, of in zip(parts, times):
            k = int((of <= most_s).argmax())
            tokens = sum(self.table.lengths[i] for i in part)
            found.append(Bin(self.order[k], list(part), float(of[k]), tokens))
        return found

    def run(self, micros: Sequence[Sequence[Bin]]) -> list[list[Bin]]:
        """``micros``, changed as long as a change makes the step faster and there is time."""
        state = [tuple(tuple(sorted(b.sequences)) for b in bins) for bins in micros]
        return [self.bins(parts) for parts in self._descend(state)]

    def kicked(self, micros: Sequence[Sequence[Bin]], num_kicks: int) -> list[list[Bin]]:
        """``micros``, or better ones found from where a few sequences were moved at random.

        Args:
            micros: to begin with.
            num_kicks: how often.
        """
        best = [tuple(tuple(sorted(b.sequences)) for b in bins) for bins in micros]
        rng = random.Random(0)  # equal batches have equal plans
        for _ in range(num_kicks):
            if time.perf_counter() > self.until:
                break
            state = self._kick(best, rng)
            if math.isinf(self._total_s(state)):
                continue
            state = self._descend(state)
            if self._total_s(state) < self._total_s(best) * GAIN:
                best = state
        return [self.bins(parts) for parts in best]

    def _total_s(self, state: Sequence[Parts]) -> float:
        return sum(self.fit(parts)[0] for parts in state)

    def _kick(self, state: Sequence[Parts], rng: random.Random) -> list[Parts]:
        """``state`` with two sequences at other places."""
        places = [[list(part) for part in parts] for parts in state]
        for _ in range(2):
            part = rng.choice(rng.choice(places))
            i = part.pop(rng.randrange(len(part)))
            places = [[part for part in parts if part] for parts in places]
            places = [parts for parts in places if parts]
            micro = rng.randrange(len(places) + 1)
            if micro == len(places):
                places.append([])
            group = rng.randrange(len(places[micro]) + 1)
            if group == len(places[micro]):
                places[micro].append([])
            places[micro][group].append(i)
        return [tuple(tuple(sorted(part)) for part in parts) for parts in places]

    def _descend(self, start: Sequence[Parts]) -> list[Parts]:
        """``start``, changed as long as a change makes the step faster and there is time."""
        state = list(start)
        while time.perf_counter() < self.until:
            for changed in self._changes(state):
                before = sum(self.fit(state[m])[0] for m in changed)
                after = sum(self.fit(parts)[0] for parts in changed.values())
                if after < before * GAIN:
                    for m, parts in changed.items():
                        state[m] = parts
                    break
                if time.perf_counter() > self.until:
                    break
            else:
                break
        return [parts for parts in state if parts]

    def _changes(self, state: Sequence[Parts]) -> Iterator[dict[int, Parts]]:
        """Changes of micro-batches, by index: the groups that decide the time of one lose a
        sequence to another group or a new one, exchange one, or become one with another."""
        for m, parts in sorted(enumerate(state), key=lambda of: -self.fit(of[1])[0]):
            for g in self._slowest(parts):
                yield from self._moves(state, m, g)
        for m, parts in enumerate(state):
            for g in range(len(parts)):
                for h in range(g):
                    joined = tuple(sorted(parts[g] + parts[h]))
                    yield {m: (*_without(parts, g, h), joined)}

    def _slowest(self, parts: Parts) -> list[int]:
        """Indices of ``parts``, those first without which the others would be done soonest."""
        most_s, times = self.fit(parts)
        need = [int(self.degrees[(of <= most_s).argmax()]) for of in times]
        tight = [float(of[(of <= most_s).argmax()]) for of in times]
        return sorted(range(len(parts)), key=lambda g: (-tight[g], -need[g]))

    def _moves(self, state: Sequence[Parts], m: int, g: int) -> Iterator[dict[int, Parts]]:
        part = state[m][g]
        for i in part:
            less = tuple(j for j in part if j != i)
            kept = _without(state[m], g) + ((less,) if less else ())
            yield {m: (*kept, (i,))}
            for n, others in enumerate(state):
                if n != m:
                    yield {m: kept, n: (*others, (i,))}
                for h, other in enumerate(others):
                    if (n, h) == (m, g):
                        continue
                    grown = tuple(sorted((*other, i)))
                    if n != m:
                        yield {m: kept, n: (*_without(others, h), grown)}
                    else:
                        rest = _without(others, g, h) + ((less,) if less else ())
                        yield {m: (*rest, grown)}
                    for j in other:
                        if self.table.lengths[j] == self.table.lengths[i]:
                            continue
                        mine = tuple(sorted((*less, j)))
                        yours = tuple(sorted((*(k for k in other if k != j), i)))
                        if n != m:
                            yield {
                                m: (*_without(state[m], g), mine),
                                n: (*_without(others, h), yours),
                            }
                        else:
                            yield {m: (*_without(others, g, h), mine, yours)}


def _without(parts: Parts, *gone: int) -> Parts:
    return tuple(part for k, part in enumerate(parts) if k not in gone)
