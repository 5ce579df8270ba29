"""Curves through measurements: what a strategy takes at workloads that were not measured.

After ParaDySe (arXiv 2511.13198): within the profiled range a random forest of 50 trees of depth
10, beyond it a polynomial of degree 1 to 3 in the length, chosen by Akaike's criterion. A forest is
a step function, which between the lengths of a grid that doubles is off by up to a third. So
``hybrid``, the default, deviates; ``forest`` and ``polynomial`` are the published forms alone:

- Within the range the forest is of the logarithm of measured over polynomial: it corrects what is
  smooth already.
- The polynomial is also held, weakly, to the analytic prior's growth beyond the range. Where
  constant and linear terms outweigh the quadratic one at all measured lengths, noise hides it, and
  yet it rules beyond them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

HYBRID, FOREST, POLYNOMIAL = "hybrid", "forest", "polynomial"
ESTIMATOR_NAMES = (HYBRID, FOREST, POLYNOMIAL)

NUM_TREES, MAX_DEPTH = 50, 10
"""Of a forest, as published."""

DEGREES = (1, 2, 3)
"""Of a polynomial, as published."""

MIN_POINTS = 3
"""Measurements that a curve needs: two for the least polynomial, and one to judge it by."""

NOISE_FLOOR = 1e-3
"""Relative error below which one polynomial is not better than another, and none is corrected."""

GUESS_WEIGHT = 0.4
"""Of the prior's growth to four times the range, where a measurement's weight is 1: it is believed
to 12 % where those are good to 5 %. On a Llama's blocks on two CPU ranks, up to 4,096 tokens
(``benchmarks/cost_error.py``; processor time), predictions beyond 512, 724 and 1,024 tokens are off
by 7, 5 and 3 % (median), 15, 19 and 24 % (90th percentile); without it by 21, 8 and 7 %, and 49, 52
and 22 %."""

Point = tuple[int, int]
"""Batch and length."""

Growth = Callable[[Point, Point], float]
"""How much larger a quantity is at the second point than at the first."""


@dataclass(frozen=True)
class Polynomial:
    """``sum_k c_k b s^k`` with ``c_k >= 0``, the constant without the batch ``b``: never negative,
    and never less for a longer length ``s``.
    """

    coefficients: tuple[float, ...]
    """Of ``(s / scale) ** k``."""
    scale: float

    def __call__(self, batch: int, seq_len: int) -> float:
        x, total = seq_len / self.scale, 0.0
        for c in reversed(self.coefficients[1:]):
            total = (total + c) * x
        return self.coefficients[0] + batch * total


def fit_polynomial(
    points: Sequence[Point],
    values: Sequence[float],
    guess: tuple[Point, float] | None = None,
    degrees: Sequence[int] = DEGREES,
) -> Polynomial:
    """The polynomial of least relative squared error whose degree Akaike's criterion prefers.

    Akaike's criterion is ``n log(mean squared error) + 2 k`` for n values and k coefficients.

    Args:
        points: where ``values``, positive, were measured; at least ``MIN_POINTS``.
        guess: a point and a value there that is only believed with ``GUESS_WEIGHT``.
        degrees: to choose from, in rising order.
    """
    at = np.array([*points, guess[0]] if guess else points, dtype=np.float64)
    target = np.array([*values, guess[1]] if guess else values, dtype=np.float64)
    weights = np.ones(len(at))
    if guess:
        weights[-1] = GUESS_WEIGHT
    scale = float(at[:, 1].max())
    best: tuple[float, np.ndarray] | None = None
    for degree in degrees:
        k, n = degree + 1, len(at)
        if n <= k and best is not None:
            break
        powers = [at[:, 0] * (at[:, 1] / scale) ** i for i in range(1, k)]
        columns = np.stack([np.ones(n), *powers], axis=1) * (weights / target)[:, None]
        coefficients, error = _nonnegative(columns, weights)
        criterion = n * math.log(max(error / n, NOISE_FLOOR**2)) + 2 * k
        if best is None or criterion < best[0]:
            best = criterion, coefficients
    assert best is not None
    return Polynomial(tuple(best[1].tolist()), scale)


def _nonnegative(columns: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, float]:
    """Least squares with coefficients >= 0, and its squared error: the best of all free subsets."""
    n, best = columns.shape[1], (np.zeros(columns.shape[1]), float(target @ target))
    for size in range(1, n + 1):
        for free in itertools.combinations(range(n), size):
            some = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
            rest = columns[:, free] @ some - target
            if (some >= 0).all() and float(rest @ rest) < best[1]:
                best = np.zeros(n), float(rest @ rest)
                best[0][list(free)] = some
    return best


@dataclass(frozen=True)
class Forest:
    """A random forest over the logarithms of batch and length, its trees as plain lists.

    Asked for one point, these answer in 20 us where scikit-learn takes 2 ms.
    """

    trees: tuple[tuple[list[int], list[float], list[int], list[int], list[float]], ...]
    """Of every node: the feature that is compared, with what, the node below for less or equal,
    that for more, and the value; the feature of a leaf is negative."""

    def __call__(self, batch: int, seq_len: int) -> float:
        x, total = (math.log(batch), math.log(seq_len)), 0.0
        for feature, threshold, less, more, value in self.trees:
            node = 0
            while feature[node] >= 0:
                node = less[node] if x[feature[node]] <= threshold[node] else more[node]
            total += value[node]
        return total / len(self.trees)


def fit_forest(points: Sequence[Point], values: Sequence[float]) -> Forest:
    """The published forest; equal measurements give an equal forest on every rank."""
    from sklearn.ensemble import RandomForestRegressor

    forest = RandomForestRegressor(n_estimators=NUM_TREES, max_depth=MAX_DEPTH, random_state=0)
    forest.fit(np.log(np.array(points, dtype=np.float64)), np.array(values))
    grown = [e.tree_ for e in forest.estimators_]
    return Forest(
        tuple(
            (
                t.feature.tolist(),
                t.threshold.tolist(),
                t.children_left.tolist(),
                t.children_right.tolist(),
                t.value[:, 0, 0].tolist(),
            )
            for t in grown
        )
    )


class Curve:
    """One quantity of one strategy: measured at some points, predicted at all.

    Args:
        measured: value at every measured point, at least ``MIN_POINTS`` of them; not negative.
        estimator: one of ``ESTIMATOR_NAMES``.
        growth: roughly how much larger the quantity is at the second point than at the first;
            None: not known.
        degrees: of the polynomial, to choose from.
    """

    def __init__(
        self,
        measured: dict[Point, float],
        estimator: str,
        growth: Growth | None = None,
        degrees: Sequence[int] = DEGREES,
    ) -> None:
        self.measured, self.estimator = measured, estimator
        self._nothing = not any(measured.values())
        if self._nothing:
            return
        points = sorted(measured)
        values = [max(measured[p], 1e-9) for p in points]  # relative errors of 0 mean nothing
        if estimator == FOREST:
            self._forest: Forest | None = fit_forest(points, values)
            return
        self._polynomial = fit_polynomial(points, values, None, degrees)
        exact = all(abs(self._polynomial(*p) / v - 1) < NOISE_FLOOR for p, v in zip(points, values))
        if estimator == HYBRID and growth is not None and not exact:
            longest = max(points, key=lambda p: (p[1], p[0]))
            beyond = (longest[0], 4 * longest[1])
            guess = beyond, max(measured[longest], 1e-9) * growth(longest, beyond)
            self._polynomial = fit_polynomial(points, values, guess, degrees)
        self._forest = None
        ratios = [math.log(v / self._polynomial(*p)) for p, v in zip(points, values)]
        if estimator == HYBRID and max(map(abs, ratios)) > NOISE_FLOOR:
            self._forest = fit_forest(points, ratios)

    def __call__(self, batch: int, seq_len: int) -> tuple[float, str]:
        """The prediction, and whether a forest or a polynomial made it."""
        inside = self.covers(batch, seq_len)
        source = FOREST if self.estimator == FOREST or inside else POLYNOMIAL
        if self.estimator == POLYNOMIAL:
            source = POLYNOMIAL
        if self._nothing:
            return 0.0, source
        if self.estimator == FOREST:
            assert self._forest is not None
            return self._forest(batch, seq_len), source
        value = self._polynomial(batch, seq_len)
        if inside:
            return value * math.exp(self._forest(batch, seq_len) if self._forest else 0.0), source
        smaller = (v for (b, s), v in self.measured.items() if b <= batch and s <= seq_len)
        return max(value, max(smaller, default=0.0)), source

    def covers(self, batch: int, seq_len: int) -> bool:
        """Whether some measurement is at most as large in both, and some other at least."""
        return any(b <= batch and s <= seq_len for b, s in self.measured) and any(
            b >= batch and s >= seq_len for b, s in self.measured
        )
