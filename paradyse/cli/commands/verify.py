"""``paradyse verify``: every strategy against one device, on a model of the user's."""

from __future__ import annotations

import argparse
from functools import partial

from paradyse.cli import launch
from paradyse.cli.json_output import show_json
from paradyse.cli.models import checked_config, make_model, require_transformers
from paradyse.cli.screen import make_console


def run_verify(args: argparse.Namespace) -> int:
    """Compares every strategy with one-device eager on the model of ``args``: loss and every
    gradient; 1 where they differ."""
    require_transformers()
    config = checked_config(args.model, args.layers, "--seq-len", args.seq_len)
    arguments = {
        "make": partial(make_model, config, args.layers, args.seed, args.dtype),
        "batch": args.batch,
        "seq_len": args.seq_len,
        "options": {"inner": args.inner},
    }
    console = make_console(args.json)
    with console.status(f"verifying every strategy on {args.ranks} ranks ..."):
        report = launch.run_as_asked(args, "paradyse.cli.rank_jobs:verify", arguments)[0]
    console.print(report if console.is_terminal else str(report))
    if args.json:
        show_json({"ok": report.ok, "report": report})
    return 0 if report.ok else 1
