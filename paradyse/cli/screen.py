"""What the command line shows while ranks work: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paradyse.cli.rank_jobs import StepDone
from paradyse.planning.tables import text_table
from paradyse.planning.units import format_bytes, format_seconds

ROWS = 12
"""Steps that stay in sight."""
UNIT = 10
"""Cells up to this long are a number and its unit, and stay on one line."""
WIDE = 120
"""Columns of a terminal from which there is room for a file's name."""
COLUMNS = ("step", "tokens", "plan", "loss", "tokens/s", "peak memory", "time", "file")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leaves the exit code to ``main``."""
        raise BrokenPipeError


def make_console(to_stderr: bool = False) -> Console:
    """The terminal; for a file or a pipe, lines as wide as they come and nothing but text. What
    standard output cannot encode, such as a file's name, is written as ``?`` from now on.

    Args:
        to_stderr: leave standard output to what machines read.
    """
    if not to_stderr and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a file's name may be no text
    plain: dict[str, Any] = {"markup": False, "highlight": False, "stderr": to_stderr}
    console = _Console(**plain)
    return console if console.is_terminal else _Console(width=200, no_color=True, **plain)


class Screen:
    """One phase of work after the other, each with its steps.

    Args:
        console: where to show it.
        total: training steps.
    """

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total = console, total
        self._rows: deque[tuple[str, ...]] = deque(maxlen=ROWS)
        self._phase, self._done, self._of = "starting", 0, 0
        self._began = time.monotonic()
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def phase(self, text: str, of: int = 0) -> None:
        """Shows ``text``, what begins now, with ``of`` ticks to come; 0: unknown."""
        self._phase, self._done, self._of, self._began = text, 0, of, time.monotonic()
        if self._live is None:
            self._line(f"{text} ...")

    def progress(self, done: int, of: int, text: str) -> None:
        """Shows ``text``, what is next after ``done`` ticks ``of`` so many."""
        self._phase, self._done, self._of = text, done, of
        if self._live is None:
            self._line(f"{done}/{of}  {text}")

    def tick(self) -> None:
        self._done += 1

    def step(self, done: StepDone) -> None:
        """Shows a training step that is ``done``."""
        cells = (
            f"{done.step + 1}/{self.total}",
            str(done.num_tokens),
            done.plan,
            f"{done.loss:.4f}",
            f"{done.num_tokens / done.time_s:.0f}",
            format_bytes(done.peak_bytes),
            format_seconds(done.time_s),
            done.name,
        )
        if self._live is None:
            line = "step {}  {} tokens  {}  loss {}  {} tokens/s  peak {}  {}  {}"
            self._line(line.format(*cells))
        self._rows.append(cells)
        self.tick()

    def _line(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)
        sys.stdout.flush()

    def _render(self) -> Any:
        seconds = time.monotonic() - self._began
        head = Text(f"{self._phase}  ", style="bold")
        if self._of:
            head.append(f"{self._done}/{self._of}  ", style="default")
        head.append(f"{seconds:.0f} s", style="dim")
        parts: list[Any] = []
        if self._rows:
            shown = len(COLUMNS) - (self.console.width < WIDE)
            table = Table(box=None, pad_edge=False)
            for name in COLUMNS[:shown]:
                table.add_column(name, no_wrap=True, overflow="ellipsis")
            for row in self._rows:
                table.add_row(*[Text(c) for c in row[:shown]])
            parts.append(table)
        parts.append(head)
        if self._of:
            parts.append(ProgressBar(total=self._of, completed=self._done, width=60))
        return Group(*parts)


def show_table(
    console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Shows ``title``, ``header``, ``rows`` on ``console``: drawn on a terminal, else aligned."""
    if not console.is_terminal:
        console.print(f"{title}\n{text_table(header, rows)}")
        return
    # Long names break where it reads well, so that all columns fit into 80.
    narrow = [h.replace("_", "\n_").replace(" ", "\n") for h in header]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    rows = [[c.replace(" ", "\u00a0") if len(c) <= UNIT else c for c in row] for row in rows]
    for name, *cells in zip(narrow, *rows):
        words = [w for c in (name, *cells) for w in c.replace("\n", " ").split(" ")]
        table.add_column(name, min_width=max(map(len, words)), overflow="fold")
    for row in rows:
        table.add_row(*[Text(c, style="bold" if c.endswith("*") else "") for c in row])
    console.print(Text(title, style="italic"), table)
