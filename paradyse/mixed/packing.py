"""Groups for a batch in which every group is done in a given time, and the least such time.

``Table`` has the times of all sequences in all ways. ``pack`` opens groups of ranks one after the
other, the longest sequence first; ``arrange`` puts groups side by side into micro-batches.

Throughout, ``table`` is the batch, ``num_ranks`` are those of the axis.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paradyse.mixed.ways import Floats, Group, MicroBatch, StepPlan, Way

STEPS = 12
"""Halvings between a time that is too short and one that is long enough."""
COARSER = 3
"""How many degrees are tried as the least one."""
CLOSE = 1.002
"""Times whose ratio is less are the same."""
SLACK = 1 + 1e-9
"""What a sum of times may be above the time it was made from."""


class Table:
    """The sequences of a batch, and what each adds to a group of each way.

    Args:
        lengths: tokens of each sequence.
        ways: of groups.
    """

    def __init__(self, lengths: Sequence[int], ways: Sequence[Way]):
        self.lengths, self.ways = tuple(lengths), tuple(ways)
        self.adds: Floats = np.stack([way.sequence_s(self.lengths) for way in self.ways])
        """[ways, sequences] Seconds."""
        self.rows: list[list[float]] = self.adds.tolist()
        """The same as lists, which are faster to look single numbers up in."""

    def holds(self, way: int, sequence: int) -> bool:
        """Whether a group of the way with index ``way`` has room for ``sequence``."""
        return self.lengths[sequence] <= self.ways[way].max_tokens

    def time_s(self, way: int, sequences: Sequence[int]) -> float:
        """Seconds of a group of the way with index ``way`` with ``sequences``; infinite where they
        have more tokens than it has room for."""
        if sum(self.lengths[i] for i in sequences) > self.ways[way].max_tokens:
            return math.inf
        row, of = self.rows[way], self.ways[way]
        return max(of.least_s, of.fixed_s + sum(row[i] for i in sequences))


@dataclass
class Bin:
    """A group that is being filled."""

    way: int
    """Index."""
    sequences: list[int]
    load_s: float
    """Seconds as ``Way.fixed_s`` and its sequences add up."""
    tokens: int
    least_s: float = 0.0
    """As of its way."""

    @property
    def time_s(self) -> float:
        """Seconds until it is done."""
        return max(self.least_s, self.load_s)


def empty_bin(table: Table, way: int) -> Bin:
    """A group of the way with index ``way`` of ``table``, without a sequence."""
    return Bin(way, [], table.ways[way].fixed_s, 0, table.ways[way].least_s)


def longest_first(table: Table, sequences: Sequence[int] | None = None) -> list[int]:
    """``sequences`` of ``table``, None for all, the longest first; equal ones by their index."""
    found = range(len(table.lengths)) if sequences is None else sequences
    return sorted(found, key=lambda i: (-table.lengths[i], i))


class Packer:
    """Opens groups and fills them, all to be done in one time.

    Args:
        table: the batch.
        most_s: seconds.
        num_ranks: most of a group.
        budget: ranks of all groups together.
    """

    def __init__(self, table: Table, most_s: float, num_ranks: int, budget: int):
        self.table, self.most_s, self.budget = table, most_s, budget
        self.bins: list[Bin] = []
        ways = table.ways
        self.usable = [
            p for p, w in enumerate(ways) if w.degree <= num_ranks and w.idle_s <= most_s
        ]
        self._left: list[list[tuple[float, int]]] = [[] for _ in ways]
        """Per way (seconds left, index of the group), ascending."""

    def fill(self, sequence: int, among: Sequence[int]) -> bool:
        """Put ``sequence`` into an open group of a way ``among`` these: where it takes the fewest
        rank-seconds, and of that way's groups into the fullest."""
        table, cheapest, found = self.table, math.inf, None
        for p in among:
            left, adds = self._left[p], table.rows[p][sequence]
            cost = adds * table.ways[p].degree
            if not left or cost >= cheapest:
                continue
            room = table.ways[p].max_tokens - table.lengths[sequence]
            for j in range(bisect_left(left, (adds, -1)), len(left)):
                if self.bins[left[j][1]].tokens <= room:
                    found, cheapest = (p, j), cost
                    break
        if found is not None:
            self._add(sequence, self._left[found[0]].pop(found[1])[1])
        return found is not None

    def open(self, sequence: int, among: Sequence[int]) -> bool:
        """Open a group for ``sequence``, of that way ``among`` these of which such sequences take
        the fewest ranks each."""
        table, tokens = self.table, self.table.lengths[sequence]
        least, chosen = (math.inf, math.inf), -1
        for p in among:
            way, adds = table.ways[p], table.rows[p][sequence]
            room_s = self.most_s - way.fixed_s
            if adds > room_s or tokens > way.max_tokens or way.degree > self.budget:
                continue
            many = min(room_s / adds if adds else math.inf, way.max_tokens / tokens)
            ranks = way.degree / int(many), adds
            if ranks < least:
                least, chosen = ranks, p
        if chosen < 0:
            return False
        self.budget -= table.ways[chosen].degree
        self.bins.append(empty_bin(table, chosen))
        self._add(sequence, len(self.bins) - 1)
        return True

    def _add(self, sequence: int, number: int) -> None:
        into = self.bins[number]
        into.sequences.append(sequence)
        into.load_s += self.table.rows[into.way][sequence]
        into.tokens += self.table.lengths[sequence]
        insort(self._left[into.way], (self.most_s - into.load_s, number))


