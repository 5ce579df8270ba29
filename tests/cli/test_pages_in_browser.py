"""Every page that the commands write, as people see it: wide and narrow, light and dark.

Screenshots are kept in ``build/screenshots``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from browser import SCHEMES, WIDTHS, browser, find_browser, look_at
from test_cli import TINY, run

import paradyse
from paradyse.cli.charts import Bands, Chart, Line, Page
from paradyse.cli.pages import write_page
from paradyse.types import LEVERS

pytestmark = pytest.mark.slow
SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 640,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    pytest.importorskip("playwright", reason="pip install playwright")
    pytest.importorskip("altair", reason="pip install 'paradyse[plot]'")
    if find_browser() is None:
        pytest.skip("there is no Chromium: install the system's package of that name")
    with browser() as started:
        yield started


def plan(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    few = ["--gpus", "4", "--memory-limit", "8GiB", "--out", str(folder), "--layers", "1"]
    few += ["--levers", "none", "--lengths", "512,8192,131072,1048576"]
    code, out = run("plan", "--model", str(folder / "config.json"), *few)
    assert code == 0, out
    return folder / "plan.html"


def plan_of_batches(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "lengths.txt").write_text("30000 " + "700 90 " * 10 + "5000 " + "400 80 " * 9)
    few = ["--gpus", "2", "--lengths-from", str(folder / "lengths.txt"), "--batch", "10"]
    few += ["--levers", "none", "--layers", "1", "--out", str(folder)]
    code, out = run("plan", "--model", str(folder / "config.json"), *few)
    assert code == 0, out
    return folder / "plan.html"


def bench(folder: Path) -> Path:
    (folder / "lengths.txt").write_text("700\n64\n9\n300\n24\n")
    few = ["--lengths", str(folder / "lengths.txt"), "--rounds", "1", "--out", str(folder)]
    code, out = run("bench", *few, *TINY, "--inner", "eager")
    assert code == 0, out
    return folder / "bench.html"


def demo(folder: Path) -> Path:
    few = ["--steps", "3", "--cap", "256", "--rounds", "1", "--out", str(folder)]
    code, out = run("demo", *few, *TINY, "--inner", "eager")
    assert code == 0, out
    return folder / "demo.html"


def line_of(name: str, points: Sequence[tuple[float, float]], fits: bool = True) -> Line:
    return Line(name, tuple((n, v, fits) for n, v in points))


def hard(folder: Path) -> Path:
    """Many lines that end in one place, long names, one length, a range of a few percent."""
    lengths = [2**k for k in range(9, 24)]
    many = tuple(line_of(f"degree {2**i}", [(n, n * 1e-4) for n in lengths]) for i in range(9))
    ends = [(512, 1e-6), (2**23, 9e5)]
    wide = tuple(line_of(f"a name of many letters {i}", ends, fits=False) for i in range(3))
    flat = tuple(line_of(of, [(n, 71 + i) for n in lengths]) for i, of in enumerate(LEVERS))
    shares = tuple({name: 1 / len(LEVERS) for name in LEVERS} for _ in lengths)
    charts = [
        Chart("One end", "s", many, fits_to=0),
        Chart("Long names", "s", wide, marks=((4096, 1.0, "4,096"),)),
        Chart("Flat", "GiB", flat, limit=80.0),
    ]
    bands = [Bands("Shares", tuple(lengths), shares), Bands("Lanes", tuple(lengths), shares, False)]
    rows = [(f"{n:,}", "words " * 20, *["1.25 GiB (too much)"] * 7) for n in lengths]
    table = ("a wide table", ("tokens", "plan", *["megatron_ts"] * 7), rows)
    title = "A title of many words, " * 6
    write_page(folder / "hard.html", Page(title, charts, bands), [table])
    return folder / "hard.html"


def one_length(folder: Path) -> Path:
    """One point a line."""
    lines = tuple(Line(name, ((300, 0.2 + i, True),)) for i, name in enumerate(("auto", "metp")))
    write_page(folder / "one.html", Page("One length", [Chart("Time", "s", lines)]), [])
    return folder / "one.html"


def notebook(folder: Path) -> Path:
    """Reports as notebooks show them."""
    import torch
    from tiny import Tiny, tokens

    model = torch.compile(Tiny(layers=1), backend="paradyse", options={"inner": "eager"})
    ids = tokens(2, 7)
    model(ids, ids).backward()
    reports = [paradyse.explain(model, 2, 7), paradyse.stats(model)]
    cells = "".join(f'<div class="wide">{r._repr_html_()}</div>' for r in reports)
    style = "body { color-scheme: light dark; color: CanvasText; background: Canvas }"
    (folder / "notebook.html").write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><style>{style}</style><body>{cells}'
    )
    return folder / "notebook.html"


@pytest.mark.parametrize(
    "make",
    [plan, plan_of_batches, bench, demo, hard, one_length, notebook],
    ids=lambda f: f.__name__,
)
def test_a_page_is_readable(make: Any, chromium: Any, tmp_path: Path) -> None:
    page = make(tmp_path)
    for width in WIDTHS:
        for scheme in SCHEMES:
            picture = SCREENSHOTS / f"{make.__name__}-{width}-{scheme}.png"
            seen = look_at(chromium, page, width, scheme, picture)
            assert not seen.wrong, f"{picture.name}:\n" + "\n".join(seen.wrong)
            assert picture.stat().st_size > 5000 and (seen.drawn or make is notebook)


FAULTY = """<!DOCTYPE html><body style="background: #fff; margin: 0">
<p style="position: absolute; top: 10px; left: 10px">one text</p>
<p style="position: absolute; top: 14px; left: 20px">another text</p>
<p style="position: absolute; top: 90px; left: -20px">cut off</p>
<p style="position: absolute; top: 150px; color: #eee">hardly there</p>
<svg width="60" height="20" style="position: absolute; top: 200px">
<text y="15">far too long for this</text></svg>
<div style="position: absolute; top: 300px; width: 5000px; height: 1px"></div>
<script>console.error("broken")</script>"""


def test_what_is_wrong_is_seen(chromium: Any, tmp_path: Path) -> None:
    (tmp_path / "faulty.html").write_text(FAULTY)
    found = look_at(chromium, tmp_path / "faulty.html", 400, "light", tmp_path / "a.png").wrong
    want = (
        "overlap: one text and another",
        "clipped: cut off",
        "pale: hardly there",
        "clipped: far too long",
        "wider than the window",
        "error: broken",
    )
    assert [w for w in want if not any(w in line for line in found)] == []


def test_a_change_to_dark_draws_anew_and_a_dot_tells_its_numbers(
    chromium: Any, tmp_path: Path
) -> None:
    page = one_length(tmp_path)
    tab = chromium.new_page(color_scheme="light", viewport={"width": 800, "height": 900})
    tab.goto(page.as_uri())
    tab.wait_for_selector("body[data-drawn=light]")
    tab.emulate_media(color_scheme="dark")
    tab.wait_for_selector("body[data-drawn=dark]")
    tab.locator("g.mark-symbol path").first.hover()
    tab.wait_for_selector("#vg-tooltip-element.visible")
    told = tab.locator("#vg-tooltip-element").inner_text()
    assert "300" in told and "200 ms" in told and "auto" in told
    tab.close()
