"""How much longer blocks take than was predicted, estimated from few and noisy measurements.

The logarithm of measured over predicted seconds, of a variant at a scale of lengths, is taken for a
sum: what all variants of the kind of block have in common (the machine's state, Python's own time),
what is the variant's own (the prediction is wrong of it), and noise. The first two are Gaussian
processes over the scale. The estimate is the mean that they have given the measurements (Rasmussen
and Williams 2006, "Gaussian Processes for Machine Learning", section 2.2): little is made of a
single measurement, a variant that never ran is as far off as those that did, and what was seen at
one length tells less of another the further it lies.

A ratio that changes at once, by more than ``JUMP``, is a change of that variant and not of the
machine: what is in common is learned from the others and from before. So when a collective becomes
slow the planner tries what does without it, and then knows.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np

Key = tuple[Hashable, str]
"""A kind of block (``Planner.kinds``) and a variant of it."""

COMMON, COMMON_OF_SCALE = 0.2, 0.1
"""Standard deviations, of logarithms: of what all variants have in common, at all scales and at
one alone."""
OWN_OF_PROFILE, OWN_OF_PRIOR = 0.05, 0.25
"""Of what is a variant's own, at all scales, and at one alone as much again: the errors of
predictions from measurements, and of the analytic prior's."""
NOISE = 0.15
"""Of one measurement: the median of a few steps, the slowest rank's."""
COMMON_REACH, OWN_REACH = 2.0, 1.0
"""Scales after which what is known of one tells a third as much of another."""
JUMP = 0.5
"""No noise but a change."""
MEMORY = 16
"""Measurements that count, of a variant at a scale."""
DIGITS = 6
"""Of an estimate: ranks with other processors may round it differently."""

Array = np.ndarray


@dataclass
class _Mean:
    """Of the last ``MEMORY`` measurements, about; the latest counts the more the fewer they are."""

    value: float
    count: int = 1

    def add(self, latest: float) -> None:
        self.count = min(self.count + 1, MEMORY)
        self.value += (latest - self.value) / self.count


@dataclass
class _Cell:
    """One variant at one scale, logarithms."""

    now: _Mean
    steady: _Mean
    """Without what has changed at once."""
    jumped: bool = False
    """The last measurement was far from those before."""

    def add(self, latest: float) -> None:
        jumps = abs(latest - self.now.value) > JUMP
        if jumps and self.jumped:  # twice: no accident
            self.now = _Mean(latest, MEMORY // 2)
        else:
            if jumps:
                self.now.count = 1
            self.now.add(latest)
        self.jumped = jumps
        if abs(latest - self.steady.value) <= JUMP:
            self.steady.add(latest)


def _alike(scales: Array, others: Array, reach: float) -> Array:
    """How much one scale tells of another: [number of scales, number of others], 0 to 1."""
    return np.exp(-np.abs(scales[:, None] - others[None, :]) / reach)


def _common(scales: Array, others: Array) -> Array:
    """Covariance of what is in common, between scales."""
    return COMMON**2 + COMMON_OF_SCALE**2 * _alike(scales, others, COMMON_REACH)


def _own(deviation: float, scales: Array, others: Array) -> Array:
    """Covariance of what is one variant's own, between scales."""
    return deviation**2 * (1 + _alike(scales, others, OWN_REACH))


class KindRatios:
    """The estimate for one kind of block.

    Args:
        cells: (variant, scale) -> what was measured.
        own: standard deviation of what is a variant's own.
    """

    def __init__(self, cells: Mapping[tuple[str, int], _Cell], own: float) -> None:
        self.variants = [v for v, _ in cells]
        """Of each cell, as ``scales``."""
        self.scales = scales = np.array([float(s) for _, s in cells])
        self._own = own
        self.ratio = cache(self._ratio)
        """Expected measured over predicted seconds of a variant at a scale."""
        same = np.array([[a == b for b in self.variants] for a in self.variants])
        of_own, common = same * _own(own, scales, scales), _common(scales, scales)
        steady, now = ([getattr(c, what) for c in cells.values()] for what in ("steady", "now"))

        def solve(covariance: Array, values: Array, means: Iterable[_Mean]) -> Array:
            noise = np.diag([NOISE**2 / m.count for m in means])
            return np.asarray(np.linalg.solve(covariance + noise, values))

        self._common_weights = solve(common + of_own, np.array([m.value for m in steady]), steady)
        left = np.array([m.value for m in now]) - common @ self._common_weights
        self._own_weights = solve(of_own, left, now)

    def _ratio(self, variant: str, scale: int) -> float:
        at = np.array([float(scale)])
        mine = np.array([v == variant for v in self.variants])
        log = _common(at, self.scales) @ self._common_weights
        log += (mine * _own(self._own, at, self.scales)) @ self._own_weights
        return round(math.exp(float(log[0])), DIGITS)


@dataclass(frozen=True)
class Ratios:
    """The estimates for all kinds of blocks; a kind that was not measured is as predicted."""

    of_kind: Mapping[Hashable, KindRatios] = field(default_factory=dict)

    def knows(self, key: Key) -> bool:
        """Whether the variant of ``key`` was measured."""
        kind = self.of_kind.get(key[0])
        return kind is not None and key[1] in kind.variants

    def ratio(self, key: Key, scale: int) -> float:
        """Expected measured over predicted seconds of ``key`` at ``scale``."""
        return self.of_kind[key[0]].ratio(key[1], scale) if key[0] in self.of_kind else 1.0


class TimeRatios:
    """Collects what was measured.

    Args:
        own: how far off predictions of one variant are: ``OWN_OF_PROFILE`` or ``OWN_OF_PRIOR``.
    """

    def __init__(self, own: float) -> None:
        self._own = own
        self._cells: dict[Hashable, dict[tuple[str, int], _Cell]] = {}

    def add(self, key: Key, scale: int, ratio: float) -> None:
        """One measurement of ``key`` at ``scale``: ``ratio`` is measured over predicted seconds,
        above 0."""
        kind, variant = key
        cells, log = self._cells.setdefault(kind, {}), math.log(ratio)
        if (cell := cells.get((variant, scale))) is None:
            cells[variant, scale] = _Cell(_Mean(log), _Mean(log))
        else:
            cell.add(log)

    @property
    def empty(self) -> bool:
        """Whether nothing was measured."""
        return not self._cells

    def estimate(self) -> Ratios:
        """From all that was measured so far."""
        return Ratios({kind: KindRatios(cells, self._own) for kind, cells in self._cells.items()})