def pack(
    table: Table,
    order: Sequence[int],
    most_s: float,
    num_ranks: int,
    budget: int,
    way_of: Mapping[int, int] | None = None,
    least_degree: int = 1,
) -> list[Bin] | None:
    """Groups with all sequences, each done in ``most_s``.

    Args:
        order: the sequences, the longest first.
        most_s: seconds.
        budget: ranks of all groups together.
        way_of: the index of the way of each sequence, which it gets while there are ranks for it;
            None: the cheapest.
        least_degree: of groups, but for those that ``way_of`` asks for.
    Returns:
        None: it takes more than ``budget`` ranks.
    """
    packer = Packer(table, most_s * SLACK, num_ranks, budget)
    usable = [p for p in packer.usable if table.ways[p].degree >= least_degree]
    for i in order:
        asked = () if way_of is None else (way_of[i],)
        if packer.fill(i, asked) or packer.open(i, asked):
            continue
        if not (packer.fill(i, usable) or packer.open(i, usable)):
            return None
    return packer.bins


def arrange(
    table: Table, bins: Sequence[Bin], num_ranks: int, num_micro: int
) -> list[list[Bin]] | None:
    """``bins`` as at most ``num_micro`` micro-batches, the slowest together, each of at most
    ``num_ranks`` ranks; None where they do not go into so many."""
    ways = table.ways
    by_time = sorted(bins, key=lambda b: -b.time_s)
    by_degree = sorted(by_time, key=lambda b: -ways[b.way].degree)
    for ordered in (by_time, by_degree):
        micros: list[list[Bin]] = []
        free: list[int] = []
        for b in ordered:
            degree = ways[b.way].degree
            at = next((k for k, n in enumerate(free) if n >= degree), len(free))
            if at == len(free):
                micros.append([])
                free.append(num_ranks)
            micros[at].append(b)
            free[at] -= degree
        if len(micros) <= num_micro:
            return micros
    return None


def least_work(table: Table, num_ranks: int) -> list[float]:
    """Rank-seconds that each sequence takes at the least, infinite where it fits nowhere."""
    return _least(table, num_ranks, [w.degree for w in table.ways], [0.0] * len(table.ways))


def least_s(table: Table, num_ranks: int) -> list[float]:
    """Seconds that a group with each sequence alone takes, infinite where it fits nowhere."""
    found = _least(table, num_ranks, [1] * len(table.ways), [w.fixed_s for w in table.ways])
    idle_s = min((w.idle_s for w in table.ways if w.degree <= num_ranks), default=0.0)
    return [max(idle_s, s) for s in found]


def _least(
    table: Table, num_ranks: int, factors: Sequence[int], more: Sequence[float]
) -> list[float]:
    found = np.full(len(table.lengths), np.inf)
    for p, way in enumerate(table.ways):
        if way.degree <= num_ranks:
            fits = np.asarray(table.lengths) <= way.max_tokens
            cost = table.adds[p] * factors[p] + more[p]
            found = np.where(fits, np.minimum(found, cost), found)
    return found.tolist()


