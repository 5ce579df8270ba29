"""``paradyse verify`` and ``paradyse plan``: on a model of the user's."""

from __future__ import annotations

import argparse
from typing import Any

from paradyse.cli import launch
from paradyse.cli.commands.demo import setting_of
from paradyse.cli.models import read_config, require_transformers
from paradyse.cli.screen import make_console


def _call(args: argparse.Namespace, function: str, arguments: dict[str, Any], what: str) -> Any:
    """Rank 0's result, with a sign of life on a terminal."""
    device = launch.choose_device(args.device, args.ranks)
    console = make_console()
    with console.status(f"{what} on {args.ranks} ranks ..."):
        return launch.run_ranks(
            f"paradyse.cli.rank_jobs:{function}", args.ranks, arguments, setting_of(args, device)
        )[0]


def run_verify(args: argparse.Namespace) -> int:
    """Every strategy against one-device eager, on a model of the user's; the exit code."""
    require_transformers()
    report = _call(
        args,
        "verify",
        {
            "config": read_config(args.model),
            "layers": args.layers,
            "dtype": args.dtype,
            "batch": args.batch,
            "seq_len": args.seq_len,
            "seed": args.seed,
            "options": {"inner": args.inner},
        },
        "verifying every strategy",
    )
    console = make_console()
    console.print(report if console.is_terminal else str(report), markup=False, highlight=False)
    return 0 if report.ok else 1


def run_plan(args: argparse.Namespace) -> int:
    """The plan for each length, and why it is that one."""
    require_transformers()
    reports = _call(
        args,
        "plan",
        {
            "config": read_config(args.model),
            "layers": args.layers,
            "dtype": args.dtype or "float32",
            "batch": args.batch,
            "lengths": args.lengths or [128, 1024, 8192],
            "options": {
                "inner": "eager",
                "plan": args.plan,
                "memory_limit": args.memory_limit,
            },
        },
        "planning",
    )
    console = make_console()
    for report in reports:
        console.print(report if console.is_terminal else str(report), markup=False, highlight=False)
        console.print()
    return 0
