"""Plans that fit: the solver's counts laid out over the blocks, their memory seen moment by moment.

The solver knows sum saved + largest workspace, as if all that is saved were there whenever the
largest workspace is. ``cost.peak_bytes`` knows the order of blocks, and that what the later ones
saved is gone before an earlier one's backward. So the solver is given a larger budget than there
is, as much larger as its plans still fit.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from paradyse.planning.costs import BlockCost, Machine, peak_bytes
from paradyse.planning.solver import Choice, Counts, Group, fastest, frontier

HALVINGS = 7
"""Of the span between the budgets tried: it ends at a hundredth of one layer's saved bytes."""

Strategies = tuple[str, ...]
"""One name per block, in the order of computation."""


@dataclass(frozen=True)
class Choices:
    """What may be chosen for each block of one workload, and what it costs."""

    kinds: Sequence[Hashable]
    """Per block; those of one kind cost the same."""
    names: Sequence[tuple[str, ...]]
    """Per block the strategies to choose from."""
    simple: Sequence[Strategies]
    """Plans of one strategy for all blocks that are the planner's to choose."""
    costs: Sequence[Mapping[str, BlockCost]]
    """Per block, of at least these."""
    rest: Sequence[BlockCost]
    """Of what is in no block, where it was measured."""
    static_bytes: int
    floor_bytes: int
    """What every plan needs beyond ``static_bytes`` at some moment."""
    margin: float
    """Share by which blocks may need more than predicted; counted as needed."""
    machine: Machine

    @cached_property
    def _members(self) -> list[tuple[tuple[str, ...], list[int]]]:
        """Choices of each group of equal blocks, and where these are. Strategies that need most
        room come first, for the first blocks: less is saved while those run."""
        members: dict[tuple[Hashable, tuple[str, ...]], list[int]] = {}
        for i, key in enumerate(zip(self.kinds, self.names)):
            members.setdefault(key, []).append(i)
        return [
            (tuple(sorted(names, key=lambda s: -self.costs[at[0]][s].workspace_bytes)), at)
            for (_, names), at in members.items()
        ]

    @cached_property
    def _groups(self) -> list[Group]:
        groups = [
            Group(len(at), tuple(_choice(self.costs[at[0]][s]) for s in names))
            for names, at in self._members
        ]
        rest = [Choice(0.0, c.saved_bytes, c.workspace_bytes) for c in self.rest]
        return groups + [Group(1, (c,)) for c in rest]

    def peak(self, strategies: Sequence[str]) -> int:
        """Bytes of a rank that a step needs."""
        chosen = [c[s] for c, s in zip(self.costs, strategies)]
        held = peak_bytes(chosen, 0, self.machine, self.rest)
        floor = peak_bytes((), self.floor_bytes, self.machine)
        return self.static_bytes + max(math.ceil(held * (1 + self.margin)), floor)

    def time_s(self, strategies: Sequence[str]) -> float:
        """Of the blocks and the rest."""
        parts = [c[s] for c, s in zip(self.costs, strategies)]
        return sum(c.time_s for c in (*parts, *self.rest))

    def fastest(self, limit: float) -> Strategies | None:
        """The fastest plan found that needs at most ``limit`` bytes; None: none does.

        Never slower than one strategy for all blocks, where that fits.
        """
        room = (limit - self.static_bytes) / (1 + self.margin) - peak_bytes((), 0, self.machine)
        found = self._solved(float("inf"))
        if found is not None and self.peak(found) <= limit:
            return found
        plans: list[Strategies] = []
        low, high = 0.0, float(sum(max(c.saved_bytes for c in g.choices) for g in self._groups))
        at = low
        for _ in range(1 + HALVINGS):
            found = self._solved(room + at)
            fits = found is None or self.peak(found) <= limit
            if found is not None and fits:
                plans.append(found)
            low, high = (at, high) if fits else (low, at)
            at = (low + high) / 2
        plans += [p for p in self._simple() if self.peak(p) <= limit]
        return min(plans, key=self.time_s, default=None)

    def smallest(self) -> tuple[int, Strategies]:
        """The least bytes that any plan found needs, and that plan."""
        plans = self._simple() if self.names else [()]
        return min((self.peak(p), p) for p in plans)

    def _simple(self) -> list[Strategies]:
        """Plans of equal blocks alike: one strategy for all, and the least saved under every bound
        on the workspace."""
        return [*self.simple, *(self._laid_out(counts) for counts in frontier(self._groups))]

    def _solved(self, budget: float) -> Strategies | None:
        counts = fastest(self._groups, budget)
        return None if counts is None else self._laid_out(counts)

    def _laid_out(self, counts: Counts) -> Strategies:
        strategies = [""] * len(self.names)
        for (choices, at), row in zip(self._members, counts):
            taken = [s for s, n in zip(choices, row) for _ in range(n)]
            for i, s in zip(at, taken, strict=True):
                strategies[i] = s
        return tuple(strategies)


def _choice(cost: BlockCost) -> Choice:
    return Choice(cost.time_s, max(cost.saved_bytes, cost.left_bytes), cost.workspace_bytes)
