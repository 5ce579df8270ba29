"""What ranks report of a replay, as tables, charts and lines of a CSV."""

from __future__ import annotations

import csv
import io
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from paradyse.cli.charts import Bands, Chart, Line, Page, Table
from paradyse.cli.outputs import check_file, write_whole
from paradyse.cli.pages import write_charts
from paradyse.cli.rank_jobs import StepDone
from paradyse.cli.replay import Held, Infeasible, Phase, Planned, Replayed
from paradyse.cli.screen import Screen
from paradyse.config import AUTO, STRATEGIES
from paradyse.planning.units import format_bytes, format_seconds
from paradyse.types import REPLICATED

COLUMNS = ("index", "num_tokens", "choice", "plan", "time_s", "median_s", "cumulative_s")
"""Of the CSV, a row for every run: the median of its sequence's runs under the choice, and those
medians added up over all sequences of at most its length."""


@dataclass
class Record:
    """What the ranks have reported."""

    steps: list[StepDone] = field(default_factory=list)
    replayed: list[Replayed] = field(default_factory=list)
    infeasible: list[Infeasible] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)

    def hear(self, screen: Screen, value: Any) -> None:
        """Keeps a ``value`` that a rank sends, and shows it on ``screen``."""
        if isinstance(value, Phase):
            screen.phase(value.text, value.steps)
            return
        lists = self.steps, self.replayed, self.infeasible, self.held, self.planned
        kinds = StepDone, Replayed, Infeasible, Held, Planned
        known: dict[type, list[Any]] = dict(zip(kinds, lists, strict=True))
        known[type(value)].append(value)
        if isinstance(value, Infeasible):
            self.replayed = [r for r in self.replayed if r.choice != value.choice]
            self.held = [h for h in self.held if h.choice != value.choice]
        if isinstance(value, StepDone):
            screen.step(value)
        elif isinstance(value, Replayed | Held):
            screen.tick()

    def num_rounds(self) -> int:
        """How often every file was replayed under every choice."""
        return min(Counter((r.choice, r.index) for r in self.replayed).values(), default=0)

    def choices(self) -> list[str]:
        """What was replayed, ``auto`` first."""
        return list(dict.fromkeys(r.choice for r in self.replayed))

    def median_s(self, choice: str, index: int) -> float:
        """Seconds of file ``index`` under ``choice``, which has been replayed."""
        return statistics.median(
            r.time_s for r in self.replayed if (r.choice, r.index) == (choice, index)
        )

    def plans(self, choice: str, index: int) -> set[str]:
        """Those that file ``index`` ran under by ``choice``, in words."""
        return {r.plan for r in self.replayed if (r.choice, r.index) == (choice, index)}


def marks(first: str) -> str:
    """What stands in cells of ``choice_times``, where people know ``AUTO`` as ``first``."""
    return f"* fastest, = the same plan as {first} there: what differs is noise"


def choice_times(record: Record, choices: Sequence[str], at: Sequence[int]) -> tuple[str, ...]:
    """Of ``record``: time of the files ``at`` under auto; under each of ``choices``, times that."""
    if not at:
        return ("-",) * (1 + len(choices))
    totals = {c: sum(record.median_s(c, i) for i in at) for c in (AUTO, *choices)}
    best = min(totals.values())
    cells = [format_seconds(totals[AUTO])]
    for c in choices:
        alike = all(record.plans(c, i) == record.plans(AUTO, i) for i in at)
        cells.append(f"{totals[c] / totals[AUTO]:.2f}x" + "=" * alike)
    return tuple(c + ("*" if t == best else "") for c, t in zip(cells, totals.values()))


def _chart(title: str, unit: str, of: Mapping[str, Iterable[tuple[float, float]]]) -> Chart:
    """A chart of (length, value) of each choice."""
    lines = (Line(c, tuple((n, x, True) for n, x in points)) for c, points in of.items())
    return Chart(title, unit, tuple(lines))


def check_runs(flag: str, given: str) -> None:
    """The file ``given`` with ``flag`` may take runs: it has none yet, or such as are replaced.

    Raises:
        ValueError: it has something else, or cannot be written.
    """
    path = Path(given)
    if path.parent.is_dir() or flag == "--csv":
        check_file(flag, given)
    begin = ",".join(COLUMNS).encode()
    if path.exists() and (held := path.read_bytes()) and not held.startswith(begin):
        raise ValueError(f"{flag} {given}: that file is none of bench's; name another one")


