"""``paradyse demo``: a model over ranks, its plans, and what they are worth.

It trains on real text, replays some of it under each static strategy, and trains once more
in one process, eagerly: the losses of both trainings have to agree.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from paradyse.cli import launch
from paradyse.cli.corpus import TextFile, draw_files, length_ranges
from paradyse.cli.models import LlamaSize, require_transformers
from paradyse.cli.outputs import check_folder
from paradyse.cli.rank_jobs import StepDone
from paradyse.cli.results import Record, Results, check_runs, choice_times, marks
from paradyse.cli.screen import Screen, make_console, show_table
from paradyse.config import AUTO
from paradyse.planning.units import format_bytes
from paradyse.types import ALONG_SEQUENCE

TOLERANCE = 1e-4
"""Of a loss, relative, in float32: sums over ranks are rounded in another order."""


def llama_size(args: argparse.Namespace, max_tokens: int) -> LlamaSize:
    """The model that ``args`` describe, for ``max_tokens``. Heads are 32 wide by default."""
    heads = args.heads or max(1, args.hidden // 32)
    kv_heads = args.kv_heads or (heads // 2 if heads % 2 == 0 else heads)
    intermediate = args.intermediate or math.ceil(args.hidden * args.wide / 8) * 8
    return LlamaSize(args.layers, args.hidden, heads, kv_heads, intermediate, max_tokens=max_tokens)


def pick_files(files: Sequence[TextFile], ranges: Sequence[range], per_range: int) -> list[int]:
    """Indices of up to ``per_range`` of ``files`` in each of ``ranges``, spread over lengths."""
    picked = []
    for r in ranges:
        known: dict[int, int] = {}
        for i, f in enumerate(files):
            if f.num_tokens in r:
                known.setdefault(f.num_tokens, i)
        inside = [known[n] for n in sorted(known)]
        k = min(per_range, len(inside))
        # The middle of each of k equal parts: neither the shortest nor the longest alone.
        picked += [inside[(2 * j + 1) * len(inside) // (2 * k)] for j in range(k)]
    return picked


def run_demo(args: argparse.Namespace) -> int:
    """Trains, replays, checks as ``args`` say; 1 where the losses differ from one process's."""
    require_transformers()
    console = make_console()
    began = time.monotonic()
    device = launch.choose_device(args.device, args.ranks)
    size = llama_size(args, args.cap)
    files = draw_files(args.steps, args.cap, args.seed, args.text)
    ranges = length_ranges(args.cap)
    strategies = ALONG_SEQUENCE if args.ranks > 1 else ()
    picked = pick_files(files, ranges, args.per_range)
    check_runs("--out", str(check_folder("--out", args.out) / "demo.csv"))
    rate, links = launch.choose_links(args, device)
    where = "GPUs, NCCL" if device == "cuda" else f"CPUs, gloo, {launch.num_cores()} cores"
    lengths = sorted(f.num_tokens for f in files)
    console.print(
        f"HuggingFace {size}\n"
        f"{args.ranks} rank{'s' * (args.ranks > 1)} on {where}, weights {args.weights}; plan: "
        f"{args.plan}; inner compiler: {args.inner}\n"
        f"{links}\n"
        f"{len(files)} files of {args.text or 'the Python standard library'}, bytes as tokens: "
        f"{lengths[0]} to {lengths[-1]}, median {lengths[len(lengths) // 2]}",
    )

    record = Record()
    with Screen(console, args.steps) as screen:
        screen.phase(f"starting {args.ranks} rank{'s' * (args.ranks > 1)}")
        results = launch.run_as_asked(
            args,
            "paradyse.cli.rank_jobs:train",
            {
                "size": size,
                "files": files,
                "seed": args.seed,
                "options": {"inner": args.inner, "plan": args.plan},
                "replay_at": picked,
                "rounds": args.rounds if strategies else 0,
                "strategies": strategies,
                "sharded": args.weights == "sharded",
            },
            lambda value: record.hear(screen, value),
            rate=rate,
        )
        alone: list[StepDone] = []

        def hear_alone(value: StepDone) -> None:
            alone.append(value)
            screen.tick()

        screen.phase("the same training in one process, eager", args.steps)
        given = {"size": size, "files": files, "seed": args.seed}
        launch.run_as_asked(args, "paradyse.cli.rank_jobs:train_alone", given, hear_alone, 1)
    trained = AUTO if args.plan == AUTO else "training's plan"
    _summarize(console, args, ranges, record, results, trained)
    if record.replayed:
        title = f"{size}; {args.ranks} ranks, weights {args.weights}; {links}"
        for line in Results(record, trained).write(Path(args.out), "demo", title):
            console.print(line)
    else:
        console.print(
            f"nothing was replayed, so {args.out} has no charts: give --rounds, --ranks 2"
        )
    ok = _check_losses(console, args, record.steps, alone)
    console.print(f"{time.monotonic() - began:.0f} s in all")
    return 0 if ok else 1


