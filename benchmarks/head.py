"""The head by tiles against whole logits: seconds and memory of a training step.

    python benchmarks/head.py                     # ten minutes: a step of 32,768 tokens takes 20 s

Llama of one layer, hidden 256, vocabulary 32,768, float32, in one process of all cores. Whole
logits of 32,768 tokens are 4 GiB, and so is their gradient. Both contenders live in one process and
take turns. Peak memory is the resident peak (VmHWM, so Linux only) of a process of its own for each
after one step, libraries included.
"""

from argparse import Namespace
from functools import partial
from typing import Any

import torch
from contenders import Contender, llama, ours
from runner import Benchmark, alone, benchmark, log, median, take_turns

from paradyse.cli.rank_jobs import peak_bytes

LEVERS = {"whole": "", "tiled": "tiled"}
GOALS = {8192: 1.05, 32768: 1.0}
"""Tokens -> seconds by tiles over seconds of whole logits, at most."""
OPTIONS: dict[str, Any] = {"lengths": tuple(GOALS), "runs": 5, "hidden": 256, "vocabulary": 32768}
QUICK = {"lengths": (256,), "runs": 1, "hidden": 64, "vocabulary": 512}


def contender(name: str, args: Namespace) -> Contender:
    """The Llama with its head computed so."""
    model = llama(1, args.hidden, vocabulary=args.vocabulary)
    return ours(model, {"head": LEVERS[name]}, "inductor")


def peak_gib(name: str, seq_len: int, args: Namespace) -> float:
    """GiB resident at most in this process after one step."""
    contender(name, args).loss(seq_len)
    return peak_bytes("cpu") / 2**30


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> str:
    contenders = {name: contender(name, args) for name in LEVERS}
    contenders["tiled"].check("tiled", contenders["whole"], min(args.lengths))
    steps = {name: c.time_s for name, c in contenders.items()}
    seconds = take_turns(steps, args.lengths, range(-1, args.runs), partial(log, "head"))
    rows = []
    for n in args.lengths:
        whole, tiled = (median(seconds[name][n]) for name in LEVERS)
        peaks = [f"{alone(peak_gib, name, n, args):.2f}" for name in LEVERS]
        rows.append(
            [f"{n:,} tokens", f"{whole:.3f}", f"{tiled:.3f}", f"{tiled / whole:.2f}", *peaks]
        )
        if n in GOALS:
            bench.at_most(f"{n:,} tokens, seconds by tiles over whole", tiled / whole, GOALS[n])
    bench.add(
        f"Llama of one layer, hidden {args.hidden}, vocabulary {args.vocabulary:,}; medians of "
        f"{args.runs} interleaved steps."
    )
    header = ["step of", "whole logits, s", "by tiles, s", "ratio"]
    bench.table([*header, "whole, peak GiB", "tiles, peak GiB"], rows)
    return f"one process of {torch.get_num_threads()} threads"
