"""``paradyse verify``, ``paradyse plan`` and ``paradyse profile``: on model and machine."""

from __future__ import annotations

import argparse
import json
from typing import Any

from paradyse import launch
from paradyse.cli_demo import setting_of
from paradyse.cli_screen import make_console, show_table
from paradyse.integrations import read_config, require_transformers


def _call(args: argparse.Namespace, function: str, arguments: dict[str, Any], what: str) -> Any:
    """Rank 0's result, with a sign of life on a terminal."""
    device = launch.choose_device(args.device, args.ranks)
    console = make_console()
    with console.status(f"{what} on {args.ranks} ranks ..."):
        return launch.run_ranks(
            f"paradyse.cli_ranks:{function}", args.ranks, arguments, setting_of(args, device)
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


def run_profile(args: argparse.Namespace) -> int:
    """Measures the machine, and says what is not measured yet."""
    rows = _call(args, "profile", {"dtypes": args.dtypes}, "measuring")
    console = make_console()
    for row in rows:
        cells = [(k, _format(v)) for k, v in row.items() if k != "links"]
        cells += [
            (f"link {name}", f"{link['latency_s'] * 1e6:.0f} us, {link['bandwidth_bytes']:.3g} B/s")
            for name, link in row["links"].items()
        ]
        show_table(console, f"a rank's rates, {row['dtype']}", ("rate", "value"), cells)
    if args.out:
        with open(args.out, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        console.print(f"appended to {args.out}, one JSON line a dtype", highlight=False)
    console.print(
        "Measured: the machine's rates, from which plans are predicted. Profiles of blocks are not "
        "part of this version, so there is no file to give to the option 'cost_model' yet: the "
        "backend measures these rates by itself.",
        markup=False,
        highlight=False,
    )
    return 0


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
