"""How much longer blocks take than was predicted, estimated from few and noisy measurements.

The logarithm of measured over predicted seconds, of a variant at a scale of lengths, is taken for a
sum: what all variants of the kind of block have in common (the machine's state, Python's own time),
what is the variant's own (the prediction is wrong of it), and noise. Each of the first two is a
mean of what was measured, weighted by how exactly it was and by how near its scale is, and drawn to
zero by what is expected of it (the normal-normal model; Gelman et al., Bayesian Data Analysis, 3rd
edition, section 5.4). So little is made of a single measurement, a variant that never ran is as far
off as those that did, and what was seen at one length tells less of another the further it lies.

A ratio that changes at once, by more than ``JUMP``, is a change of that variant and not of the
machine: what is in common is learned from the others and from before. So when a collective becomes
slow the planner tries what does without it, and then knows.

A ``scale`` is that of ``corrections.scale_of``; a ``key`` is a kind of block and a variant of it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

Key = tuple[Hashable, str]
"""A kind of block (``Planner.kinds``) and a variant of it."""

COMMON = 0.22
"""Standard deviation, of logarithms, of what all variants have in common."""
OWN_OF_PROFILE, OWN_OF_PRIOR = 0.07, 0.35
"""Of what is a variant's own: the errors of predictions from measurements (7 % in the median,
``benchmarks/results/cost_error.md``), and of the analytic prior's."""
NOISE = 0.15
"""Of one measurement: the median of a few steps, the slowest rank's."""
COMMON_REACH, OWN_REACH = 2.0, 1.0
"""Scales after which ``COMMON_NEAR`` and ``OWN_NEAR`` are a third as much."""
COMMON_NEAR, OWN_NEAR = 0.2, 0.5
"""Share of what is known of one scale that says nothing of scales far from it."""
JUMP = 0.5
"""No noise but a change, if it is seen twice."""
MEMORY = 16
"""Measurements that count, of a variant at a scale."""
DIGITS = 6
"""Of an estimate: ranks with other processors may round it differently."""


@dataclass(frozen=True)
class _Mean:
    """Of the last ``MEMORY`` measurements, about."""

    value: float
    count: int = 1

    def plus(self, latest: float) -> _Mean:
        count = min(self.count + 1, MEMORY)
        return _Mean(self.value + (latest - self.value) / count, count)

    def precision(self, more: float = 0.0) -> float:
        """One over the variance: of the noise, and ``more``."""
        return 1 / (NOISE**2 / self.count + more)


@dataclass(frozen=True)
class _Cell:
    """One variant at one scale, logarithms."""

    now: _Mean
    steady: _Mean
    """Without what has changed at once."""
    jumped: bool = False
    """The last measurement was far from those before."""

    def plus(self, latest: float) -> _Cell:
        jumps = abs(latest - self.now.value) > JUMP
        twice = jumps and self.jumped  # no accident
        now = _Mean(latest, MEMORY // 2) if twice else self.now.plus(latest)
        near = abs(latest - self.steady.value) <= JUMP
        return _Cell(now, self.steady.plus(latest) if near else self.steady, jumps)


_Cells = Mapping[tuple[str, int], _Cell]
"""(Variant, scale) -> what was measured."""


def _alike(scale: int, other: int, near: float, reach: float) -> float:
    """How much one scale tells of another: 0 to 1."""
    return 1 - near + near * math.exp(-abs(scale - other) / reach)


def _common(cells: _Cells, scale: int, own: float) -> float:
    """What all variants have in common."""
    total, weights = 0.0, COMMON**-2
    for (_, at), cell in cells.items():
        weight = _alike(scale, at, COMMON_NEAR, COMMON_REACH) * cell.steady.precision(own**2)
        total, weights = total + weight * cell.steady.value, weights + weight
    return total / weights


@dataclass(frozen=True)
class Ratios:
    """The estimates for all kinds of blocks; a kind that was not measured is as predicted."""

    of_kind: Mapping[Hashable, _Cells] = field(default_factory=dict)
    own: float = OWN_OF_PRIOR
    """Standard deviation of what is a variant's own."""
    _known: dict[tuple[Key, int], float] = field(default_factory=dict, compare=False)

    def scales(self, key: Key) -> set[int]:
        """Where this very variant was measured."""
        return {scale for v, scale in self.of_kind.get(key[0], {}) if v == key[1]}

    def knows(self, key: Key) -> bool:
        """Whether this very variant was measured."""
        return bool(self.scales(key))

    def ratio(self, key: Key, scale: int) -> float:
        """Expected measured over predicted seconds."""
        if (key, scale) not in self._known:
            self._known[key, scale] = round(math.exp(self._log(key, scale)), DIGITS)
        return self._known[key, scale]

    def _log(self, key: Key, scale: int) -> float:
        cells, total, weights = self.of_kind.get(key[0], {}), 0.0, self.own**-2
        for (variant, at), cell in cells.items():
            if variant == key[1]:
                weight = _alike(scale, at, OWN_NEAR, OWN_REACH) * cell.now.precision()
                total += weight * (cell.now.value - _common(cells, at, self.own))
                weights += weight
        return _common(cells, scale, self.own) + total / weights


class TimeRatios:
    """Collects what was measured.

    Args:
        own: how far off predictions of one variant are: ``OWN_OF_PROFILE`` or ``OWN_OF_PRIOR``.
    """

    def __init__(self, own: float) -> None:
        self._own = own
        self._cells: dict[Hashable, dict[tuple[str, int], _Cell]] = {}

    def add(self, key: Key, scale: int, ratio: float) -> None:
        """One measurement: ``ratio`` is measured over predicted seconds, above 0."""
        kind, variant = key
        cells, log = self._cells.setdefault(kind, {}), math.log(ratio)
        cell = cells.get((variant, scale))
        cells[variant, scale] = cell.plus(log) if cell else _Cell(_Mean(log), _Mean(log))

    @property
    def empty(self) -> bool:
        """Whether nothing was measured."""
        return not self._cells

    def estimate(self) -> Ratios:
        """From all that was measured so far."""
        return Ratios({kind: dict(cells) for kind, cells in self._cells.items()}, self._own)