@dataclass(frozen=True)
class Results:
    """What was replayed, as tables, charts and lines of a CSV."""

    record: Record
    first: str = AUTO
    """What people know ``AUTO`` as: in a training by a given plan nothing was chosen."""

    def named(self, choice: str) -> str:
        """``choice`` as people know it."""
        return self.first if choice == AUTO else choice

    @cached_property
    def lengths(self) -> dict[int, int]:
        """Index in the trace -> tokens, of what was replayed, from the shortest to the longest."""
        found = {r.index: r.num_tokens for r in self.record.replayed}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    @property
    def order(self) -> list[int]:
        """Indices in the trace, from the shortest sequence to the longest."""
        return [*self.lengths]

    def tables(self) -> list[Table]:
        """Times, and memory where it was watched."""
        return [self.times(), *([self.memory()] if self.record.held else [])]

    def write(self, folder: Path, name: str, title: str) -> list[str]:
        """Writes charts, tables and every run to ``name``.html, .csv and, with what draws
        charts, .png in ``folder``; ``title`` is on top.

        Returns:
            Lines that tell of them.
        """
        told = write_charts(folder, name, self.page(title), self.tables())
        return [*told, self.write_csv(folder / f"{name}.csv")]

    def times(self) -> Table:
        """Title, header and rows: every length, then all together."""
        choices = [c for c in self.record.choices() if c != AUTO]
        plans = {r.index: r.plan for r in self.record.replayed if r.choice == AUTO}
        rows = [
            (str(self.lengths[i]), plans[i], *choice_times(self.record, choices, [i]))
            for i in self.order
        ]
        rows.append(("all", "", *choice_times(self.record, choices, self.order)))
        title = (
            f"forward and backward: median of {self.record.num_rounds()} warm runs, interleaved; "
            f"{marks(self.first)}"
        )
        return title, ("length", f"plan of {self.first}", self.first, *choices), rows

    def memory(self) -> Table:
        """Title, header and rows: every distinct length."""
        peaks, choices = self.peaks(), self.record.choices()
        rows = [
            (str(n), *(format_bytes(peaks[c, n]) for c in choices))
            for n in dict.fromkeys(self.lengths.values())
        ]
        title = "peak memory of a rank, weights and gradients included"
        return title, ("length", *map(self.named, choices)), rows

    def peaks(self) -> dict[tuple[str, int], int]:
        """(choice, length) -> bytes."""
        return {(h.choice, h.num_tokens): h.peak_bytes for h in self.record.held}

    def cumulated(self, choice: str) -> dict[int, float]:
        """Length -> seconds of all sequences up to it, under ``choice``."""
        times = [self.record.median_s(choice, i) for i in self.order]
        return {self.lengths[i]: t for i, t in zip(self.order, accumulate(times), strict=True)}

    def page(self, title: str) -> Page:
        """Time against length, also added up from the shortest, and memory where it was watched;
        ``title`` is on top."""
        peaks, choices, order = self.peaks(), self.record.choices(), self.order
        single = {
            self.named(c): [(self.lengths[i], self.record.median_s(c, i)) for i in order]
            for c in choices
        }
        summed = {self.named(c): self.cumulated(c).items() for c in choices}
        charts = [
            _chart("Time of forward and backward", "s", single),
            _chart("Time of all sequences up to a length", "s", summed),
        ]
        if peaks:
            distinct = dict.fromkeys(self.lengths.values())
            memory = {self.named(c): [(n, peaks[c, n] / 2**20) for n in distinct] for c in choices}
            charts.append(_chart("Peak memory of a rank", "MiB", memory))
        return Page(title, charts, self.bands())

    def bands(self) -> list[Bands]:
        """What ``first`` takes for each kind of block; nothing where there is nothing to choose."""
        planned = sorted(self.record.planned, key=lambda p: p.num_tokens)
        planned = [p for p in planned if p.num_tokens in self.lengths.values()]
        out = []
        for kind in dict.fromkeys(kind for p in planned for kind in p.shares):
            shares = {p.num_tokens: p.shares[kind] for p in planned if kind in p.shares}
            names = {name for of in shares.values() for name in of}
            if names - {REPLICATED} and names <= set(STRATEGIES):
                title = f"Strategies of {kind} blocks under {self.first}"
                out.append(Bands(title, tuple(shares), tuple(shares.values())))
        return out

    def write_csv(self, path: Path) -> str:
        """Writes every run to ``path``, with what belongs to its sequence; returns a line that
        tells of it."""
        peaks = self.peaks()
        choices = self.record.choices()
        totals = {c: self.cumulated(c) for c in choices}
        medians = {(c, i): self.record.median_s(c, i) for c in choices for i in self.order}
        file = io.StringIO(newline="")
        writer = csv.writer(file)
        writer.writerow((*COLUMNS, "peak_bytes"))
        for r in self.record.replayed:
            seconds = (r.time_s, medians[r.choice, r.index], totals[r.choice][r.num_tokens])
            of_run = (r.index, r.num_tokens, self.named(r.choice), r.plan)
            cells = (*of_run, *(f"{s:.6f}" for s in seconds))
            writer.writerow((*cells, peaks.get((r.choice, r.num_tokens), "")))
        write_whole(path, file.getvalue().encode())
        return f"every run is in {path}"
