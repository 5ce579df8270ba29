"""Charts for people: one HTML page with nothing outside it, and a PNG.

Both draw the same values: the page as SVG of its own, the PNG by matplotlib, which is optional.
"""

from __future__ import annotations

import importlib.util
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from paradyse.cli.outputs import write_whole
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
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 380, 70, 46, 16, 150
"""Of a chart and its margins, in pixels."""


@dataclass(frozen=True)
class Line:
    """A curve; from the first point that does not fit on it is dashed."""

    name: str
    points: tuple[tuple[float, float, bool], ...]
    """(tokens, value, fits)."""


@dataclass(frozen=True)
class Chart:
    """Values against the length, both axes logarithmic."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    limit: float | None = None
    """Drawn across."""
    marks: tuple[tuple[float, float, str], ...] = ()
    """(tokens, value, text) of points to be pointed out."""


@dataclass(frozen=True)
class Bands:
    """Per length the share of blocks that have each strategy, or each lever."""

    title: str
    lengths: tuple[int, ...]
    shares: tuple[Mapping[str, float], ...]


def _ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside, or the two ends."""
    inside = [10.0**k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    return [t for t in inside if low <= t <= high] or [low, high]


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 1 else f"{x:g}"


def _scale(low: float, high: float, start: float, end: float) -> Any:
    span = math.log(high / low) or 1.0
    return lambda x: start + (end - start) * math.log(x / low) / span


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = "#333") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {where}>{escape(text)}</text>"


def svg_of(chart: Chart) -> str:
    """``chart`` as an SVG element."""
    points = [p for line in chart.lines for p in line.points]
    if not points:
        return "<svg/>"
    values = [v for _, v, _ in points] + ([chart.limit] if chart.limit else [])
    xs, low, high = sorted({n for n, _, _ in points}), min(values) / 1.3, max(values) * 1.3
    x = _scale(xs[0], xs[-1] if len(xs) > 1 else xs[0] * 2, LEFT, WIDTH - RIGHT)
    y = _scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">']
    parts.append(f"<title>{escape(chart.title)}</title>")
    for t in _ticks(low, high):
        parts.append(
            f'<path d="M{LEFT} {y(t):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
            + _text(LEFT - 6, y(t) + 4, f"{_number(t)} {chart.unit}", "end")
        )
    for n in xs[:: max(1, len(xs) // 6)]:
        parts.append(
            f'<path d="M{x(n):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#eee"/>'
            + _text(x(n), HEIGHT - BOTTOM + 18, _number(n))
        )
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "tokens in a sequence"))
    if chart.limit:
        at = y(chart.limit)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#c00"/>')
        parts.append(_text(WIDTH - RIGHT + 8, at + 4, "limit", "start", "#c00"))
    for i, line in enumerate(chart.lines):
        colour, wide = COLOURS.get(line.name, BLACK), 1.5 if line.name in COLOURS else 3
        style = f'fill="none" stroke="{colour}" stroke-width="{wide}"'
        for part, dash in zip(_parts(line), ("", ' stroke-dasharray="4 4"')):
            d = "L".join(f"{x(n):.1f} {y(v):.1f}" for n, v, _ in part)
            parts += [f'<path d="M{d}" {style}{dash}/>'] * bool(part)
        parts.append(_text(WIDTH - RIGHT + 8, TOP + 30 + 18 * i, line.name, "start", colour))
    for n, v, text in chart.marks:
        at = f'cx="{x(n):.1f}" cy="{y(v):.1f}"'
        parts.append(f'<circle {at} r="5" fill="none" stroke="#333"/>')
        parts.append(_text(x(n), y(v) - 10, text))
    return "".join(parts) + "</svg>"


def _parts(line: Line) -> tuple[Sequence[tuple[float, float, bool]], ...]:
    """The points that fit, and from the last of them the others."""
    points = line.points
    first = next((i for i, p in enumerate(points) if not p[2]), len(points))
    return points[:first], points[max(0, first - 1) :] if first < len(points) else ()


def svg_of_bands(bands: Bands) -> str:
    """``bands`` as an SVG element: one bar for each length."""
    height = 180
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">']
    parts.append(f"<title>{escape(bands.title)}</title>")
    step = (WIDTH - LEFT - RIGHT) / max(1, len(bands.lengths))
    names: dict[str, None] = {}
    for i, (n, shares) in enumerate(zip(bands.lengths, bands.shares, strict=True)):
        top, left = float(TOP), LEFT + i * step
        for name in (s for s in COLOURS if s in shares):
            names[name] = None
            tall = shares[name] * (height - TOP - BOTTOM)
            parts.append(
                f'<rect x="{left + 1:.1f}" y="{top:.1f}" width="{step - 2:.1f}" '
                f'height="{tall:.1f}" fill="{COLOURS[name]}"/>'
            )
            top += tall
        if i % max(1, len(bands.lengths) // 6) == 0:
            parts.append(_text(left + step / 2, height - BOTTOM + 18, _number(n)))
    for i, name in enumerate(names):
        parts.append(_text(WIDTH - RIGHT + 8, TOP + 12 + 18 * i, name, "start", COLOURS[name]))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 6, "tokens in a sequence"))
    return "".join(parts) + "</svg>"


STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
svg{max-width:100%;height:auto;font:12px system-ui,sans-serif}
table{border-collapse:collapse}td,th{padding:.2rem .8rem;text-align:right}
td:first-child,th:first-child{text-align:left}tr:nth-child(even){background:#f4f4f4}"""

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, header, rows."""


@dataclass(frozen=True)
class Page:
    """What is drawn."""

    title: str
    charts: Sequence[Chart]
    bands: Sequence[Bands] = ()


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"


def write_page(path: Path, page: Page, tables: Sequence[Table]) -> None:
    """Writes ``page`` to ``path``, self-contained HTML: charts as inline SVG, then ``tables``."""
    body = [f"<h1>{escape(page.title)}</h1>"]
    body += [f"<h2>{escape(c.title)}</h2>{svg_of(c)}" for c in page.charts]
    body += [f"<h2>{escape(b.title)}</h2>{svg_of_bands(b)}" for b in page.bands]
    for name, header, rows in tables:
        lines = _row("th", header) + "".join(_row("td", row) for row in rows)
        body.append(f"<h2>{escape(name)}</h2><table>{lines}</table>")
    text = (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"/>'
        f"<title>{escape(page.title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )
    write_whole(path, text.encode())


def write_svg(path: Path, chart: Chart) -> None:
    """Writes ``chart`` to ``path`` as a picture by itself, on white."""
    font = '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" '
    white = '<rect width="100%" height="100%" fill="#fff"/><title>'
    svg = svg_of(chart).replace("<svg ", font, 1).replace("<title>", white, 1)
    write_whole(path, svg.encode())


def write_png(path: Path, page: Page) -> bool:
    """Writes ``page`` to ``path`` as a PNG; False where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    charts, bands = page.charts, page.bands
    figure = Figure(figsize=(9, 4 * len(charts) + 2.2 * len(bands)), layout="constrained")
    figure.suptitle(textwrap.fill(page.title, 90))
    heights = [4.0] * len(charts) + [2.2] * len(bands)
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for ax, chart in zip(axes, charts):
        for line in chart.lines:
            name, colour = line.name, COLOURS.get(line.name, BLACK)
            for part, style in zip(_parts(line), ("-", "--")):
                if part:
                    lengths, values, _ = zip(*part)
                    ax.plot(lengths, values, style, color=colour, label=name)
                    name = "_"  # of the legend, once
        if chart.limit:
            ax.axhline(chart.limit, color="#c00", linewidth=1)
        for n, v, text in chart.marks:
            ax.plot(n, v, "o", markersize=9, markerfacecolor="none", markeredgecolor="#333")
            ax.annotate(text, (n, v), (0, 9), textcoords="offset points", ha="center", fontsize=8)
        ax.set(xscale="log", yscale="log", title=chart.title, ylabel=chart.unit)
        ax.legend(fontsize="small")
    for ax, band in zip(axes[len(charts) :], bands):
        labels, base = [_number(n) for n in band.lengths], [0.0] * len(band.lengths)
        for name in COLOURS:
            share = [s.get(name, 0.0) for s in band.shares]
            if any(share):
                ax.bar(labels, share, bottom=base, color=COLOURS[name], label=name)
                base = [a + b for a, b in zip(base, share)]
        few = range(0, len(labels), max(1, len(labels) // 12))
        ax.set_xticks([*few], [labels[i] for i in few])
        ax.set(title=band.title, xlabel="tokens in a sequence")
        ax.tick_params(axis="x", labelrotation=45)
        ax.legend(fontsize="small")
    image = io.BytesIO()
    figure.savefig(image, dpi=120)
    write_whole(path, image.getvalue())
    return True


def write_charts(folder: Path, name: str, page: Page, tables: Sequence[Table]) -> list[str]:
    """Writes ``page`` and ``tables`` as ``name``.html and, with matplotlib, .png into ``folder``.

    Returns:
        Lines that tell of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_page(folder / f"{name}.html", page, tables)
    if write_png(folder / f"{name}.png", page):
        return [f"wrote {folder / name}.html and .png"]
    return [
        f"wrote {folder / name}.html",
        f"no {name}.png: matplotlib is not installed (pip install 'paradyse[plot]'); the page has "
        "the same charts",
    ]
