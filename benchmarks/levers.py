"""Levers of blocks: what each costs in time and gives in memory, at equal length.

    python benchmarks/levers.py            # ten minutes on two cores, a third of it compilation

A Llama on two ranks, compiled once; its plan is set before every step. Tiles have --tile tokens
of a rank, fewer than usual, so that there are several at lengths that two cores can bear.
"""

from argparse import Namespace
from itertools import product
from unittest.mock import patch

from contenders import Switched, llama
from runner import Benchmark, benchmark, median, milliseconds, take_turns

from paradyse.cli.launch import Rank
from paradyse.strategies import tiles

OPTIONS = {"layers": 2, "hidden": 256, "lengths": (1024, 4096, 8192), "rounds": 5, "tile": 1024}
OPTIONS |= {"strategies": ("megatron_cz", "megatron_ts"), "ranks": 2, "inner": "inductor"}
QUICK = {"hidden": 64, "lengths": (64,), "rounds": 2, "tile": 16, "inner": "eager"}

LEVERS = {
    "none": ("", ""),
    "recompute": ("+recompute", "+recompute"),
    "selective": ("+selective", ""),
    "tiled": ("", "+tiled"),
    "selective, tiled": ("+selective", "+tiled"),
}
"""Name -> what follows the strategy of attention and of MLPs."""

Figures = tuple[float, int]
"""Seconds of a step, the median; the most bytes that it holds."""


def measure(rank: Rank, args: Namespace) -> dict[tuple[str, int, str], Figures]:
    """(strategy, length, levers) -> time and memory."""
    model = Switched(llama(args.layers, args.hidden), args.inner)
    plans = {
        (s, name): {"attention": s + attention, "mlp": s + mlp}
        for s, (name, (attention, mlp)) in product(args.strategies, LEVERS.items())
    }
    with patch.multiple(tiles, TILE_TOKENS=args.tile, MIN_TILE_TOKENS=args.tile):
        model.check_plans(rank, plans.values(), args.lengths[0])
        held = {
            (*key, n): model.under(plan).peak_bytes(n)
            for (key, plan), n in product(plans.items(), args.lengths)
        }
        rank.report("memory done")
        turns = {key: lambda n, p=plan: model.under(p).time_s(n) for key, plan in plans.items()}
        taken = take_turns(turns, args.lengths, range(-1, args.rounds), rank.report)
    return {
        (s, n, name): (median(taken[s, name][n]), held[s, name, n])
        for (s, name), n in product(plans, args.lengths)
    }


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> None:
    found = bench.on_ranks(measure)
    bench.add(
        f"Llama of {args.layers} layers, hidden {args.hidden}, {bench.ranks}, tiles of {args.tile} "
        f"tokens of a rank. Medians of {args.rounds} interleaved rounds, the slower rank; memory "
        "of the rank that holds more, beyond weights."
    )
    for strategy, n in product(args.strategies, args.lengths):
        time_s, held = found[strategy, n, "none"]
        rows = [
            [name, milliseconds(t), f"{t / time_s:.2f}", f"{m / 2**20:.1f}", f"{m / held:.2f}"]
            for name in LEVERS
            for t, m in [found[strategy, n, name]]
        ]
        header = ["levers", "ms", "of none", "peak, MiB", "of none"]
        bench.table(header, rows, f"## {strategy}, {n:,} tokens")
