"""The fastest plan whose memory fits, by the most that it holds at any moment of a step.

Read from the last block to the first, ``costs.peak_bytes`` is a recursion: a block and all after it
hold, beyond what the blocks before it saved, ``saved + max(workspace + gradients that later blocks
left, the same of the blocks after it)``. So the choices for the last blocks compare by two numbers,
seconds and these bytes, and whatever is worse in both is part of no best plan: a dynamic program
over lists of undominated choices (Kellerer, Pferschy, Pisinger: Knapsack Problems, 2004, chapter
3.4). What cannot beat the best plan known so far, by the price of memory in the linear relaxation,
is left out (chapter 5.1.1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paradyse.planning.costs import BlockCost, peak_bytes

WIDTHS = (32, 1024)
"""Choices for the last blocks that are kept. The first search gives a plan for the second to beat;
fewer than the second's are needed for 96 layers of two kinds of blocks and five strategies
(``benchmarks/choice.py``), and as long as they are, the plan is the best there is."""

Array = np.ndarray
Strategies = tuple[str, ...]
"""One name per block, in the order of computation."""


class _Block(NamedTuple):
    """What may be chosen for a block, by arrays [choices]."""

    time: Array
    """Whole units, so that sums in another order are equal."""
    saved: Array
    workspace: Array
    left: int
    """Bytes."""


@dataclass(frozen=True)
class Choices:
    """What may be chosen for each block of one workload, and what it costs."""

    names: Sequence[tuple[str, ...]]
    """Per block the strategies to choose from."""
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

    def peak(self, strategies: Sequence[str]) -> int:
        """Bytes of a rank that a step needs under ``strategies``, one per block."""
        chosen = [c[s] for c, s in zip(self.costs, strategies)]
        held = self.communicator_bytes + peak_bytes(chosen, self.rest)
        floor = self.communicator_bytes + self.floor_bytes
        return self.static_bytes + max(math.ceil(held * (1 + self.margin)), floor)

    def time_s(self, strategies: Sequence[str]) -> float:
        """Seconds of the blocks under ``strategies``, and of the rest."""
        return sum(c[s].time_s for c, s in zip(self.costs, strategies)) + self.rest.time_s

    def fastest(self, limit: float) -> Strategies | None:
        """The fastest plan that needs at most ``limit`` bytes; None: none does.

        A function of the costs alone, ties included: every rank finds the same.
        """
        plan = tuple(
            min(names, key=lambda s, c=c: (c[s].time_s, c[s].saved_bytes))  # type: ignore[misc]
            for names, c in zip(self.names, self.costs)
        )
        if self.peak(plan) <= limit:
            return plan
        need, plan = self.smallest()
        return self._search(self._room(limit), plan) if need <= limit else None

    def smallest(self) -> tuple[int, Strategies]:
        """The least bytes that any plan needs, and that plan."""
        held, left, plan = self.rest.workspace_bytes, 0, []
        for names, c in zip(reversed(self.names), reversed(self.costs)):
            held, _, s = min(
                (c[s].saved_bytes + max(held, left + c[s].workspace_bytes), c[s].time_s, s)
                for s in names
            )
            left += c[s].left_bytes
            plan.append(s)
        plan.reverse()
        return self.peak(plan), tuple(plan)

    def _room(self, limit: float) -> int:
        """Bytes that the blocks may hold, such that ``peak`` is at most ``limit``."""
        fixed = self.communicator_bytes + self.rest.saved_bytes
        room = math.floor((limit - self.static_bytes) / (1 + self.margin)) + 1
        while math.ceil(room * (1 + self.margin)) > limit - self.static_bytes:
            room -= 1
        return room - fixed

    def _search(self, room: int, plan: Strategies) -> Strategies:
        """The fastest plan whose blocks hold at most ``room`` bytes; ``plan`` is one."""
        blocks = self._blocks()
        at_end = self.rest.workspace_bytes  # beyond what is saved, when all blocks have saved
        price = _price(blocks, room - at_end)
        # Of the blocks before each one, at least: bytes saved, and time plus the bytes' price.
        saved = np.cumsum([0, *(b.saved.min() for b in blocks)])
        priced = np.cumsum([0, *((b.time + price * b.saved).min() for b in blocks)])
        best = sum(b.time[n.index(s)] for b, n, s in zip(blocks, self.names, plan))
        for width in WIDTHS:
            time, held, left = np.zeros(1, np.int64), np.array([at_end]), 0
            taken: list[tuple[Array, Array]] = []
            widest = 0
            for i in range(len(blocks) - 1, -1, -1):
                b = blocks[i]
                then = (b.time[:, None] + time).ravel()
                hold = (b.saved[:, None] + np.maximum(held, left + b.workspace[:, None])).ravel()
                hope = priced[i] + then - price * (room - hold)
                kept = np.flatnonzero((saved[i] + hold <= room) & (hope < best))
                kept = _undominated(kept, then, hold)
                widest = max(widest, len(kept))
                if len(kept) > width:
                    kept = kept[np.linspace(0, len(kept) - 1, width).astype(int)]
                taken.append(np.divmod(kept, max(1, len(time))))
                time, held, left = then[kept], hold[kept], left + b.left
            if len(time):
                at = int(time.argmin())
                best, found = time[at], []
                for names, (choice, after) in zip(self.names, reversed(taken)):
                    found.append(names[choice[at]])
                    at = after[at]
                plan = tuple(found)
            if widest <= width:
                break
        return plan

    def _blocks(self) -> list[_Block]:
        longest = max(c[s].time_s for n, c in zip(self.names, self.costs) for s in n)
        unit = (longest or 1.0) / 2**40
        known: dict[tuple[int, tuple[str, ...]], _Block] = {}
        for n, c in zip(self.names, self.costs):
            if (id(c), n) not in known:
                assert len({c[s].left_bytes for s in n}) == 1, "gradients differ by strategy"
                rows = [
                    (round(c[s].time_s / unit), c[s].saved_bytes, c[s].workspace_bytes) for s in n
                ]
                time, saved, workspace = np.array(rows, np.int64).T
                known[id(c), n] = _Block(time, saved, workspace, c[n[0]].left_bytes)
        return [known[id(c), n] for n, c in zip(self.names, self.costs)]


def _undominated(of: Array, time: Array, held: Array) -> Array:
    """Those indices of which no other has as little of both; least held and longest first."""
    of = of[np.lexsort((time[of], held[of]))]
    least = np.minimum.accumulate(time[of])
    return of[np.concatenate([of[:1] >= 0, time[of][1:] < least[:-1]])]


def _price(blocks: Sequence[_Block], room: int) -> float:
    """Time per byte, such that paying it for what is saved beyond ``room`` is nearly as slow as
    saving no more: of all exchange rates between two choices the one of the highest bound."""
    count, kinds = Counter(map(id, blocks)), {id(b): b for b in blocks}
    rates = {0.0}
    for b in kinds.values():
        slower, spared = b.time - b.time[:, None], b.saved[:, None] - b.saved
        pays = (slower > 0) & (spared > 0)
        rates.update((slower[pays] / spared[pays]).tolist())
    return max(
        sorted(rates),
        key=lambda r: (
            sum(count[i] * (b.time + r * b.saved).min() for i, b in kinds.items()) - r * room
        ),
    )
