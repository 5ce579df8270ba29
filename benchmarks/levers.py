"""Levers: what each costs in time and gives in memory, at equal length.

    python benchmarks/levers.py            # a quarter of an hour on two cores

A Llama on two ranks: first its blocks, compiled once, the plan set before every step; then its
head, with sharded weights and a large vocabulary. Tiles and chunks have --tile tokens of a rank,
fewer than usual, so that there are several at lengths that two cores can bear. What lies on the
host is in the same memory here: under `offload` and `chunked` it is the time that counts.
"""

from argparse import Namespace
from itertools import product
from unittest.mock import patch

from contenders import Contender, Switched, at_rest, llama, ours
from runner import Benchmark, benchmark, median, milliseconds, take_turns

from paradyse.cli.launch import Rank
from paradyse.strategies import head, tiles

OPTIONS = {"layers": 2, "hidden": 256, "lengths": (1024, 4096, 8192), "rounds": 5, "tile": 1024}
OPTIONS |= {"vocabulary": 32768, "ranks": 2, "inner": "inductor"}
QUICK = {"hidden": 64, "lengths": (64,), "rounds": 2, "tile": 16, "vocabulary": 512}
QUICK |= {"inner": "eager"}

NONE = "none"
LEVERS = {
    NONE: ("", ""),
    "recompute": ("+recompute", "+recompute"),
    "selective": ("+selective", ""),
    "tiled": ("", "+tiled"),
    "selective, tiled": ("+selective", "+tiled"),
    "offload": ("+offload", "+offload"),
}
"""Name -> what follows the strategy of attention and of MLPs."""

CHUNKED = {NONE: ("", ""), "chunked": ("+chunked", ""), "chunked, tiled": ("+chunked", "+tiled")}
BLOCKS = {"megatron_cz": LEVERS, "megatron_ts": LEVERS, "ulysses_z": CHUNKED}
"""Strategy -> the levers to measure it with."""

HEAD = "head"
HEADS = {NONE: "", **{levers: levers for levers in ("tiled", "vocabulary", "tiled+vocabulary")}}
"""Of the head, under one strategy of the blocks."""

Figures = tuple[float, int]
"""Seconds of a step, the median; the most bytes that it holds."""


class _Held(Switched):
    """A head's contender, whose peak can be asked for."""

    def __init__(self, contender: Contender) -> None:
        Contender.__init__(self, contender.model, contender.run)


def measure(rank: Rank, args: Namespace) -> dict[tuple[str, int, str], Figures]:
    """(strategy or ``HEAD``, length, levers) -> time and memory."""
    blocks = Switched(llama(args.layers, args.hidden), args.inner)
    plans = {
        (s, name): {"attention": s + attention, "mlp": s + mlp}
        for s, levers in BLOCKS.items()
        for name, (attention, mlp) in levers.items()
    }
    sizes = {"TILE_TOKENS": args.tile, "MIN_TILE_TOKENS": args.tile, "CHUNK_TOKENS": args.tile}
    with patch.multiple(tiles, **sizes), patch.object(head, "TILE_TOKENS", args.tile):
        blocks.check_plans(rank, plans.values(), args.lengths[0])
        held = {
            (*key, n): blocks.under(plan).peak_bytes(n)
            for (key, plan), n in product(plans.items(), args.lengths)
        }
        turns = {key: lambda n, p=plan: blocks.under(p).time_s(n) for key, plan in plans.items()}
        taken = take_turns(turns, args.lengths, range(-1, args.rounds), rank.report)

        def model() -> object:
            return llama(1, args.hidden, vocabulary=args.vocabulary)

        reference, heads = Contender(model()), {}
        for name, levers in HEADS.items():
            plan = {"attention": "megatron_cz", "mlp": "megatron_cz", "head": levers}
            heads[HEAD, name] = made = _Held(ours(at_rest(model(), True), plan, args.inner))
            made.check(name, reference, args.lengths[0])
            held |= {(HEAD, name, n): made.peak_bytes(n) for n in args.lengths}
            rank.report(f"head {name} agrees with eager")
        turns = {key: c.time_s for key, c in heads.items()}
        taken |= take_turns(turns, args.lengths, range(-1, args.rounds), rank.report)
    return {
        (s, n, name): (median(taken[s, name][n]), held[s, name, n])
        for (s, name), n in product(taken, args.lengths)
    }


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> None:
    found = bench.on_ranks(measure)
    bench.add(
        f"Llama of {args.layers} layers, hidden {args.hidden}, {bench.ranks}, tiles of {args.tile} "
        f"tokens of a rank. Medians of {args.rounds} interleaved rounds, the slower rank; memory "
        "of the rank that holds more, beyond weights."
    )
    shown = BLOCKS | {HEAD: HEADS}
    for strategy, n in product(shown, args.lengths):
        time_s, held = found[strategy, n, NONE]
        rows = [
            [name, milliseconds(t), f"{t / time_s:.2f}", f"{m / 2**20:.1f}", f"{m / held:.2f}"]
            for name in shown[strategy]
            for t, m in [found[strategy, n, name]]
        ]
        title = f"## {strategy}, {n:,} tokens"
        if strategy == HEAD:
            title += f", vocabulary {args.vocabulary:,}, one layer, weights sharded"
        header = ["levers", "ms", "of none", "peak, MiB", "of none"]
        bench.table(header, rows, title)
