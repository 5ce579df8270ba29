"""``paradyse profile``: measures a model's blocks on the machine, with a progress bar."""

from __future__ import annotations

import argparse
from functools import partial

from rich.console import Console

from paradyse.cli import launch
from paradyse.cli.json_output import show_json
from paradyse.cli.models import (
    LlamaSize,
    checked_config,
    make_llama,
    make_model,
    require_transformers,
)
from paradyse.cli.outputs import check_file
from paradyse.cli.screen import Screen, make_console, show_table
from paradyse.config import BLOCK_KINDS
from paradyse.planning.profile_file import MEASURED, Measurement, Profile, own_lines
from paradyse.planning.units import format_seconds


def run_profile(args: argparse.Namespace) -> int:
    """Measures every block under every strategy at every length that ``args`` give.

    Raises:
        ValueError: also where the file is of another setting.
    """
    require_transformers()
    path = check_file("--out", args.out).resolve()
    own_lines(path)
    if args.model:
        config = checked_config(args.model, args.layers, "--lengths", max(args.lengths))
        make = partial(make_model, config, args.layers, dtype=args.dtype)
    else:
        make = partial(make_llama, LlamaSize(args.layers or 2), dtype=args.dtype)
    arguments = {
        "path": str(path),
        "lengths": args.lengths,
        "batch": args.batch,
        "strategies": args.strategies,
        "training": not args.forward_only,
        "memory_limit": args.memory_limit,
        "repeats": args.repeats,
        "options": {"inner": args.inner},
        "overwrite": args.overwrite,
        "levers": args.levers or (),
        "seconds": args.seconds,
    }
    device = launch.choose_device(args.device, args.ranks)
    console = make_console(args.json)
    if device == "cpu" and args.ranks > (cores := launch.num_cores()):
        console.print(
            f"{args.ranks} ranks share {cores} core{'s' * (cores > 1)}: what a block takes depends "
            "on when the others run, and lengths beyond the longest are predicted badly"
        )
    with Screen(console, 0) as screen:
        screen.phase("starting ranks, compiling")
        found = launch.run_as_asked(
            args,
            "paradyse.cli.rank_jobs:profile",
            {"make": make, "sharded": args.sharded, "arguments": arguments},
            lambda p: screen.progress(p.done, p.total, p.text or "done"),
        )[0]
    show_summary(console, found, args)
    if args.json:
        show_json(found)
    return 0


def show_summary(console: Console, found: Profile, args: argparse.Namespace) -> None:
    """Shows on ``console`` the fastest strategies in ``found``, by block and length of ``args``."""
    mine = [
        m
        for m in found.measurements
        if m.batch == args.batch and m.training != args.forward_only and m.seq_len in args.lengths
    ]
    blocks = sorted({(m.kind, m.structure) for m in mine if m.kind in BLOCK_KINDS})
    names = [f"{kind} {structure}" for kind, structure in blocks]
    rows = []
    for n in sorted({m.seq_len for m in mine}):
        at = [[m for m in mine if (m.kind, m.structure, m.seq_len) == (*b, n)] for b in blocks]
        rows.append([str(n), *map(_fastest, at)])
    title = f"fastest strategy of a block, batch {args.batch}, {found.header.num_ranks} ranks"
    show_table(console, title, ("length", *names), rows)
    console.print(f"{found.path}: {len(found.measurements)} measurements")


def _fastest(measurements: list[Measurement]) -> str:
    fits = [m for m in measurements if m.outcome == MEASURED]
    if not fits:
        return measurements[0].outcome if measurements else "-"
    best = min(fits, key=lambda m: m.forward_s + m.backward_s)
    return f"{best.strategy} {format_seconds(best.forward_s + best.backward_s)}"
