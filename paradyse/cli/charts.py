"""Charts for people, as values: what is drawn, and in which colours (``drawing``, ``pages``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from paradyse.types import ATTENTION_STRATEGIES, LEVERS, REPLICATED

# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS = dict(
    zip(
        ATTENTION_STRATEGIES,
        ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#332288"),
        strict=True,
    )
)
COLOURS |= dict(zip(LEVERS, ("#999999", "#56b4e9", "#f0e442", "#666666", "#882255", "#44aa99")))
COLOURS |= {"no levers": "#a6761d", REPLICATED: "#117733"}
BLACK = "#000000"
"""Of what chooses among strategies; drawn thicker."""
OTHERS = tuple(COLOURS.values())
"""Of lines that are neither, in turn."""
ON_DARK = {
    BLACK: "#ffffff",
    "#0072b2": "#4aa3df",
    "#332288": "#9b8cf0",
    "#666666": "#bdbdbd",
    "#882255": "#d6679f",
    "#a6761d": "#c9973a",
    "#117733": "#4fb36f",
}
"""Colours that are too dark on a dark page -> what they are there."""


@dataclass(frozen=True)
class Line:
    """A curve; from the first point that does not fit on it is dashed."""

    name: str
    points: tuple[tuple[float, float, bool], ...]
    """(tokens, value, fits)."""

    def parts(self) -> tuple[Sequence[tuple[float, float, bool]], ...]:
        """The points that fit, and from the last of them the others."""
        points = self.points
        first = next((i for i, p in enumerate(points) if not p[2]), len(points))
        return points[:first], points[max(0, first - 1) :] if first < len(points) else ()


@dataclass(frozen=True)
class Chart:
    """Values against the length, both axes logarithmic."""

    title: str
    unit: str
    """Of values, as ``ticks.ticks_of`` takes it."""
    lines: tuple[Line, ...]
    limit: float | None = None
    """Drawn across; what is above it is shaded."""
    marks: tuple[tuple[float, float, str], ...] = ()
    """(tokens, value, text) of points to be pointed out."""
    fits_to: float | None = None
    """Tokens; what is beyond them is shaded. None: nothing."""
    note: str = ""
    """Below it, for people."""
    x_title: str = "tokens in a sequence"


@dataclass(frozen=True)
class Bands:
    """Per length the share of blocks that have each strategy, or each lever."""

    title: str
    lengths: tuple[int, ...]
    shares: tuple[Mapping[str, float], ...]
    of_one_whole: bool = True
    """Shares add up to one, or to nothing."""

    def names(self) -> list[str]:
        """What has a share, as ``COLOURS`` are listed."""
        used = {name for shares in self.shares for name, share in shares.items() if share}
        return [n for n in COLOURS if n in used] + sorted(used - {*COLOURS})


Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, header, rows."""


@dataclass(frozen=True)
class Page:
    """What is drawn, one below the other."""

    title: str
    charts: Sequence[Chart]
    bands: Sequence[Bands] = ()

    def drawn_charts(self) -> list[Chart]:
        """Those that have a point."""
        return [c for c in self.charts if any(line.points for line in c.lines)]

    def drawn_bands(self) -> list[Bands]:
        """Those that have a band."""
        return [b for b in self.bands if b.names()]

    def lengths(self) -> list[float]:
        """All that stand below one another, in tokens, from the shortest on."""
        found = {n for c in self.charts for line in c.lines for n, _, _ in line.points}
        return sorted(found.union(*(b.lengths for b in self.bands)))


def edges(lengths: Sequence[float]) -> list[float]:
    """Where the room of each of ``lengths`` (in order) on a logarithmic axis begins, and where that
    of the last one ends."""
    inner = [math.sqrt(a * b) for a, b in pairwise(lengths)]
    if not inner:
        return [lengths[0] / 2**0.5, lengths[0] * 2**0.5]
    return [lengths[0] ** 2 / inner[0], *inner, lengths[-1] ** 2 / inner[-1]]


def colours_of(names: Sequence[str]) -> list[str]:
    """Of lines or bands of these ``names``; at most one that has none of its own is black."""
    strange = [n for n in names if n not in COLOURS]
    known = {name: OTHERS[i % len(OTHERS)] for i, name in enumerate(strange[1:])}
    return [COLOURS.get(n) or known.get(n, BLACK) for n in names]
