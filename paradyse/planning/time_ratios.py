"""How much longer blocks take than was predicted, estimated from few and noisy measurements.

The logarithm of measured over predicted seconds, of a variant at a scale of lengths, is taken for a
sum: what all variants of the kind of block have in common (the machine's state, Python's own time),
what the prediction is wrong of, and noise. The first two are Gaussian processes over the scale. The
estimate is the mean that they have given the measurements (Rasmussen and Williams 2006, "Gaussian
Processes for Machine Learning", section 2.2): little is made of a single measurement, a variant
that never ran is as far off as those that did, and what was seen at one length tells less of
another the further it lies.

A prediction is wrong of the parts that it adds up (``TimeParts``), each weighted by its share of
the time, and a little of the variant as such. So variants that are made of the same parts are wrong
alike: where gathered weights hide less than was thought, ``megatron_cz`` is slower than predicted,
``metp``, which never ran, will be too, and ``megatron_ts``, which gathers none, will not. And most
of what is a variant's own is that of others that do the same and more: of its strategy with levers
or beside other strategies, of ``metp`` that of ``megatron_cz``. Beside other strategies all
variants are wrong by something more, as each adds up what it takes among its like.

A ratio that changes at once, by more than ``JUMP``, is a change of that variant and not of the
machine: what is shared is learned from the others and from before. So when a collective becomes
slow the planner tries what does without it, and then knows.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from paradyse.planning.costs import TimeParts
from paradyse.types import Point

Key = tuple[Hashable, str]
"""A kind of block (``Planner.kinds``) and a variant of it."""

MIXED = "+mixed"
"""Ends, as a lever's name would, the variant in the key of a block in a plan of several strategies:
times are known by it (``steady``)."""

COMMON, COMMON_OF_SCALE = 0.2, 0.1
"""Standard deviations, of logarithms: of what all variants have in common, at all scales and at
one alone."""


MIXING = 0.1
"""The same of what all variants beside other strategies have in common, at all scales, and at one
alone as much again. Plans of attention by one strategy and MLPs by another, that were predicted to
be a twentieth faster than the best strategy for all, took 4 to 13 % more than that on two ranks
with links like NVLink, all messages of weights being sent at once (``distributed/held.py``)."""


class Errors(NamedTuple):
    """Standard deviations of what predictions are wrong of, at all scales, and at one alone as much
    again."""

    own: float
    """Of a variant as such."""
    parts: TimeParts = TimeParts()
    """Of each part of the time."""
    noise: float = 0.15
    """Of one measurement: the median of a few steps of a run, the slowest rank's."""


OF_PROFILE = Errors(0.05)
"""Of predictions from measurements."""
OF_PRIOR = Errors(0.1, TimeParts(0.15, 0.25, 0.4, 0.3, 0.5))
"""Of the analytic prior's: rates of arithmetic are measured on the machine, how much of a message
hides behind it is known least."""
OF_PRIOR_IN_PROFILE = Errors(*OF_PRIOR[:2], noise=0.05)
"""The same where a profile tells of it: its steps take turns, and nothing else runs."""
COMMON_REACH, OWN_REACH = 2.0, 1.0
"""Scales after which what is known of one tells a third as much of another."""
MORE_OF = {"metp": "megatron_cz"}
"""Strategy -> that whose work it does in smaller parts, and some of it once more."""
OWN_OF_RELATED = 0.8
"""Correlation of what is one variant's own with that of another which does the same and more."""
JUMP = 0.5
"""No noise but a change."""
MEMORY = 16
"""Measurements that count, of a variant at a scale."""
DIGITS, SHARE_DIGITS = 6, 2
"""Of an estimate: ranks with other processors may round it differently; and of a share of time."""

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
    shares: Array
    """Of each part, in the predicted time."""
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


def _shares(parts: TimeParts) -> Array:
    """Of each of ``parts`` in their sum."""
    of = np.array(parts)
    return np.round(of / (of.sum() or 1.0), SHARE_DIGITS)


@cache
def _strategy(variant: str) -> str:
    """What the ``variant`` does, or does more than."""
    strategy = Point.parse(variant).strategy
    return MORE_OF.get(strategy, strategy)


class _At(NamedTuple):
    """Variants at scales, one per row."""

    variants: Array
    strategies: Array
    """``_strategy`` of each."""
    scales: Array
    shares: Array
    """[rows, parts]"""

    @property
    def mixed(self) -> Array:
        """Which of the rows are of variants beside other strategies."""
        return np.char.endswith(self.variants, MIXED)


def _own(errors: Errors, a: _At, b: _At) -> Array:
    """Covariance of what predictions of ``a`` and of ``b`` are wrong of as the variants that they
    are: [rows of a, rows of b]."""
    same = a.variants[:, None] == b.variants[None, :]
    related = a.strategies[:, None] == b.strategies[None, :]
    same = np.where(same, 1.0, OWN_OF_RELATED * related)
    return same * errors.own**2 * (1 + _alike(a.scales, b.scales, OWN_REACH))


def _shared(errors: Errors, a: _At, b: _At) -> Array:
    """The same of what all variants have in common, or those that are made of the same parts or
    beside other strategies."""
    of_parts = (a.shares * np.array(errors.parts) ** 2) @ b.shares.T
    of_parts *= 1 + _alike(a.scales, b.scales, OWN_REACH)
    common = COMMON**2 + COMMON_OF_SCALE**2 * _alike(a.scales, b.scales, COMMON_REACH)
    mixed = a.mixed[:, None] & b.mixed[None, :]
    of_mixing = mixed * MIXING**2 * (1 + _alike(a.scales, b.scales, OWN_REACH))
    return common + of_parts + of_mixing


