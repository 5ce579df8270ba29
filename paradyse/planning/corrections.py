"""What a run has shown of its costs: measured against predicted, by kind of block and by length.

Times are corrected both ways, as ``time_ratios`` estimates. Memory only upwards, and only of
variants that have run: a step that needed less than was predicted does not show that every step
will. Lengths count by their scale, a power of two of tokens, so that an error at short lengths,
such as Python's own time, is not taken for one at long ones. Memory at a scale that was not
measured is corrected as at the nearest one that was.

In all of this a ``key`` is a kind of block and a variant of it, or the head and its levers, a
``workload`` what a step is run on, a ``quantity`` one of the names below.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from paradyse.planning.costs import BlockCost
from paradyse.planning.time_ratios import MIXED, Key, Ratios
from paradyse.types import HEAD, Point, Workload

TIME = "time"
"""Measured over predicted, of a key and by scale (``time_ratios``)."""

SAVED, WORKSPACE = "saved", "workspace"
"""The same of bytes."""

REST_SAVED, REST_WORKSPACE = "rest saved", "rest workspace"
"""Bytes of what is in no block, by tokens."""

FLOOR, STATIC = "floor", "static"
"""Bytes: the most that was held beyond static when backward ends, and static itself."""

RATIOS, OF_REST, CONSTANTS = (SAVED, WORKSPACE), (REST_SAVED, REST_WORKSPACE), (FLOOR, STATIC)

Rows = Mapping[tuple[str, Hashable], Mapping[int, float]]
"""(Quantity, key) -> scale -> ratio; (quantity, None) -> tokens -> bytes of the rest; (quantity,
None) -> 0 -> bytes of a constant."""

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

    measured: Rows = field(default_factory=dict)
    """What ranks agreed that they measured of bytes."""
    times: Ratios = field(default_factory=Ratios)

    def apply(self, cost: BlockCost, key: Key, workload: Workload) -> BlockCost:
        """``cost`` as corrected. What was learned of memory was learned in training. Until anything
        was measured beside other strategies, what runs there is as it was among its like; a point
        with levers that was not measured follows its strategy without them."""
        kind, variant = key
        among = key if self.times.knows_mixed(kind) else (kind, variant.removesuffix(MIXED))
        at, timed = scale_of(workload), _seen(among, self.times.knows)
        time_s = cost.time_s * self.times.ratio(timed, at, cost.parts)
        source = ONLINE if self.times.knows(timed) else cost.source
        cost = replace(cost, time_s=time_s, source=source)
        held = _seen((kind, variant.removesuffix(MIXED)), lambda k: (SAVED, k) in self.measured)
        if not workload.training or (SAVED, held) not in self.measured:
            return cost
        return replace(
            cost,
            saved_bytes=round(cost.saved_bytes * self.value(SAVED, held, at)),
            workspace_bytes=round(cost.workspace_bytes * self.value(WORKSPACE, held, at)),
            memory_source=ONLINE,
        )

    def apply_to_rest(self, cost: BlockCost, workload: Workload) -> BlockCost:
        """The same of what is in no block: ``cost`` is as predicted."""
        if not workload.training or (REST_SAVED, None) not in self.measured:
            return cost
        saved, workspace = (int(self.value(q, None, num_tokens(workload))) for q in OF_REST)
        return replace(
            cost,
            saved_bytes=max(cost.saved_bytes, saved),
            workspace_bytes=max(cost.workspace_bytes, workspace),
            memory_source=ONLINE,
        )

    def constant(self, quantity: str) -> int:
        """Bytes of the ``quantity`` ``FLOOR`` or ``STATIC``; 0 where it was not measured."""
        return int(self.value(quantity, None, 0))

    def value(self, quantity: str, of: Hashable, at: int) -> float:
        """Of bytes.

        Args:
            of: the key of a ratio; None for bytes.
            at: the scale of a ratio, the tokens of the rest's bytes, 0 for a constant.
        """
        row = self.measured.get((quantity, of), {})
        if quantity in RATIOS:
            return max(1.0, nearest(row, at)) if row else 1.0
        return along(row, at) if row else 0.0


def _seen(key: Key, known: Callable[[Key], bool]) -> Key:
    """``key``, or that of its strategy without levers where ``key`` is not ``known``; heads have
    no strategy."""
    kind, variant = key
    if kind == HEAD or known(key):
        return key
    return kind, Point.parse(variant).strategy + MIXED * variant.endswith(MIXED)


def nearest(row: Mapping[int, float], at: int) -> float:
    """The value of ``row`` at the scale nearest to ``at``; of two the larger scale's."""
    return row[min(row, key=lambda scale: (abs(scale - at), -scale))]


def along(points: Mapping[int, float], at: int) -> float:
    """Bytes at ``at`` tokens: between measured ``points`` and beyond the last two a straight line,
    as embedding, head and loss grow; before the first, and with one alone, as there.
    """
    tokens = sorted(points)
    inside = float(np.interp(at, tokens, [points[n] for n in tokens]))
    if len(tokens) == 1 or at <= tokens[-1]:
        return inside
    a, b = tokens[-2:]
    return inside + max(0.0, (points[b] - points[a]) / (b - a)) * (at - b)
