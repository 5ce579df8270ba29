"""Curves through measurements: what a strategy takes at workloads that were not measured.

After ParaDySe (arXiv 2511.13198): within the profiled range a random forest of 50 trees of depth
10, beyond it a polynomial of degree 1 to 3 in the length, chosen by Akaike's criterion. A forest is
a step function, which between the lengths of a grid that doubles is off by up to a third. So, other
than published:

- The forest is of the logarithm of measured over polynomial: it corrects what is smooth already.
- Bytes have no noise to average: between measurements their correction is interpolated. Beyond the
  range no polynomial through all of them helps, as short lengths obey other laws: a sequence of one
  tile, a tensor too small to be moved. The last measurements say which law holds (``last_law``),
  or, where they show none, the prior's growth does.
- The polynomial is also held, weakly, to the analytic prior's growth beyond the range. Where
  constant and linear terms outweigh the quadratic one at all measured lengths, noise hides it, and
  yet it rules beyond them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

FOREST, POLYNOMIAL = "forest", "polynomial"
"""What made a prediction of a time: within the range both, beyond it the polynomial alone."""

NUM_TREES, MAX_DEPTH = 50, 10
"""Of a forest, as published."""

DEGREES = (1, 2, 3)
"""Of a polynomial, as published."""

MIN_POINTS = 3
"""Measurements that a curve needs: two for the least polynomial, and one to judge it by."""

NOISE_FLOOR = 1e-3
"""Relative error below which one polynomial is not better than another, and none is corrected."""

GUESS_WEIGHT, GUESS_REACH = 0.4, 4
"""Of the prior's growth to four times the range, where a measurement's weight is 1: it is believed
to 12 % where those are good to 5 %. On a Llama's blocks on two CPU ranks, up to 4,096 tokens
(``benchmarks/cost_error.py``; processor time), predictions beyond 512, 724 and 1,024 tokens are off
by 7, 5 and 3 % (median), 15, 19 and 24 % (90th percentile); without it by 21, 8 and 7 %, and 49, 52
and 22 %."""

At = tuple[int, int]
"""Batch and length."""

GrowthFactor = Callable[[At, At], float]
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
        constant, *others = self.coefficients
        x = seq_len / self.scale
        return constant + batch * sum(c * x**k for k, c in enumerate(others, 1))


def fit_polynomial(
    points: Sequence[At],
    values: Sequence[float],
    guess: tuple[At, float] | None = None,
    degrees: Sequence[int] = DEGREES,
) -> Polynomial:
    """The polynomial of least relative squared error whose degree Akaike's criterion prefers.

    Akaike's criterion is ``n log(mean squared error) + 2 k`` for n values and k coefficients.

    Args:
        points: where ``values``, positive, were measured; at least ``MIN_POINTS``.
        guess: a point and a value there that is only believed with ``GUESS_WEIGHT``.
        degrees: to choose from, in rising order.
    """
    from sklearn.linear_model import LinearRegression

    weights = np.ones(len(points) + (guess is not None))
    if guess is not None:
        points, values = [*points, guess[0]], [*values, guess[1]]
        weights[-1] = GUESS_WEIGHT
    batch, length = np.array(points, dtype=np.float64).T
    n, scale = len(points), float(length.max())
    fits: list[tuple[float, tuple[float, ...]]] = []
    for degree in degrees:
        k = degree + 1
        if n <= k and fits:
            break
        columns = np.vander(length / scale, k, increasing=True)
        columns[:, 1:] *= batch[:, None]
        columns *= (weights / np.array(values))[:, None]
        fit = LinearRegression(fit_intercept=False, positive=True).fit(columns, weights)
        error = float(np.square(columns @ fit.coef_ - weights).mean())
        criterion = n * math.log(max(error, NOISE_FLOOR**2)) + 2 * k
        fits.append((criterion, tuple(fit.coef_.tolist())))
    return Polynomial(min(fits)[1], scale)


def fit_forest(points: Sequence[At], values: Sequence[float]) -> Callable[[int, int], float]:
    """The published forest over the logarithms of batch and length, through ``values`` at
    ``points``; equal measurements give an equal forest on every rank.

    Returns:
        A look-up in the table of the forest's steps: it answers in a microsecond, where
        scikit-learn takes 2 ms.
    """
    from sklearn.ensemble import RandomForestRegressor

    forest = RandomForestRegressor(n_estimators=NUM_TREES, max_depth=MAX_DEPTH, random_state=0)
    forest.fit(np.log(np.array(points, dtype=np.float64)), np.array(values))
    trees = [e.tree_ for e in forest.estimators_]
    steps = [
        np.unique(np.concatenate([t.threshold[t.feature == i] for t in trees])) for i in (0, 1)
    ]
    cells = [
        np.convolve(np.pad(s, 1, constant_values=(-1, 99)), (0.5, 0.5), "valid") for s in steps
    ]
    grid = np.stack(np.meshgrid(*cells, indexing="ij"), axis=-1)
    # Below, between and above the steps: [steps of the batch + 1, steps of the length + 1].
    table = forest.predict(grid.reshape(-1, 2)).reshape(grid.shape[:2]).tolist()
    batches, lengths = (s.tolist() for s in steps)

    def value(batch: int, seq_len: int) -> float:
        row = table[bisect_left(batches, math.log(batch))]
        return float(row[bisect_left(lengths, math.log(seq_len))])

    return value


def interpolate(points: Sequence[At], values: Sequence[float]) -> Callable[[int, int], float]:
    """``values`` at ``points``, linear in the length between those of one batch, of the nearest
    beyond; of a batch that is not among the points, as of the one nearest to it."""
    lengths: dict[int, list[int]] = {}
    of_batch: dict[int, list[float]] = {}
    for (batch, seq_len), x in sorted(zip(points, values, strict=True)):
        lengths.setdefault(batch, []).append(seq_len)
        of_batch.setdefault(batch, []).append(x)

    def value(batch: int, seq_len: int) -> float:
        nearest = min(lengths, key=lambda b: abs(math.log(b / batch)))
        return float(np.interp(seq_len, lengths[nearest], of_batch[nearest]))

    return value


def last_law(
    lengths: Sequence[int], values: Sequence[float], most: int
) -> tuple[float, float, float] | None:
    """Constant, linear and square coefficient of the straight line through the last two of
    ``values``, or else of the parabola through the last three, where the value before those lies on
    it too; None: on neither.

    Args:
        lengths: rising.
        values: one per length, without noise.
        most: the highest degree that may be.
    """
    if len(lengths) < 3:
        return None
    (*others, a, b, c), (*_, u, v, w) = lengths, values
    slopes = (v - u) / (b - a), (w - v) / (c - b)
    bend = (slopes[1] - slopes[0]) / (c - a)
    if slopes[1] < 0 or most < 1:
        return None
    if abs(w + slopes[1] * (a - c) - u) <= NOISE_FLOOR * u:
        return w - slopes[1] * c, slopes[1], 0.0
    if not others or bend < 0 or most < 2:
        return None
    law = w - slopes[1] * c + bend * c * b, slopes[1] - bend * (b + c), bend
    before, known = others[-1], values[-4]
    held = abs(law[0] + law[1] * before + law[2] * before**2 - known) <= NOISE_FLOOR * known
    return law if held else None


class Beyond:
    """Bytes beyond all that was measured, by the last measurements of the nearest batch.

    Args:
        measured: as of ``Curve``, not all 0.
        growth: as of ``Curve``.
        most: the highest degree that a law may have.
    """

    def __init__(
        self, measured: Mapping[At, float], growth: GrowthFactor | None, most: int
    ) -> None:
        self._measured, self._growth = measured, growth
        self._lengths: dict[int, list[int]] = {}
        for batch, seq_len in sorted(measured):
            self._lengths.setdefault(batch, []).append(seq_len)
        self._laws = {
            b: last_law(lengths, [measured[b, s] for s in lengths], most)
            for b, lengths in self._lengths.items()
        }

    def __call__(self, batch: int, seq_len: int) -> float | None:
        """Bytes there; None where nothing says how they grow, or where tokens and length are no
        more than some that were measured."""
        nearest = min(self._lengths, key=lambda b: abs(math.log(b / batch)))
        last = nearest, self._lengths[nearest][-1]
        if seq_len <= last[1] and batch * seq_len <= last[0] * last[1]:
            return None
        law = self._laws[nearest]
        if law is not None:
            constant, linear, square = law
            return constant + batch / nearest * (linear * seq_len + square * seq_len**2)
        if self._growth is None:
            return None
        return self._measured[last] * self._growth(last, (batch, seq_len))


class Curve:
    """One quantity of one strategy: measured at some points, predicted at all.

    Args:
        measured: value at every measured point, at least ``MIN_POINTS`` of them; not negative.
        growth: roughly how much larger the quantity is at the second point than at the first;
            None: not known.
        degrees: of the polynomial, to choose from.
        exact: measurements are without noise, as bytes are, and the curve goes through them.
    """

    def __init__(
        self,
        measured: Mapping[At, float],
        growth: GrowthFactor | None = None,
        degrees: Sequence[int] = DEGREES,
        exact: bool = False,
    ) -> None:
        self.measured, self.exact = measured, exact
        self._polynomial = Polynomial((0.0,), 1.0)
        self._beyond: Callable[[int, int], float | None] = lambda batch, seq_len: None
        self._correction: Callable[[int, int], float] = lambda batch, seq_len: 0.0
        if not any(measured.values()):
            return
        points = sorted(measured)
        values = [max(measured[p], 1e-9) for p in points]  # relative errors of 0 mean nothing
        self._polynomial = fit_polynomial(points, values, None, degrees)
        if max(map(abs, self._logs(points, values))) > NOISE_FLOOR and growth is not None:
            batch, seq_len = longest = max(points, key=lambda p: (p[1], p[0]))
            beyond = batch, GUESS_REACH * seq_len
            guess = beyond, max(measured[longest], 1e-9) * growth(longest, beyond)
            self._polynomial = fit_polynomial(points, values, guess, degrees)
        if exact:
            self._beyond = Beyond(measured, growth, max(degrees))
        logs = self._logs(points, values)
        if max(map(abs, logs)) > NOISE_FLOOR:
            self._correction = (interpolate if exact else fit_forest)(points, logs)

    def _logs(self, points: Sequence[At], values: Sequence[float]) -> list[float]:
        """Logarithms of measured over polynomial."""
        return [math.log(v / self._polynomial(*p)) for p, v in zip(points, values)]

    def __call__(self, batch: int, seq_len: int) -> tuple[float, str]:
        """The prediction, and ``FOREST`` within the measurements or ``POLYNOMIAL`` beyond them."""
        value, covered = self._polynomial(batch, seq_len), self.covers(batch, seq_len)
        if covered or self.exact:
            value *= math.exp(self._correction(batch, seq_len))
        if covered:
            return value, FOREST
        further = self._beyond(batch, seq_len)
        value = value if further is None else further
        smaller = (v for (b, s), v in self.measured.items() if b <= batch and s <= seq_len)
        return max(value, max(smaller, default=0.0)), POLYNOMIAL

    def covers(self, batch: int, seq_len: int) -> bool:
        """Whether some measurement is at most as large in both ``batch`` and ``seq_len``, and some
        other at least."""
        return any(b <= batch and s <= seq_len for b, s in self.measured) and any(
            b >= batch and s >= seq_len for b, s in self.measured
        )
