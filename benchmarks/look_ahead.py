"""Sharded weights on two ranks: fetching the next block's weights ahead, against waiting for them.

    python benchmarks/look_ahead.py            # five minutes, most of it compilation

Llama of 4 layers, hidden 256, weights spread over two ranks. An exposed wait is a gather of weights
that was not there yet when it was asked for: a wait of over 0.1 ms. On two cores the messages need
the processors that compute, so little can hide; on GPUs they do not.
"""

import time
from argparse import Namespace
from functools import partial
from typing import Any
from unittest.mock import patch

from contenders import Switched, llama
from runner import Benchmark, benchmark, median, milliseconds, take_turns

import paradyse
from paradyse.cli.launch import Rank
from paradyse.distributed import collectives
from paradyse.distributed.axis import resolve_axis
from paradyse.distributed.lanes import Overlap

PLANS = ("megatron_cz", "ulysses_z", "megatron_ts", "metp")
WAIT_S = 1e-4
OPTIONS = {"layers": 4, "hidden": 256, "lengths": (256, 2048), "runs": 7, "ranks": 2}
QUICK = {"layers": 2, "hidden": 64, "lengths": (64,), "runs": 3, "inner": "eager"}


def measure(rank: Rank, args: Namespace) -> dict[str, Any]:
    """Plan -> ahead or without -> length -> steps: seconds, long waits, seconds of all waits."""
    waits: list[float] = []
    wait = collectives.Pending.wait

    def timed(pending: collectives.Pending) -> Any:
        start = time.perf_counter()
        out = wait(pending)
        if pending._context[0] in ("all_gather", "broadcast"):
            waits.append(time.perf_counter() - start)
        return out

    contender = Switched(paradyse.shard(llama(args.layers, args.hidden)), args.inner)

    def step(seq_len: int, ahead: bool) -> tuple[float, int, float]:
        waits.clear()
        with patch.object(resolve_axis().session.of(Overlap), "on", ahead):
            taken = contender.time_s(seq_len)
        return taken, sum(w > WAIT_S for w in waits), sum(waits)

    turns = {"ahead": partial(step, ahead=True), "without": partial(step, ahead=False)}
    found = {}
    with patch.object(collectives.Pending, "wait", timed):
        for plan in PLANS:
            contender.under(plan)
            found[plan] = take_turns(turns, args.lengths, range(-2, args.runs))
            rank.report(f"{plan} done")
    return found


@benchmark(QUICK, **OPTIONS, inner="inductor")
def main(bench: Benchmark, args: Namespace) -> None:
    found = bench.on_ranks(measure)
    bench.add(
        f"Llama of {args.layers} layers, hidden {args.hidden}, sharded over {bench.ranks}; "
        f"medians of {args.runs} interleaved runs."
    )
    rows = []
    for plan, ways in found.items():
        for n in args.lengths:
            (a, more, early), (w, most, late) = (
                map(median, zip(*of[n], strict=True)) for of in ways.values()
            )
            row = [f"{plan}, {n} tokens", milliseconds(a), milliseconds(w), f"{a / w:.2f}"]
            row += [f"{more:.0f}", f"{most:.0f}", milliseconds(early), milliseconds(late)]
            rows.append(row)
    header = ["plan", "step ahead, ms", "without, ms", "ratio"]
    header += ["exposed waits ahead", "without", "waited ahead, ms", "without, ms"]
    bench.table(header, rows)
