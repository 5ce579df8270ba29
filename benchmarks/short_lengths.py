"""Levers that a plan may use and does not need: short sequences with them and without.

    python benchmarks/short_lengths.py            # ten minutes on two cores

A Llama on two ranks, weights sharded, with a profile and a memory limit that --longest tokens do
not fit without levers. ``auto`` with all levers allowed takes turns with ``auto`` without any, at
lengths that fit. They may have different times by other plans, or by the time that choosing takes.
"""

from argparse import Namespace
from tempfile import TemporaryDirectory
from typing import Any

from bounded import Bounded
from contenders import AUTO, llama, make_profile, ours, plans_of
from runner import Benchmark, benchmark, median, milliseconds, noise_of, take_turns

import paradyse
from paradyse.cli.launch import Rank

OPTIONS: dict[str, Any] = {"layers": 4, "hidden": 256, "lengths": (128, 256, 512, 1024, 2048)}
OPTIONS |= {"longest": 8192, "rounds": 21, "ranks": 2, "inner": "inductor"}
QUICK = {"layers": 1, "hidden": 64, "lengths": (64, 96), "longest": 512, "rounds": 2}

WITH, WITHOUT = "all levers", "none"

MOST = 1.0
"""Goal: beyond noise, per cent of a step's time."""


def measure(rank: Rank, args: Namespace) -> dict[str, Any]:
    """Seconds of every step, and the plans that ran."""
    model, other = (paradyse.shard(llama(args.layers, args.hidden)) for _ in range(2))
    lengths = [args.longest >> i for i in range(6, -1, -2)]
    make_profile(rank, model, args, lengths, repeats=3)
    options: dict[str, Any] = {"cost_model": args.profile_path}
    free = Bounded(model, options | {"inner": args.inner, "levers": []}, args.lengths[0])
    limit = free.planner.least_bytes(free.workload(args.longest)) - 1
    options["memory_limit"] = limit
    without = ours(other, AUTO, args.inner, **options, levers=[])
    contenders = {WITH: ours(model, AUTO, args.inner, **options), WITHOUT: without}
    contenders[WITH].check(WITH, contenders[WITHOUT], *args.lengths)
    contenders[WITH].loss(args.longest)  # under levers, which the next short length gives back
    steps = {name: c.time_s for name, c in contenders.items()}
    seconds = take_turns(steps, args.lengths, range(-2, args.rounds), rank.report)
    return {"seconds": seconds, "plans": {n: plans_of(c.run) for n, c in contenders.items()}}


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> None:
    with TemporaryDirectory() as folder:
        args.profile_path = f"{folder}/profile.jsonl"
        found = bench.on_ranks(measure)
    bench.add(
        f"Llama of {args.layers} layers, hidden {args.hidden}, {bench.ranks}, weights sharded. The "
        f"limit is a byte below what {args.longest:,} tokens need without levers.",
        f"Milliseconds a step, medians of {args.rounds} interleaved rounds, the slower rank.",
    )
    rows = []
    for n in args.lengths:
        taken = {name: of[n] for name, of in found["seconds"].items()}
        differences = [a - b for a, b in zip(taken[WITH], taken[WITHOUT], strict=True)]
        time_s, more_s, noise_s = median(taken[WITHOUT]), median(differences), noise_of(differences)
        row = [milliseconds(time_s), milliseconds(median(taken[WITH])), f"{1e3 * more_s:+.2f}"]
        plans = [found["plans"][name].get(n, "") for name in (WITHOUT, WITH)]
        rows.append([f"{n:,}", *row, f"{1e3 * noise_s:.2f}", *plans])
        beyond = max(0.0, more_s - noise_s) / time_s
        bench.at_most(f"{n:,} tokens: longer beyond noise, %", 100 * beyond, MOST)
    at = found["plans"][WITH].get(args.longest, "")
    bench.table(["tokens", "none", "all", "longer by", "noise", "plan, none", "plan, all"], rows)
    bench.add("", f"With all levers {args.longest:,} tokens ran by {at}.")
