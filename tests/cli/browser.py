"""Pages opened in headless Chromium, and what is wrong with how they look."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTHS, SCHEMES = (1280, 400), ("light", "dark")

LOOK = Path(__file__).with_name("look.js")
"""Tells what is wrong with the page that is open."""


def find_browser() -> str | None:
    """Where the system's Chromium is."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass(frozen=True)
class Seen:
    """A page as it was seen."""

    wrong: list[str]
    """What is wrong with it."""
    drawn: int
    """Points of lines, and bands, that were drawn."""


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield started
        finally:
            started.close()


def look_at(started: Any, page: Path, width: int, scheme: str, picture: Path) -> Seen:
    """Opens ``page`` in a window of ``width`` pixels, and keeps a ``picture`` of it."""
    window = started.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    tab, wrong = window.new_page(), []
    tab.on("console", lambda m: wrong.append(f"{m.type}: {m.text}"))
    tab.on("pageerror", lambda e: wrong.append(f"error: {e}"))
    tab.on("request", lambda r: r.url == page.as_uri() or wrong.append(f"asks for {r.url}"))
    tab.goto(page.as_uri())
    if tab.query_selector(".chart"):
        tab.wait_for_selector(f"body[data-drawn={scheme}]", timeout=60_000)
    picture.parent.mkdir(parents=True, exist_ok=True)
    tab.screenshot(path=picture, full_page=True)
    wrong += tab.evaluate(LOOK.read_text())
    drawn = tab.locator("g.mark-symbol path, .mark-rect path").count()
    window.close()
    return Seen(wrong, drawn)