class KindRatios:
    """The estimate for one kind of block.

    Args:
        cells: (variant, scale) -> what was measured.
        errors: of predictions.
    """

    def __init__(self, cells: Mapping[tuple[str, int], _Cell], errors: Errors) -> None:
        self.variants = [v for v, _ in cells]
        """Of each cell, as ``scales``."""
        self.scales = scales = np.array([float(s) for _, s in cells])
        self._errors = errors
        shares = np.array([c.shares for c in cells.values()]).reshape(-1, len(TimeParts()))
        strategies = np.array([_strategy(v) for v in self.variants], dtype=str)
        self._cells = _At(np.array(self.variants, dtype=str), strategies, scales, shares)
        self._known = cache(self._ratio)
        own, shared = (of(errors, self._cells, self._cells) for of in (_own, _shared))
        steady, now = ([getattr(c, what) for c in cells.values()] for what in ("steady", "now"))

        def noisy(covariance: Array, means: Iterable[_Mean]) -> Array:
            return covariance + np.diag([errors.noise**2 / m.count for m in means])

        def solve(covariance: Array, values: Array, means: Iterable[_Mean]) -> Array:
            return np.asarray(np.linalg.solve(noisy(covariance, means), values))

        values = np.array([m.value for m in steady])
        self._shared_weights = solve(shared + own, values, steady)
        left = np.array([m.value for m in now]) - shared @ self._shared_weights
        self._own_weights = solve(own, left, now)
        self._covariance = noisy(shared + own, now)

    def ratio(self, variant: str, scale: int, parts: TimeParts | None = None) -> float:
        """Expected measured over predicted seconds of ``variant`` at ``scale``.

        Args:
            parts: of the predicted time; None: as where the variant was measured nearest.
        """
        if parts is not None:
            return self._known(variant, scale, tuple(_shares(parts).tolist()))
        rows = [i for i, v in enumerate(self.variants) if v == variant]
        near = min(rows, key=lambda i: abs(self.scales[i] - scale), default=None)
        known = self._cells.shares[near] if near is not None else _shares(TimeParts())
        return self._known(variant, scale, tuple(known.tolist()))

    def _ratio(self, variant: str, scale: int, shares: tuple[float, ...]) -> float:
        names = np.array([variant]), np.array([_strategy(variant)])
        at = _At(*names, np.array([float(scale)]), np.array([shares]))
        log = _shared(self._errors, at, self._cells) @ self._shared_weights
        log += _own(self._errors, at, self._cells) @ self._own_weights
        return round(math.exp(float(log[0])), DIGITS)

    def deviation(self, scale: int, of: Mapping[str, TimeParts]) -> Array:
        """Standard deviations, at ``scale``, of what is not yet known of one variant's logarithm
        less another's (Rasmussen and Williams 2006, eq. 2.26).

        Args:
            of: variant -> parts of its predicted time there.
        Returns:
            [number of variants, the same], in their order.
        """
        names = np.array([*of], dtype=str), np.array([*map(_strategy, of)], dtype=str)
        shares = np.array([_shares(parts) for parts in of.values()])
        at = _At(*names, np.full(len(of), float(scale)), shares)

        def covariance(a: _At, b: _At) -> Array:
            return _shared(self._errors, a, b) + _own(self._errors, a, b)

        known = covariance(self._cells, at)
        left = covariance(at, at) - known.T @ np.linalg.solve(self._covariance, known)
        of_each = np.diag(left)
        return np.sqrt(np.maximum(0.0, of_each[:, None] + of_each[None, :] - 2 * left))


@dataclass(frozen=True)
class Ratios:
    """The estimates for all kinds of blocks; a kind that was not measured is as predicted."""

    of_kind: Mapping[Hashable, KindRatios] = field(default_factory=dict)

    def knows(self, key: Key) -> bool:
        """Whether the variant of ``key`` was measured."""
        kind = self.of_kind.get(key[0])
        return kind is not None and key[1] in kind.variants

    def knows_mixed(self, kind: Hashable) -> bool:
        """Whether any variant of ``kind`` was measured beside other strategies."""
        found = self.of_kind.get(kind)
        return found is not None and any(v.endswith(MIXED) for v in found.variants)

    def ratio(self, key: Key, scale: int, parts: TimeParts | None = None) -> float:
        """Expected measured over predicted seconds of ``key`` at ``scale``; ``parts`` as of
        ``KindRatios.ratio``."""
        kind = self.of_kind.get(key[0])
        return 1.0 if kind is None else kind.ratio(key[1], scale, parts)


class TimeRatios:
    """Collects what was measured.

    Args:
        errors: of predictions: ``OF_PROFILE`` or ``OF_PRIOR``.
    """

    def __init__(self, errors: Errors) -> None:
        self._errors = errors
        self._cells: dict[Hashable, dict[tuple[str, int], _Cell]] = {}

    def add(self, key: Key, scale: int, ratio: float, parts: TimeParts) -> None:
        """One measurement of ``key`` at ``scale``: ``ratio`` is measured over predicted seconds,
        above 0, ``parts`` what these are made of."""
        kind, variant = key
        cells, log = self._cells.setdefault(kind, {}), math.log(ratio)
        if (cell := cells.get((variant, scale))) is None:
            cells[variant, scale] = _Cell(_Mean(log), _Mean(log), _shares(parts))
        else:
            cell.add(log)

    @property
    def empty(self) -> bool:
        """Whether nothing was measured."""
        return not self._cells

    def kind(self, kind: Hashable) -> KindRatios:
        """Of one ``kind`` of block, from all that was measured so far, if only of others."""
        return KindRatios(self._cells.get(kind, {}), self._errors)

    def estimate(self) -> Ratios:
        """From all that was measured so far."""
        return Ratios({kind: self.kind(kind) for kind in self._cells})
