"""What ranks wait for under each strategy, and how much of it is hidden behind blocks.

    python benchmarks/exposed_waits.py --like a100-nvlink     # ten minutes
    python benchmarks/exposed_waits.py --like a100-nvlink --hidden 1024 --layers 2 --lengths 2048 \\
        --plans megatron_ts     # as wide as takes four times as much arithmetic for each byte

Llama of 4 layers, hidden 256, weights sharded over two ranks, and whole on both. Every plan runs
with messages under way while blocks compute (the next block's weights, gradients; under
``megatron_ts`` own tokens are multiplied meanwhile, under ``ulysses_z`` heads go in turns), and
with each of these waited for as it is sent. Steps are timed without a profiler; a step of their own
has one, and its trace says what was waited for. On two cores the messages need the processors that
compute, so little can hide; on GPUs they do not.
"""

import contextlib
import sys
import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from contenders import Switched, at_rest, llama
from runner import Benchmark, benchmark, median, milliseconds, take_turns

from paradyse.cli.launch import Rank
from paradyse.distributed import token_linears
from paradyse.distributed.axis import resolve_axis
from paradyse.distributed.lanes import PURPOSES, Overlap
from paradyse.profiling.exposed_waits import exposed_waits
from paradyse.strategies.groups.heads import heads_at_once
from paradyse.types import ALONG_SEQUENCE

KINDS = (*PURPOSES, "tokens", "other")
"""What is waited for: messages of weights and of their gradients, what blocks exchange, and the
rest, such as the sum of the loss, where ranks meet."""

OPTIONS: dict[str, Any] = {"layers": 4, "hidden": 256, "lengths": (256, 2048), "runs": 5}
OPTIONS |= {"ranks": 2, "inner": "inductor", "plans": ALONG_SEQUENCE}
OPTIONS["traces"] = {"type": Path, "help": "a folder that keeps one trace of each, for Perfetto"}
QUICK = {"layers": 2, "hidden": 64, "lengths": (64,), "runs": 2, "inner": "eager"}


def traced(contender: Switched, seq_len: int, keep: Path | None) -> dict[str, float]:
    """Kind -> seconds of the waits of this rank in one step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz" if keep is None else keep
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            contender.loss(seq_len)
        profile.export_chrome_trace(str(path))
        found = dict.fromkeys(KINDS, 0.0)
        for wait in exposed_waits(path):
            found[wait.purpose or ("tokens" if wait.strategy else "other")] += wait.seconds
    return found


def measure(rank: Rank, args: Namespace) -> dict[str, Any]:
    """Plan and weights at rest -> overlapped or not -> length -> steps: seconds, and of waits."""
    overlap, found = resolve_axis().session.of(Overlap), dict[str, Any]()
    if args.traces:
        args.traces.mkdir(parents=True, exist_ok=True)

    def step(seq_len: int, contender: Switched, name: str, on: bool) -> dict[str, float]:
        keep = args.traces and rank.rank == 0 and on
        file = args.traces / f"{name.replace(', ', '_')}_{seq_len}.json.gz" if keep else None
        with contextlib.ExitStack() as stack:
            if not on:
                stack.enter_context(patch.object(overlap, "on", False))
                stack.enter_context(patch.object(token_linears, "MIN_ROWS", sys.maxsize))
                stack.enter_context(heads_at_once())
            return {"step": contender.time_s(seq_len), **traced(contender, seq_len, file)}

    for rest in ("sharded", "whole"):
        contender = Switched(
            at_rest(llama(args.layers, args.hidden), rest == "sharded"), args.inner
        )
        for plan in args.plans:
            contender.under(plan)
            name = f"{plan}, {rest}"
            ways = {
                on: partial(step, contender=contender, name=name, on=on) for on in (True, False)
            }
            found[name] = take_turns(ways, args.lengths, range(-1, args.runs))
            rank.report(f"{name} done")
    return found


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> None:
    found = bench.on_ranks(measure)
    bench.add(
        f"Llama of {args.layers} layers, hidden {args.hidden}, {bench.ranks}; medians of "
        f"{args.runs} interleaved runs, milliseconds. Each cell: overlapped / waited for at once."
    )
    columns = ("step", *KINDS)
    for n in args.lengths:
        rows = []
        for name, ways in found.items():
            of = {on: {c: median([r[c] for r in ways[on][n]]) for c in columns} for on in ways}
            cells = [f"{milliseconds(of[True][c])} / {milliseconds(of[False][c])}" for c in columns]
            rows.append([name, *cells, f"{of[True]['step'] / of[False]['step']:.2f}"])
        header = ["plan, weights at rest", "step", *(f"waits: {c}" for c in columns[1:]), "ratio"]
        bench.table(header, rows, f"## {n} tokens")
