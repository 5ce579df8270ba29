"""``paradyse bench``: a trace of lengths under ``auto`` and every strategy; table, CSV, charts."""

from __future__ import annotations

import argparse
from pathlib import Path

from paradyse.cli import launch
from paradyse.cli.commands.demo import llama_size
from paradyse.cli.json_output import show_json
from paradyse.cli.models import require_transformers
from paradyse.cli.outputs import check_folder
from paradyse.cli.results import Record, Results, check_runs
from paradyse.cli.screen import Screen, make_console, show_table
from paradyse.cli.traces import trace_of
from paradyse.types import ALONG_SEQUENCE


def run_bench(args: argparse.Namespace) -> int:
    """Replays a trace of lengths, that of ``args``, under auto and every strategy.

    Raises:
        ValueError: one rank, and strategies by which several share work.
    """
    require_transformers()
    if args.strategies and args.ranks == 1:
        raise ValueError("--strategies share work among ranks: give --ranks 2 or more")
    _check_paths(args)
    console = make_console(args.json)
    lengths, source = trace_of(args)
    device = launch.choose_device(args.device, args.ranks)
    strategies = (args.strategies or ALONG_SEQUENCE) if args.ranks > 1 else ()
    size = llama_size(args, max(lengths))
    rate, links = launch.choose_links(args, device)
    title = (
        f"{size}; {args.ranks} rank{'s' * (args.ranks > 1)} on {device}, weights {args.weights}, "
        f"{links}; inner compiler: {args.inner}; trace of {len(lengths)} lengths from "
        f"{min(lengths)} to {max(lengths)} {source}"
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
                "sharded": args.weights == "sharded",
            },
            lambda value: record.hear(screen, value),
            rate=rate,
        )
    results = Results(record)
    for table in results.tables():
        show_table(console, *table)
    for infeasible in record.infeasible:
        console.print(f"{infeasible.choice}: {infeasible.why}")
    written = [results.write_csv(Path(args.csv))] if args.csv else []
    if args.out:
        written += results.write(Path(args.out), "bench", title)
    for line in written:
        console.print(line)
    if args.json:
        runs, peaks = record.replayed, record.held
        show_json({"setting": title, "runs": runs, "peaks": peaks, "infeasible": record.infeasible})
    return 0


def _check_paths(args: argparse.Namespace) -> None:
    """Before the work, not after it."""
    if args.out:
        check_runs("--out", str(check_folder("--out", args.out) / "bench.csv"))
    if args.csv:
        check_runs("--csv", args.csv)
