"""The fastest plan whose memory fits, by the most that it holds at any moment of a step.

Read from the last block to the first, ``costs.peak_bytes`` is a recursion: a block and all after it
hold, beyond what the blocks before it saved, ``saved + max(workspace + gradients that later blocks
left, the same of the blocks after it)``. So the choices for the last blocks compare by two numbers,
seconds and these bytes, and whatever is worse in both is part of no best plan: a dynamic program
over lists of undominated choices (Kellerer, Pferschy, Pisinger: Knapsack Problems, 2004, chapter
3.4). What cannot beat the best plan known so far, by the price of memory in the linear relaxation,
is left out (chapter 5.1.1).

An MLP whose input the attention before it may make again (``costs.behind``) is chosen together with
that attention: a pair is one block here, whose points are those of both.

Weights fetched ahead go by two neighbours. The search counts at every moment as much as for any
block, and looks for the best plan of each such amount: the best but for as much memory.

Once the last blocks hold more than any workspace of the blocks before them, these add what they
save and nothing else, so that their order does not matter: they are chosen all at once, by counts
(``knapsack``). In a deep model those are nearly all blocks.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product, repeat
from typing import Any, NamedTuple

import numpy as np

from paradyse.planning.costs import BlockCost, CostTable, behind, join, moments, peak_bytes
from paradyse.planning.knapsack import Array, Kind, fill, price_of, undominated
from paradyse.types import KEEPING_INPUT, Point

log = logging.getLogger(__name__)

PRICE_STEPS = 12
"""Prices of a byte on the host that are tried; they range over 2^48 to one, and each halves that
range: the last two are a hundredth apart."""

WIDTHS = (16, 1024)
"""Choices for the last blocks that are kept. The first search gives a plan for the second to beat;
fewer than the second's are needed for 96 layers of two kinds of blocks and five strategies
(``benchmarks/choice.py``), and as long as they are, the plan is the best there is."""

MOST = 2**54
"""More bytes than any device has; so many of each block still make a sum of 64 bits."""

ALIKE = 8
"""Amounts of weights fetched ahead that differ by no more than the largest over this are one."""

Points = tuple[str, ...]
"""One per block, in the order of computation."""

Unit = tuple[int, ...]
"""Indices of a block, or of a pair: what is chosen together."""


@dataclass(frozen=True)
class Choices:
    """What may be chosen for each block of one workload, and what it costs. The head counts as one
    more block, the last."""

    names: Sequence[Points]
    """Per block the points to choose from."""
    costs: Sequence[Mapping[str, BlockCost]]
    """Per block, of at least these; ``left_bytes`` is the same for all. One mapping for equal
    blocks saves work."""
    rest: BlockCost
    """Of what is in no block, where it was measured."""
    static_bytes: int
    floor_bytes: int
    """What every plan needs beyond ``static_bytes`` at some moment."""
    margin: float
    """Share by which blocks may need more than predicted; counted as needed."""
    communicator_bytes: int
    """What a process group takes."""
    host_limit: float = math.inf
    """Bytes that blocks may keep on the host."""
    inputs: Sequence[int] = ()
    """Per block the bytes of its input, where the block before it may make that again, else 0; ():
    nowhere."""

    def peak(self, points: Sequence[str]) -> int:
        """Bytes of a rank that a step needs under ``points``, one per block."""
        held = self.communicator_bytes + peak_bytes(self.chosen(points), self.rest)
        return max(self.static_bytes + math.ceil(held * (1 + self.margin)), self._floor)

    @property
    def _floor(self) -> int:
        """Bytes of a rank that every plan needs."""
        return self.static_bytes + self.communicator_bytes + self.floor_bytes

    def chosen(self, points: Sequence[str]) -> list[BlockCost]:
        """Per block its cost under ``points``."""
        found = [c[s] for c, s in zip(self.costs, points)]
        for i, num_bytes in enumerate(self.inputs):
            if num_bytes:
                found[i] = behind(self.costs[i - 1], points[i - 1], found[i], points[i], num_bytes)
        return found

    def time_s(self, points: Sequence[str]) -> float:
        """Seconds of the blocks under ``points``, and of the rest."""
        return sum(c[s].time_s for c, s in zip(self.costs, points)) + self.rest.time_s

    def host_bytes(self, points: Sequence[str]) -> int:
        """Bytes that blocks keep on the host under ``points``."""
        return sum(c[s].host_bytes for c, s in zip(self.costs, points))

    def fits(self, points: Sequence[str], limit: float) -> bool:
        """Whether ``points`` need at most ``limit`` bytes of the device, and of the host what there
        is."""
        return self.peak(points) <= limit and self.host_bytes(points) <= self.host_limit

    def fastest(self, limit: float) -> Points | None:
        """The fastest plan that needs at most ``limit`` bytes; None: none does.

        A function of the costs alone, ties included: every rank finds the same.
        """
        plan = self._fastest(limit)
        if plan is None or self.host_bytes(plan) <= self.host_limit:
            return plan
        return self._within_host(limit)

    def feasible(self, limit: float) -> bool:
        """Whether any plan fits ``limit``, and the host."""
        need, smallest_plan = self.smallest()
        if need > limit or self.host_bytes(smallest_plan) <= self.host_limit:
            return need <= limit
        plan = self._at_price(self._highest_price()).fastest(limit)
        return plan is not None and self.host_bytes(plan) <= self.host_limit

    def _fastest(self, limit: float) -> Points | None:
        """As ``fastest``, whatever the host has."""
        best, best_s = None, math.inf
        for part in self._by_ahead:
            kinds, number = part._kinds
            plan = part._named([kinds[k].fastest for k in number])
            if self.time_s(plan) >= best_s:
                break  # as is all that has fewer points
            if self.peak(plan) <= limit:
                return plan
            need, smallest_plan = self.smallest()
            if need > limit:
                return None
            for ahead in part._aheads:
                room = part._room(limit, ahead)
                if room < part._blocks_hold(part._smallest):
                    break
                search = _Search(kinds, number, room, self.rest.workspace_bytes)
                if self.rest.time_s + search.bound * part._unit >= best_s:
                    break
                plan = _flat(search.run())
                if self.peak(plan) <= limit:
                    if (time_s := self.time_s(plan)) < best_s:
                        best, best_s = plan, time_s
                    break
        return smallest_plan if best is None else best

    def _within_host(self, limit: float) -> Points | None:
        """The fastest plan at the least price of a byte on the host at which it fits there."""
        best, high = None, math.log2(self._highest_price())
        low = high - 48
        price = high
        for _ in range(PRICE_STEPS):
            plan = self._at_price(2**price).fastest(limit)
            if plan is not None and self.host_bytes(plan) <= self.host_limit:
                best, high = plan, price
            elif price == high:
                return None
            else:
                low = price
            price = (low + high) / 2
        return best

    def _highest_price(self) -> float:
        """Seconds for a byte, more than any byte on the host could spare."""
        of = [c[s] for n, c in zip(self.names, self.costs) for s in n]
        least = min(cost.host_bytes for cost in of if cost.host_bytes)
        return sum(cost.time_s for cost in of) / least

    def _at_price(self, price: float) -> Choices:
        """The same where a byte on the host takes ``price`` seconds, and there is room for all."""

        def priced(costs: Mapping[str, BlockCost]) -> Mapping[str, BlockCost]:
            # of all points, as what a named one makes again is of another
            def at_price(point: str) -> BlockCost:
                c = costs[point]
                return replace(c, time_s=c.time_s + price * c.host_bytes)

            return CostTable(at_price)

        known = {id(c): c for c in self.costs}
        tables = {i: priced(c) for i, c in known.items()}
        return replace(self, costs=[tables[id(c)] for c in self.costs], host_limit=math.inf)

    def smallest(self) -> tuple[int, Points]:
        """The least bytes that any plan needs, and that plan."""
        return self._least

    @cached_property
    def _least(self) -> tuple[int, Points]:
        plans = (part._smallest for part in self._by_ahead)
        return min(((self.peak(plan), plan) for plan in plans), key=lambda found: found[0])

    @cached_property
    def _smallest(self) -> Points:
        """The plan that needs least beside weights fetched ahead."""
        kinds, number = self._kinds
        return self._named(smallest(kinds, number, self.rest.workspace_bytes))

    def _blocks_hold(self, points: Sequence[str]) -> int:
        """Bytes that the blocks hold under ``points``, but for weights fetched ahead."""
        found = moments(self.chosen(points), self.rest)
        return max(m.held_bytes - m.ahead_bytes for m in found)

    @cached_property
    def _most_ahead(self) -> int:
        """The most bytes that are fetched ahead for any block, whatever the plan."""
        return max((c[s].ahead_bytes for names, c in self._of_kinds for s in names), default=0)

    @property
    def _of_kinds(self) -> Iterable[tuple[Points, Mapping[str, BlockCost]]]:
        """What there is to choose, and its costs, once for equal blocks."""
        pairs = zip(self.names, self.costs)
        return {(names, id(c)): (names, c) for names, c in pairs}.values()

    @cached_property
    def _by_ahead(self) -> list[Choices]:
        """The choices among all points, then among those with less fetched ahead, and so on."""
        every = sorted({c[s].ahead_bytes for names, c in self._of_kinds for s in names})
        found, last = [self], self._most_ahead
        for most in reversed(every):
            if last - most <= self._most_ahead // ALIKE:
                continue
            last = most
            kept = {
                (names, id(c)): tuple(s for s in names if c[s].ahead_bytes <= most)
                for names, c in self._of_kinds
            }
            if not all(kept.values()):
                break
            names = [kept[of, id(c)] for of, c in zip(self.names, self.costs)]
            found.append(replace(self, names=names))
        return found

    def _named(self, taken: Sequence[int]) -> Points:
        kinds, number = self._kinds
        return _flat(kinds[k].points[p] for k, p in zip(number, taken))

    @property
    def _aheads(self) -> list[int]:
        """Bytes to count with as fetched ahead at every moment: first as many as of any block but
        the head, which is last, often has most by far, and but one neighbour."""
        *others, last = (max(c[s].ahead_bytes for s in n) for n, c in self._of_kinds)
        return sorted({max(others, default=last), self._most_ahead})

    def _room(self, limit: float, ahead: int) -> int:
        """Bytes that the blocks may hold, such that ``peak`` is at most ``limit``, with ``ahead``
        bytes fetched ahead at every moment."""
        fixed = self.communicator_bytes + self.rest.saved_bytes + ahead
        room = math.floor((limit - self.static_bytes) / (1 + self.margin)) + 1
        while math.ceil(room * (1 + self.margin)) > limit - self.static_bytes:
            room -= 1
        return room - fixed

    @cached_property
    def _kinds(self) -> tuple[list[Kind], list[int]]:
        """The kinds of blocks and pairs, and per block or pair the place of its kind."""
        units, places = self._units(), dict[Any, int]()
        number = [
            places.setdefault(tuple((id(self.costs[i]), self.names[i]) for i in of), len(places))
            for of in units
        ]
        first = [units[number.index(k)] for k in range(len(places))]
        return [self._kind(of) for of in first], number

    @cached_property
    def _unit(self) -> float:
        """Seconds that count as one."""
        seconds = (c[s].time_s for names, c in self._of_kinds for s in names)
        return (max(seconds, default=0.0) or 1.0) / 2**40

    def _units(self) -> list[Unit]:
        units: list[Unit] = []
        for i in range(len(self.names)):
            if self.inputs and self.inputs[i]:
                units[-1] = (i - 1, i)
            else:
                units.append((i,))
        return units

    def _kind(self, of: Unit) -> Kind:
        """The kind of the block or of the pair ``of``."""
        if len(of) == 1:
            (i,) = of
            return kind_of([((s,), self.costs[i][s]) for s in self.names[i]], self._unit)
        (a, b), (first, second) = of, (self._unbeaten(i) for i in of)
        num_bytes = self.inputs[b]
        costs = {
            (s, t): join(self.costs[a][s], behind(self.costs[a], s, self.costs[b][t], t, num_bytes))
            for s, t in product(first, second)
        }
        return kind_of(list(costs.items()), self._unit)

    def _unbeaten(self, i: int) -> list[str]:
        """Points of block ``i`` that a best pair may have: among those that make the next input
        again, among those that keep their input alone, and among the others, the unbeaten ones."""
        costs, alike = self.costs[i], dict[Any, list[str]]()
        for s in self.names[i]:
            at = Point.parse(s)
            alike.setdefault((at.recomputes, at.levers in KEEPING_INPUT), []).append(s)
        kinds = [kind_of([((s,), costs[s]) for s in of], self._unit) for of in alike.values()]
        return [s for kind in kinds for (s,) in kind.points]


def _flat(points: Iterable[Points]) -> Points:
    """The points of blocks and pairs, one per block."""
    return tuple(chain.from_iterable(points))


def kind_of(costs: Sequence[tuple[Points, BlockCost]], unit: float) -> Kind:
    """Blocks, or pairs, that may take the points of ``costs``, less those that another beats in
    time and in memory.

    Args:
        costs: points, one per block, and what they cost.
        unit: seconds that count as one.
    """
    of = [cost for _, cost in costs]
    assert len({c.left_bytes for c in of}) == 1, "gradients differ by strategy"
    rows = np.array(
        [
            (round(c.time_s / unit), min(c.saved_bytes, MOST), min(c.workspace_bytes, MOST))
            for c in of
        ],
        np.int64,
    )
    beats = (rows[:, None] <= rows).all(2)  # [points, points]: the first the second
    earlier = np.tri(len(of), k=-1, dtype=bool).T
    beaten: Array = np.logical_or.reduce(beats & (~beats.T | earlier), axis=0)
    time, saved, workspace = rows.T
    points = tuple(names for names, _ in costs)
    return Kind(points, time, saved, workspace, of[0].left_bytes).only(~beaten)


def smallest(kinds: Sequence[Kind], number: Sequence[int], held: int) -> list[int]:
    """The points of the plan that needs least.

    Args:
        kinds: of blocks.
        number: per block the place of its kind in ``kinds``.
        held: beyond what is saved, when all blocks have saved.
    """
    tables = [
        sorted(zip(*map(Array.tolist, (k.saved, k.workspace, k.time)), range(len(k.points))))
        for k in kinds
    ]
    left, plan = 0, []
    for k in reversed(number):
        saved, workspace, _, p = tables[k][0]
        if left + workspace > held:  # else what saves least needs least
            held, _, p = min((s + max(held, left + w), time, p) for s, w, time, p in tables[k])
        else:
            held += saved
        left += kinds[k].left
        plan.append(p)
    plan.reverse()
    return plan


class _Search:
    """The search for the fastest plan that holds at most ``room`` bytes; there is one.

    Args:
        kinds: of blocks.
        number: per block the place of its kind in ``kinds``.
        at_end: bytes held beyond what is saved, when all blocks have saved.
    """

    def __init__(
        self, kinds: Sequence[Kind], number: Sequence[int], room: int, at_end: int
    ) -> None:
        self.number, self.room, self.at_end = number, room, at_end
        smallest_plan = smallest(kinds, number, at_end)
        self.plan = [kinds[k].points[p] for k, p in zip(number, smallest_plan)]
        self.best = sum(int(kinds[k].time[p]) for k, p in zip(number, smallest_plan))
        counts = Counter(number)
        self.rate = price_of(kinds, [counts[k] for k in range(len(kinds))], room - at_end).rate
        of = np.array(number)
        left = np.array([k.left for k in kinds])[of]
        least = np.array([k.saved.min() for k in kinds])[of]
        self.saved = _sums(least)
        """Bytes that the blocks before each one save at least."""
        self.short = _sums(np.maximum(0, left - least))
        """Bytes by which they may save less than the gradients that they leave."""
        space = room - self.saved[:-1] - (left[::-1].cumsum()[::-1] - left)
        priced, self.kinds, self._costs = np.zeros(len(of)), list[Kind](), list[Array]()
        for k, kind in enumerate(kinds):
            fits = kind.saved + kind.workspace <= space[of == k][:, None]
            kind = kind.only(fits.any(0))
            cost = kind.time + self.rate * kind.saved
            fits = kind.saved + kind.workspace <= space[of == k][:, None]
            priced[of == k] = np.where(fits, cost, np.inf).min(1)
            self.kinds.append(kind)
            self._costs.append(cost - priced[of == k].max())
        self.priced = _sums(priced)
        """Time and the price of bytes that the blocks before each one cost at least."""
        self.bound = float(self.priced[-1]) - self.rate * (room - at_end)
        """No plan is faster."""

    def run(self) -> list[Points]:
        """The points of the fastest plan, by block or pair."""
        beam, width = WIDTHS
        self._pass(beam, exact=False)
        if self.best > self.bound + 1:
            self._pass(width, exact=True)
        return self.plan

    def _pass(self, width: int, exact: bool) -> None:
        """Look for a faster plan, with at most ``width`` choices for the last blocks kept."""
        kinds = [
            kind.only(self.bound + cost < self.best) for kind, cost in zip(self.kinds, self._costs)
        ]
        if not all(kind.points for kind in kinds):
            return None
        most: float = max(int(kind.workspace.max(initial=0)) for kind in kinds)
        time, held, left = np.zeros(1, np.int64), np.array([self.at_end]), 0
        taken: list[_Taken] = []
        for i in range(len(self.number), 0, -1):
            if held[0] >= left + most + self.short[i]:
                try:
                    return self._fill(kinds, i, (time, held), taken, exact)
                except OverflowError as e:
                    log.debug("%d blocks are chosen one by one: %s", i, e)
                    most = math.inf
            kind = kinds[self.number[i - 1]]
            then = (kind.time[:, None] + time).ravel()
            work = np.maximum(held, left + kind.workspace[:, None])
            hold = (kind.saved[:, None] + work).ravel()
            hope = self.priced[i - 1] + then - self.rate * (self.room - hold)
            kept = np.flatnonzero((self.saved[i - 1] + hold <= self.room) & (hope < self.best))
            kept = undominated(kept, then, hold)
            if len(kept) > width:
                kept = kept[np.sort(hope[kept].argsort()[:width])]
            if not len(kept):
                return None
            taken.append(_Taken(kind, *np.divmod(kept, len(time))))
            time, held, left = then[kept], hold[kept], left + kind.left
        at = int(time.argmin())
        if time[at] < self.best:
            self.best, self.plan = int(time[at]), _last(taken, at)
        return None

    def _fill(
        self,
        kinds: Sequence[Kind],
        i: int,
        states: tuple[Array, Array],
        taken: Sequence[_Taken],
        exact: bool,
    ) -> None:
        """Choose the first ``i`` blocks, whose order does not matter."""
        counts = Counter(self.number[:i])
        of = [counts[k] for k in range(len(kinds))]
        found = fill(kinds, of, self.room, states, self.best, exact)
        if found is not None:
            points = [
                chain.from_iterable(map(repeat, kind.points, n.tolist()))
                for kind, n in zip(kinds, found.taken)
            ]
            self.best = found.time
            self.plan = [next(points[k]) for k in self.number[:i]]
            self.plan += _last(taken, found.state)


class _Taken(NamedTuple):
    """What the choices for the last blocks take for the first of these, and for those after it."""

    kind: Kind
    point: Array
    after: Array


def _last(taken: Sequence[_Taken], at: int) -> list[Points]:
    """The points of the last blocks that led to the choice ``at``."""
    plan = []
    for kind, point, after in reversed(taken):
        plan.append(kind.points[int(point[at])])
        at = int(after[at])
    return plan


def _sums(of: Array) -> Array:
    """The sums of all before each element, and last of all."""
    return np.concatenate([of[:0].sum(keepdims=True), of.cumsum()])