def search(
    table: Table, order: Sequence[int], num_ranks: int, num_micro: int
) -> list[list[Bin]] | None:
    """The micro-batches, at most ``num_micro``, of the least time for each of them that ``pack``
    finds; None where the memory of so many does not do.

    Args:
        order: the sequences, the longest first.
        num_micro: at least 1.
    """
    budget = num_ranks * num_micro
    degrees = [d for d in sorted({w.degree for w in table.ways}) if d <= num_ranks]
    coarser = degrees[:: max(1, -(-len(degrees) // COARSER))]

    def attempt(most_s: float) -> list[list[Bin]] | None:
        for least in coarser:  # small groups leave room that nothing fits into
            bins = pack(table, order, most_s, num_ranks, budget, least_degree=least)
            micros = None if bins is None else arrange(table, bins, num_ranks, num_micro)
            if micros is not None:
                return micros
        return None

    alone_s, work = least_s(table, num_ranks), least_work(table, num_ranks)
    alone, area = max(alone_s[i] for i in order), sum(work[i] for i in order)
    if math.isinf(alone):
        return None
    best = attempt(math.inf)
    if best is None:
        return None
    low = tried = max(alone, area / budget)
    high = slowest(best)
    while tried < high:  # times double until groups are done in them
        found = attempt(tried)
        if found is not None:
            best, high = found, min(tried, slowest(found))
            break
        low, tried = tried, 2 * tried
    for _ in range(STEPS):
        if high <= low * CLOSE:
            break
        middle = math.sqrt(low * high)
        found = attempt(middle)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, slowest(found))
    return best


def slowest(micros: Sequence[Sequence[Bin]]) -> float:
    """Seconds of the slowest group of ``micros``."""
    return max(b.time_s for bins in micros for b in bins)


def total_s(micros: Sequence[Sequence[Bin]]) -> float:
    """Seconds of all micro-batches ``micros``, one after the other."""
    return sum(max(b.time_s for b in bins) for bins in micros)


def spread(table: Table, order: Sequence[int], way: int, num_ranks: int) -> list[list[Bin]] | None:
    """The best step with groups of one way alone: as many micro-batches as memory asks for, or a
    few more, and sequences dealt out so that groups take equally long.

    Args:
        order: the sequences, the longest first.
        way: index.
    """
    side_by_side = num_ranks // table.ways[way].degree
    if not side_by_side or not table.holds(way, order[0]):
        return None
    best = None
    tokens = sum(table.lengths[i] for i in order)
    needed = max(1, math.ceil(tokens / (table.ways[way].max_tokens * side_by_side)))
    tried = 0
    for num_micro in range(needed, len(order) + needed + 1):
        bins = _deal(table, order, way, side_by_side * num_micro)
        if bins is None:
            continue
        ordered = sorted(bins, key=lambda b: -b.time_s)
        micros = [ordered[k : k + side_by_side] for k in range(0, len(bins), side_by_side)]
        if best is None or total_s(micros) < total_s(best):
            best = micros
        tried += 1
        if tried == 3:
            break
    return best


def _deal(table: Table, order: Sequence[int], way: int, num_bins: int) -> list[Bin] | None:
    """Sequences into ``num_bins`` groups, each into the one that is done first and has room; those
    that got none are left out."""
    fixed, room, row = table.ways[way].fixed_s, table.ways[way].max_tokens, table.rows[way]
    bins = [empty_bin(table, way) for _ in range(num_bins)]
    queue = [(fixed, k) for k in range(num_bins)]
    for i in order:
        tokens = table.lengths[i]
        at = next((q for q, (_, k) in enumerate(queue) if bins[k].tokens + tokens <= room), None)
        if at is None:
            return None
        number = queue.pop(at)[1]
        into = bins[number]
        into.sequences.append(i)
        into.load_s += row[i]
        into.tokens += tokens
        if into.tokens < room:
            insort(queue, (into.load_s, number))
    return [b for b in bins if b.sequences]


def as_plan(table: Table, micros: Sequence[Sequence[Bin]]) -> StepPlan:
    """``micros`` with ranks: in each micro-batch groups follow each other from rank 0 on, those of
    most ranks first, so that a group of 2^k ranks begins at a multiple of that where all others
    are powers of two as well."""
    found = []
    for bins in micros:
        groups, rank = [], 0
        for b in sorted(bins, key=lambda b: (-table.ways[b.way].degree, -b.time_s, b.sequences)):
            way = table.ways[b.way]
            sequences = tuple(sorted(b.sequences))
            groups.append(Group(way, sequences, rank, table.time_s(b.way, sequences)))
            rank += way.degree
        found.append(MicroBatch(tuple(groups)))
    return StepPlan(tuple(found))
