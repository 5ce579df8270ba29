"""``paradyse bench``: a trace of lengths under ``auto`` and every strategy; table, CSV, charts."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from paradyse.cli import launch
from paradyse.cli.charts import Bands, Chart, Line, Page, Table, write_charts
from paradyse.cli.commands.demo import Record, choice_times, llama_size
from paradyse.cli.models import require_transformers
from paradyse.cli.outputs import check_file, check_folder, write_whole
from paradyse.cli.replay import AUTO
from paradyse.cli.screen import Screen, make_console, show_table
from paradyse.cli.traces import trace_of
from paradyse.planning.planner import format_bytes
from paradyse.types import ATTENTION_STRATEGIES

COLUMNS = ("index", "num_tokens", "choice", "plan", "time_s", "median_s", "cumulative_s")
"""Of the CSV, a row for every run: the median of its sequence's runs under the choice, and those
medians added up over all sequences of at most its length."""


def run_bench(args: argparse.Namespace) -> int:
    """Replays a trace of lengths, that of ``args``, under auto and every strategy."""
    require_transformers()
    _check_paths(args)
    console = make_console()
    lengths, source = trace_of(args)
    device = launch.choose_device(args.device, args.ranks)
    strategies = (args.strategies or ATTENTION_STRATEGIES) if args.ranks > 1 else ()
    size = llama_size(args, max(lengths))
    title = (
        f"{size}; {args.ranks} rank{'s' * (args.ranks > 1)} on {device}; inner compiler: "
        f"{args.inner}; trace of {len(lengths)} lengths from {min(lengths)} to {max(lengths)} "
        f"{source}"
    )
    console.print(title)
    record = Record()
    with Screen(console, 0) as screen:
        screen.phase("starting")
        launch.run_as_asked(
            args,
            "paradyse.cli.replay:bench",
            {
                "size": size,
                "lengths": lengths,
                "seed": args.seed,
                "options": {"inner": args.inner},
                "rounds": args.rounds,
                "strategies": strategies,
            },
            lambda value: record.hear(screen, value),
        )
    results = Results(record, lengths)
    tables = [results.times(), results.memory()]
    for table in tables:
        show_table(console, *table)
    for infeasible in record.infeasible:
        console.print(f"{infeasible.choice}: {infeasible.why}")
    written = [Path(args.csv)] if args.csv else []
    if args.out:
        folder = Path(args.out)
        for line in write_charts(folder, "bench", results.page(title), tables):
            console.print(line)
        written.append(folder / "bench.csv")
    for path in written:
        results.write_csv(path)
        console.print(f"every run is in {path}")
    return 0


def _check_paths(args: argparse.Namespace) -> None:
    """Before the work, not after it."""
    if args.out:
        check_folder("--out", args.out)
    if args.csv:
        path = check_file("--csv", args.csv)
        begin = ",".join(COLUMNS).encode()
        if path.exists() and (held := path.read_bytes()) and not held.startswith(begin):
            raise ValueError(f"--csv {args.csv}: that file is none of bench's; name another one")


def _chart(title: str, unit: str, of: Mapping[str, Iterable[tuple[float, float]]]) -> Chart:
    """A chart of (length, value) of each choice."""
    lines = (Line(c, tuple((n, x, True) for n, x in points)) for c, points in of.items())
    return Chart(title, unit, tuple(lines))


@dataclass(frozen=True)
class Results:
    """What was replayed, as tables, charts and lines of a CSV."""

    record: Record
    lengths: Sequence[int]
    """Of the trace."""

    @property
    def order(self) -> list[int]:
        """Indices of the trace, from the shortest sequence to the longest."""
        return sorted(range(len(self.lengths)), key=self.lengths.__getitem__)

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
            "* fastest"
        )
        return title, ("length", "plan of auto", AUTO, *choices), rows

    def memory(self) -> Table:
        """Title, header and rows: every distinct length."""
        peaks, choices = self.peaks(), self.record.choices()
        rows = [
            (str(n), *(format_bytes(peaks[c, n]) for c in choices))
            for n in sorted(set(self.lengths))
        ]
        title = "peak memory of a rank, weights and gradients included"
        return title, ("length", *choices), rows

    def peaks(self) -> dict[tuple[str, int], int]:
        """(choice, length) -> bytes."""
        return {(h.choice, h.num_tokens): h.peak_bytes for h in self.record.held}

    def cumulated(self, choice: str) -> dict[int, float]:
        """Length -> seconds of all sequences up to it, under ``choice``."""
        times = [self.record.median_s(choice, i) for i in self.order]
        return {self.lengths[i]: t for i, t in zip(self.order, accumulate(times), strict=True)}

    def page(self, title: str) -> Page:
        """Time and memory against length, also added up from the shortest; ``title`` is on top."""
        peaks, choices, order = self.peaks(), self.record.choices(), self.order
        single = {
            c: [(self.lengths[i], self.record.median_s(c, i)) for i in order] for c in choices
        }
        summed = {c: self.cumulated(c).items() for c in choices}
        distinct = sorted(set(self.lengths))
        memory = {c: [(n, peaks[c, n] / 2**20) for n in distinct] for c in choices}
        charts = (
            _chart("Time of forward and backward", "s", single),
            _chart("Time of all sequences up to a length", "s", summed),
            _chart("Peak memory of a rank", "MiB", memory),
        )
        return Page(title, charts, self.bands())

    def bands(self) -> list[Bands]:
        """What ``auto`` takes for each kind of block; nothing where there is nothing to choose."""
        planned = sorted(self.record.planned, key=lambda p: p.num_tokens)
        planned = [p for p in planned if p.num_tokens in self.lengths]
        out = []
        for kind in dict.fromkeys(kind for p in planned for kind in p.shares):
            shares = {p.num_tokens: p.shares[kind] for p in planned if kind in p.shares}
            if all(name in ATTENTION_STRATEGIES for of in shares.values() for name in of):
                title = f"Strategies of {kind} blocks under auto"
                out.append(Bands(title, tuple(shares), tuple(shares.values())))
        return out

    def write_csv(self, path: Path) -> None:
        """Writes every run to ``path``, with what belongs to its sequence."""
        peaks = self.peaks()
        choices = self.record.choices()
        totals = {c: self.cumulated(c) for c in choices}
        medians = {(c, i): self.record.median_s(c, i) for c in choices for i in self.order}
        file = io.StringIO(newline="")
        writer = csv.writer(file)
        writer.writerow((*COLUMNS, "peak_bytes"))
        for r in self.record.replayed:
            seconds = (r.time_s, medians[r.choice, r.index], totals[r.choice][r.num_tokens])
            cells = (r.index, r.num_tokens, r.choice, r.plan, *(f"{s:.6f}" for s in seconds))
            writer.writerow((*cells, peaks[r.choice, r.num_tokens]))
        write_whole(path, file.getvalue().encode())
