"""What a run has shown of its costs: measured against predicted, by kind of block and by length.

Times are corrected both ways. Memory only upwards: a step that needed less than was predicted does
not show that every step will. Lengths count by their scale, a power of two of tokens, so that an
error at short lengths, such as Python's own time, is not taken for one at long ones. A scale that
was not measured is corrected as the nearest one that was.

A variant that has not run yet is trusted as far as the best one of its block, as to time: so the
planner tries it once what it runs has become slow, and then knows. Its memory is as predicted.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from paradyse.cost import BlockCost
from paradyse.types import Workload

Key = tuple[Hashable, str]
"""A kind of block (``Planner.kinds``) and a variant of it."""

TIME, SAVED, WORKSPACE = "time", "saved", "workspace"
"""Measured over predicted, of a key and by scale."""

REST_SAVED, REST_WORKSPACE = "rest saved", "rest workspace"
"""Bytes of what is in no block, by tokens."""

FLOOR, STATIC = "floor", "static"
"""Bytes: the most that was held beyond static when backward ends, and static itself."""

RATIOS, REST, CONSTANTS = (TIME, SAVED, WORKSPACE), (REST_SAVED, REST_WORKSPACE), (FLOOR, STATIC)

Rows = Mapping[Hashable, Mapping[int, float]]
"""Key -> scale -> ratio; None -> tokens -> bytes of the rest; None -> 0 -> bytes of a constant."""

ONLINE = "online"
"""Source of a cost that was corrected."""


def num_tokens(workload: Workload) -> int:
    return workload.batch * workload.seq_len


def scale_of(workload: Workload) -> int:
    """Equal for workloads whose tokens lie between the same two powers of two."""
    return num_tokens(workload).bit_length()


@dataclass(frozen=True)
class Corrections:
    """Equal on all ranks."""

    measured: Mapping[str, Rows]
    """Quantity -> what ranks agreed that they measured."""
    best: Mapping[Hashable, Mapping[int, float]]
    """Kind of block -> scale -> the lowest ratio of times that any of its variants ever had."""

    def apply(self, cost: BlockCost, key: Key, workload: Workload) -> BlockCost:
        """``cost`` as corrected. What was learned of memory was learned in training."""
        at = scale_of(workload)
        time_s = cost.time_s * self.value(TIME, key, at)
        source = ONLINE if key in self.measured[TIME] else cost.source
        cost = replace(cost, time_s=time_s, source=source)
        if not workload.training or key not in self.measured[SAVED]:
            return cost
        return replace(
            cost,
            saved_bytes=round(cost.saved_bytes * self.value(SAVED, key, at)),
            workspace_bytes=round(cost.workspace_bytes * self.value(WORKSPACE, key, at)),
            memory_source=ONLINE,
        )

    def apply_to_rest(self, cost: BlockCost | None, workload: Workload) -> BlockCost | None:
        """The same of what is in no block.

        Args:
            cost: as predicted; None: it was not.
        """
        if not workload.training or not self.measured[REST_SAVED]:
            return cost
        saved, workspace = (int(self.value(q, None, num_tokens(workload))) for q in REST)
        if cost is None:
            return BlockCost(0.0, saved, workspace, 0, source=ONLINE, memory_source=ONLINE)
        return replace(
            cost,
            saved_bytes=max(cost.saved_bytes, saved),
            workspace_bytes=max(cost.workspace_bytes, workspace),
            memory_source=ONLINE,
        )

    def constant(self, quantity: str) -> int:
        """``FLOOR`` or ``STATIC``; 0 where it was not measured."""
        return int(self.value(quantity, None, 0))

    def value(self, quantity: str, of: Hashable, at: int) -> float:
        """A ratio at a scale; bytes of the rest at so many tokens; a constant at 0."""
        row = self.measured[quantity].get(of, {})
        if quantity == TIME:
            return self._time(of, row, at)
        if quantity in RATIOS:
            return max(1.0, nearest(row, at)) if row else 1.0
        return along(row, at) if row else 0.0

    def _time(self, key: Hashable, row: Mapping[int, float], at: int) -> float:
        """Measured at this scale; else as the best variant here, times by how much this one was
        worse than the best where it ran."""
        assert isinstance(key, tuple)
        best = self.best.get(key[0])
        if at in row or not best:
            return row.get(at, 1.0)
        if not row:
            return nearest(best, at)
        near = nearest_scale(row, at)
        return nearest(best, at) * row[near] / best[near]


def nearest_scale(row: Mapping[int, float], at: int) -> int:
    """The one nearest to ``at``; of two the larger."""
    return min(row, key=lambda scale: (abs(scale - at), -scale))


def nearest(row: Mapping[int, float], at: int) -> float:
    return row[nearest_scale(row, at)]


def along(points: Mapping[int, float], at: int) -> float:
    """Bytes at ``at`` tokens: between measured points and beyond the last two a straight line, as
    embedding, head and loss grow; before the first, and with one alone, as there.
    """
    xs = sorted(points)
    if len(xs) == 1 or at <= xs[0]:
        return points[xs[0]]
    end = next((i for i in range(1, len(xs)) if at <= xs[i]), len(xs) - 1)
    a, b = xs[end - 1], xs[end]
    slope = (points[b] - points[a]) / (b - a)
    if at > b:
        slope = max(0.0, slope)
    return points[b] + slope * (at - b)
