"""Charts and tables as files: one HTML page with nothing outside it, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment

from paradyse.cli import drawing
from paradyse.cli.charts import ON_DARK, Bands, Chart, Page, Table, colours_of
from paradyse.cli.outputs import write_whole

TEMPLATE = Path(__file__).with_name("page.html")
LONG = 28
"""Letters of a cell, from which on it may have several lines."""
Key = list[tuple[str, str, str]]
WAY_OUT = "altair and vl-convert-python are not installed (pip install 'paradyse[plot]')"


def write_page(path: Path, page: Page, tables: Sequence[Table]) -> None:
    """Writes ``page`` to ``path``, self-contained HTML: its charts, then ``tables``; without what
    draws charts their tables alone, and a line that says so."""
    figures = []
    if drawing.can_draw():
        of: list[tuple[str, str, Key]] = [(c.title, c.note, []) for c in page.drawn_charts()]
        of += [(b.title, "", _key(b)) for b in page.drawn_bands()]
        figures = [
            {"title": title, "note": note, "key": key, "light": s, "dark": drawing.on_dark(s)}
            for (title, note, key), s in zip(of, drawing.for_page(page), strict=True)
        ]
    template = Environment(autoescape=True).from_string(TEMPLATE.read_text())
    text = template.render(
        title=page.title,
        figures=figures,
        tables=[(name, header, rows, _kinds(header, rows)) for name, header, rows in tables],
        missing="" if drawing.can_draw() else f"No charts: {WAY_OUT}.",
        scripts=drawing.scripts() if figures else "",
        looks={"light": drawing.look(dark=False), "dark": drawing.look(dark=True)},
    )
    write_whole(path, text.encode())


def _key(bands: Bands) -> Key:
    """Names, and their colours on a light and on a dark page; lanes have names beside them."""
    if not bands.of_one_whole:
        return []
    names = bands.names()
    return [(n, c, ON_DARK.get(c, c)) for n, c in zip(names, colours_of(names), strict=True)]


def _kinds(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Of each column of a table: numbers, words, or words that need several lines."""
    kinds = []
    for i in range(len(header)):
        cells = [row[i] for row in rows if row[i].strip("-")]
        numbers = sum(cell[:1].isdigit() for cell in cells)
        if max(map(len, cells), default=0) > LONG:
            kinds.append("long")
        else:
            kinds.append("number" if 2 * numbers > len(cells) else "word")
    return kinds


def write_svg(path: Path, chart: Chart) -> None:
    """Writes ``chart`` to ``path`` as a picture by itself, on white."""
    write_whole(path, drawing.svg_of(chart).encode())


def write_png(path: Path, page: Page) -> bool:
    """Writes ``page`` to ``path`` as a PNG; False where what draws it is not installed."""
    if not drawing.can_draw():
        return False
    write_whole(path, drawing.png_of(page))
    return True


def write_charts(folder: Path, name: str, page: Page, tables: Sequence[Table]) -> list[str]:
    """Writes ``page`` and ``tables`` as ``name``.html and .png into ``folder``.

    Returns:
        Lines that tell of them, and of charts that could not be drawn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_page(folder / f"{name}.html", page, tables)
    if write_png(folder / f"{name}.png", page):
        return [f"wrote {folder / name}.html and .png"]
    return [
        f"wrote {folder / name}.html",
        f"no charts in it, and no {name}.png: {WAY_OUT}",
    ]
