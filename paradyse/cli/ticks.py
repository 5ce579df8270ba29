"""Ticks of logarithmic axes, at numbers that people know, with their units."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from paradyse.planning.units import format_seconds

Ticks = list[tuple[float, str]]
"""Values and their texts, from the least on."""

BYTES = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40, "PiB": 50}
"""Unit -> the power of two that it is."""
TOKENS = "tokens"
SECONDS = "s"
FEW, MANY = 7, 24
"""Ticks of an axis; the latter where those without room are left out when drawn."""


def ticks_of(unit: str, low: float, high: float, most: int = FEW) -> Ticks:
    """Ticks between ``low`` and ``high``, both above 0.

    Args:
        unit: "s", "tokens" or one of ``BYTES``, which values are in.
        most: as many ticks at most.
    """
    ladders, base = (_seconds(), 10) if unit == SECONDS else (_doubled(low, high), 2)
    found: list[float] = []
    for ladder in ladders:
        inside = sorted({t for t in ladder if low <= t <= high})
        if len(inside) > most:
            break
        found = inside
    if len(found) < 3:
        found = _even(low, high, base)
    return [(t, text_of(unit, t)) for t in found]


def text_of(unit: str, value: float) -> str:
    """``value``, which is in ``unit``, for people; units as in ``ticks_of``."""
    if unit == SECONDS:
        whole = ((3600, "h"), (60, "min")) if value % 60 == 0 else ()
        units = [f"{value / s:,.0f} {name}" for s, name in whole if value and value % s == 0]
        return units[0] if units else format_seconds(value)
    if unit == TOKENS:
        return _tokens(value)
    power = BYTES[unit]
    names: dict[int, str] = {p: name for name, p in BYTES.items()}
    while value and abs(value) < 1 and power > 0:
        value, power = value * 1024, power - 10
    while abs(value) >= 1024 and power < max(names):
        value, power = value / 1024, power + 10
    return f"{value:.3g} {names[power]}" if value < 999.5 else f"{value:.0f} {names[power]}"


def _tokens(n: float) -> str:
    """``4K`` is 4,096."""
    for power, letter in ((20, "M"), (10, "K")):
        if n >= 2**power and n * 64 % 2**power == 0:
            return f"{n / 2**power:g}{letter}"
    return f"{n:,.0f}"


def _seconds() -> Iterable[Sequence[float]]:
    """Coarse to fine; beyond a minute by minutes, beyond an hour by hours."""
    decades = [10.0**k for k in range(-9, 2)] + [60.0, 600.0] + [3600 * 10.0**k for k in range(6)]
    yield decades[::3]
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 6, 8)):
        yield [
            d * step
            for d, after in zip(decades, [*decades[1:], math.inf])
            for step in steps
            if d * step * 1.15 < after or step == 1
        ]


def _doubled(low: float, high: float) -> Iterable[Sequence[float]]:
    """Powers of two: every eighth, fourth, second, all; then some between them."""
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    for stride in (8, 4, 2, 1):
        yield [2.0**k for k in range(first, last + 1) if k % stride == 0]
    yield [2.0**k * step for k in range(first, last + 1) for step in (1, 1.5)]


def _even(low: float, high: float, base: int) -> list[float]:
    """Some four, at even steps, for a short axis."""
    rough = (high - low) / 4 or low
    step = float(base) ** math.floor(math.log(rough, base))
    widths: tuple[int, ...] = (1, 2, 5, 10) if base == 10 else (1, 2)
    step *= min(widths, key=lambda w: abs(math.log(step * w / rough)))
    first = math.ceil(low / step)
    return [k * step for k in range(first, math.floor(high / step) + 1)] or [low, high]


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near ``wanted`` (pixels, in any order) that are ``gap`` apart, from ``low`` to
    ``high`` as far as there is room; in the same order."""
    if not wanted:
        return []
    from sklearn.isotonic import isotonic_regression

    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    gap = min(gap, (high - low) / max(1, len(order) - 1))
    # apart means that places less their share of gaps do not fall: the nearest such ones
    shares = [k * gap for k in range(len(order))]
    free = [wanted[i] - share for i, share in zip(order, shares)]
    found = isotonic_regression(free, y_min=low, y_max=max(low, high - shares[-1]))
    places = [float(place + share) for place, share in zip(found, shares)]
    return [place for _, place in sorted(zip(order, places))]