def _summarize(
    console: Console,
    args: argparse.Namespace,
    ranges: Sequence[range],
    record: Record,
    results: list[dict[str, Any]],
    trained: str,
) -> None:
    choices = [c for c in record.choices() if c != AUTO]
    rows = []
    for r in ranges:
        steps = [s for s in record.steps if s.num_tokens in r]
        if not steps:
            continue
        plans = Counter(s.plan for s in steps)
        plan = "; ".join(p if len(plans) == 1 else f"{p} ({n})" for p, n in plans.most_common())
        at = sorted({x.index for x in record.replayed if x.num_tokens in r})
        rows.append(
            (f"{r.start}-{r.stop - 1}", str(len(steps)), plan, *choice_times(record, choices, at))
        )
    header = ("length", "steps", "plan used", trained, *choices)
    console.print()
    if record.replayed:
        everything = sorted({x.index for x in record.replayed})
        rows.append(("all", str(len(record.steps)), "", *choice_times(record, choices, everything)))
        title = (
            f"forward and backward of the same files, {len(everything)} in all, up to "
            f"{args.per_range} of each range, under {trained} and each static plan: medians of "
            f"{record.num_rounds()} warm runs, interleaved; {marks(trained)}"
        )
        show_table(console, title, header, rows)
    else:
        show_table(console, "plans by length", header[:3], [r[:3] for r in rows])
    for i in record.infeasible:
        console.print(f"{i.choice}: {i.why}")
    stats = results[0]["stats"]
    peaks = ", ".join(format_bytes(r["peak_bytes"]) for r in results)
    console.print(
        f"training: {stats.captures} captures, {stats.variants_compiled} variants of blocks "
        f"compiled, {stats.plan_switches} plan switches; "
        f"{format_bytes(sum(stats.bytes_per_collective.values()))} sent by rank 0; "
        f"peak memory by rank: {peaks}",
    )


def _check_losses(
    console: Console, args: argparse.Namespace, ours: Sequence[StepDone], alone: Sequence[StepDone]
) -> bool:
    """Prints and returns whether the losses of the ranks are the one-process losses."""
    errors = [abs(a.loss - b.loss) / abs(b.loss) for a, b in zip(ours, alone)]
    worst = max(range(len(errors)), key=errors.__getitem__)
    ok = len(ours) == args.steps and all(e <= TOLERANCE for e in errors)
    n = len(errors)
    over = f"{'' if n == args.steps else 'the first '}{n} step{'s' * (n > 1)}"
    many = f"{args.ranks} rank{'s' * (args.ranks > 1)}"
    console.print(
        f"{'ok' if ok else 'FAILED'}: losses of {many} against one process, eager: max relative "
        f"difference {errors[worst]:.1e} over {over} (step {worst + 1}: "
        f"{ours[worst].loss:.6f} and {alone[worst].loss:.6f}); tolerance {TOLERANCE:.0e}",
        style="green" if ok else "bold red",
        soft_wrap=True,
    )
    ours_s, alone_s = (sum(s.time_s for s in steps[: len(alone)]) for steps in (ours, alone))
    console.print(
        f"loss {ours[0].loss:.3f} at the first step, {ours[-1].loss:.3f} at the last; {over} "
        f"took {ours_s:.1f} s with compilation, one process eager {alone_s:.1f} s",
    )
    return ok
