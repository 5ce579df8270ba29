"""Pages of charts and tables: what stands in them, with and without what draws charts."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from paradyse.cli import drawing
from paradyse.cli.charts import Bands, Chart, Line, Page, colours_of, edges
from paradyse.cli.pages import write_charts, write_page
from paradyse.cli.ticks import FEW, MANY, apart, text_of, ticks_of

TABLE = ("t", ("a", "b"), [("1", "<2>")])
LINES = (
    Line("metp", ((512, 0.25, True), (8192, 4.0, True), (65536, 300.0, False))),
    Line("auto", ((512, 0.2, True), (8192, 3.5, True))),
)
CHART = Chart("Time", "s", LINES, limit=60.0, marks=((1000, 0.5, "1,000"),), fits_to=9000)
BANDS = Bands("Strategies", (512, 8192), ({"metp": 0.25, "ulysses_z": 0.75}, {"metp": 1.0}))
LANES = Bands("Levers", (512, 8192), ({}, {"tiled": 1.0, "offload": 0.5}), of_one_whole=False)


def page(title: str = "a < b & c") -> Page:
    return Page(title, [CHART], [BANDS, LANES])


class Links(HTMLParser):
    """Checks that tags close, and collects what a page asks for outside itself."""

    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.outside += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "data")]
        self.outside += [tag] * (tag in ("link", "iframe", "img"))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "tables"])
def test_a_page_is_well_formed_and_asks_for_nothing_outside(
    drawn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it has charts or not; what draws them stands in it."""
    if drawn and not drawing.can_draw():
        pytest.skip("pip install 'paradyse[plot]'")
    monkeypatch.setattr(drawing, "can_draw", lambda: drawn)
    monkeypatch.setattr(drawing, "scripts", lambda: "window.vegaEmbed = null;")
    write_page(tmp_path / "plan.html", page(), [TABLE])
    text = (tmp_path / "plan.html").read_text()
    links = Links()
    links.feed(text)
    assert not links.open and not links.outside
    assert "url(" not in text and "@import" not in text
    assert "a &lt; b &amp; c" in text and "&lt;2&gt;" in text
    assert ("vegaEmbed(" in text) is drawn and text.count('class="chart"') == 3 * drawn
    assert ("pip install &#39;paradyse[plot]&#39;" in text) is not drawn


def test_who_lacks_what_draws_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "NEEDED", ("altair", "no_such_module"))
    told = write_charts(tmp_path, "plan", page(), [TABLE])
    assert [p.name for p in tmp_path.iterdir()] == ["plan.html"]
    assert "no plan.png" in told[1] and "pip install 'paradyse[plot]'" in told[1]


def texts_of(of: Any) -> list[str]:
    """What a chart's Vega-Lite has as data to be shown."""
    found = [row["text"] for row in of.get("data", {}).get("values", []) if "text" in row]
    return found + [text for layer in of.get("layer", []) for text in texts_of(layer)]


def test_charts_have_their_numbers_and_limits() -> None:
    pytest.importorskip("altair", reason="pip install 'paradyse[plot]'")
    chart, bands, lanes = drawing.for_page(page())
    texts = texts_of(chart)
    assert {"metp", "auto", "limit 1 min", "250 ms", "5 min", "1,000"} <= {*texts}
    assert {"25%", "75%", "100%"} <= {*texts_of(bands)} and "50%" in texts_of(lanes)
    text = json.dumps([chart, bands, lanes])
    assert "NaN" not in text and "Infinity" not in text
    assert json.dumps(drawing.on_dark(chart)).count("#ffffff") >= 2, "auto is white on dark"


def test_a_picture_has_the_names_of_lines_and_ticks() -> None:
    pytest.importorskip("vl_convert", reason="pip install 'paradyse[plot]'")
    svg = drawing.svg_of(CHART)
    shown = {e.text for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("text")}
    assert {"metp", "auto", "Time", "limit 1 min", "1K", "64K", "1 s", "1 min"} <= shown


@pytest.mark.parametrize(
    ("unit", "low", "high", "some"),
    [
        ("s", 3e-3, 5, {"10 ms", "1 s"}),
        ("s", 0.2, 9000, {"1 s", "1 min", "1 h"}),
        ("s", 0.9, 1.3, {"1 s", "1.2 s"}),
        ("s", 1e5, 1e6, {"100 h"}),
        ("s", 1e-6, 9e5, {"1 ms", "1 s"}),
        ("GiB", 2, 90, {"4 GiB", "64 GiB"}),
        ("GiB", 0.3, 9000, {"1 GiB", "1 TiB"}),
        ("GiB", 70, 75, {"72 GiB"}),
        ("MiB", 12, 300, {"16 MiB", "128 MiB"}),
        ("tokens", 2048, 2**22, {"4K", "1M"}),
        ("tokens", 24, 300, {"32", "256"}),
        ("tokens", 4.3e6, 5.2e6, {"4.5M"}),
    ],
)
def test_ticks_are_numbers_that_people_know(
    unit: str, low: float, high: float, some: set[str]
) -> None:
    assert some <= {text for _, text in ticks_of(unit, low, high)}
    for most in (FEW, MANY):
        ticks = ticks_of(unit, low, high, most)
        assert 2 <= len(ticks) <= most
        values = [t for t, _ in ticks]
        assert values == sorted(values) and low <= values[0] and values[-1] <= high


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("s", 2700, "45 min"),
        ("s", 0.99996, "1 s"),
        ("s", 0, "0 us"),
        ("GiB", 0.5, "512 MiB"),
        ("MiB", 71.28 * 1024, "71.3 GiB"),
        ("GiB", 1023.7, "1024 GiB"),
        ("tokens", 131072, "128K"),
        ("tokens", 1000, "1,000"),
    ],
)
def test_values_are_written_for_people(unit: str, value: float, text: str) -> None:
    assert text_of(unit, value) == text


def test_labels_keep_apart_and_inside() -> None:
    wanted = [299.0, 10, 11, 12, 298, 150]
    places = apart(wanted, 14, 7, 293)
    ordered = sorted(places)
    assert all(b - a >= 14 - 1e-9 for a, b in zip(ordered, ordered[1:]))
    assert ordered[0] >= 7 and ordered[-1] <= 293 and places[5] == 150
    assert apart([5.0] * 4, 14, 0, 30) == pytest.approx([0, 10, 20, 30]), "no room for 14"
    assert apart([20, 20.0], 14, 0, 40) == [13, 27], "both as near as they can be"
    assert apart([], 14, 0, 30) == []


def test_every_length_has_its_room() -> None:
    assert edges([4, 16]) == [2, 8, 32]
    low, high = edges([9])
    assert low < 9 < high


def test_one_name_is_black_and_none_has_anothers_colour() -> None:
    names = ["metp", "auto", "groups", "degree 2", "tiled"]
    found = colours_of(names)
    assert found.count("#000000") == 1 and found[1] == "#000000"
    assert len({*colours_of(["groups", "degree 1", "degree 2", "degree 4"])}) == 4
