"""The longest sequence that trains under a memory limit, by the levers that plans may use.

    python benchmarks/longest.py            # half an hour on two cores

A Llama with a vocabulary of 32,768, in one process and on two ranks, weights sharded. The limit is
what --length tokens need without levers. A profile of up to --longest tokens is made first, without
a limit (whole logits take 11 GB then); then the planner says how far it gets without levers, with
each alone and with all, and steps of these lengths are measured: weights, gradients and two moments
of an optimizer, and the most that is held beyond them.
The same steps run once more in processes that may map no more memory than the limit leaves beyond
weights and moments (RLIMIT_AS, so Linux only), and a tenth for what lies between allocations.

Tiles have --tile tokens of a rank, fewer than usual, so that there are several at lengths that two
cores can bear. Levers that keep something on the host are left out: here that is the same memory.
"""

from __future__ import annotations

import math
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from bounded import MOST, Bounded, capped, largest
from contenders import AUTO, llama, make_profile
from runner import Benchmark, benchmark

import paradyse
from paradyse.cli.launch import Rank
from paradyse.planning.explain import short_key
from paradyse.planning.units import format_bytes
from paradyse.strategies import head, tiles
from paradyse.types import LEVERS, ON_HOST, Point

OPTIONS: dict[str, Any] = {"layers": 2, "hidden": 128, "vocabulary": 32768, "length": 512}
OPTIONS |= {"longest": 8192, "tile": 128, "ranks": (1, 2), "inner": "eager"}
OPTIONS["strategies"] = ("megatron_ts", "megatron_cz", "metp")
QUICK = {"hidden": 64, "layers": 1, "vocabulary": 512, "length": 128, "longest": 256, "tile": 16}

NONE, ALL = "none", "all"

SLACK = 0.1
"""Share of a cap that the allocator may lose between allocations."""

TIMES, OFF = 8, 5
"""Goals: longest with all levers over longest with none, at least; per cent that predictions are
off, at most."""


@contextmanager
def small_tiles(tokens: int) -> Iterator[None]:
    """Inside, tiles have so many ``tokens`` of a rank."""
    constants = {"TILE_TOKENS": tokens, "MIN_TILE_TOKENS": tokens}
    with patch.multiple(tiles, **constants), patch.multiple(head, TILE_TOKENS=tokens):
        yield


def measure(rank: Rank, args: Namespace) -> dict[str, Any]:
    """The limit, what is static, and a row of figures for each set of levers."""
    model = llama(args.layers, args.hidden, vocabulary=args.vocabulary)
    if rank.size > 1:
        paradyse.shard(model)
    lengths = [args.longest >> i for i in range(4, -1, -1)]
    options = {"inner": args.inner, "strategies": args.strategies, "retry_out_of_memory": False}
    with small_tiles(args.tile):
        plain = Bounded(model, options | {"levers": []}, lengths[0])
        used = levers_of(plain)
        given = {"repeats": 1, "levers": used, "strategies": args.strategies}
        make_profile(rank, model, args, lengths, **given)
        options["cost_model"] = args.profile_path
        free = Bounded(model, options | {"levers": []}, lengths[0])
        limit = free.planner.least_bytes(free.workload(args.length))
        sets = {NONE: [], **{v: [v] for v in used}, ALL: used}
        with free.prepared():
            rows = {
                name: bound(rank, model, options | {"memory_limit": limit, "levers": levers}, name)
                for name, levers in sets.items()
            }
            check_auto(rows, Bounded(model, options | {"memory_limit": limit}, 16), limit)
            longest = max(row["said"] for row in rows.values())
            rows[NONE]["at most"] = trains(free, longest, limit)
    return {"limit": limit, "static": free.planner.static_bytes, "rows": rows}


def levers_of(steps: Bounded) -> list[str]:
    """Those that any block of the model can have, or its head, without the host."""
    points = {v for b in steps.blocks for p in b.points() for v in Point.parse(p).levers}
    points |= {v for p in (steps.head.points() if steps.head else ()) for v in p.split("+")}
    return [v for v in LEVERS if v in points - {*ON_HOST}]


def bound(rank: Rank, model: Any, options: dict[str, Any], name: str) -> dict[str, Any]:
    """How far plans with these levers get, and what they hold there."""
    steps, limit = Bounded(model, options, 16), options["memory_limit"]
    said = steps.planner.longest(steps.workload(1), MOST)
    above = steps.refusal(said + max(1, said >> 9), AUTO)  # before a step's own peak is learnt from
    held = steps.held(AUTO, said)
    rank.report(f"{name}: {said} tokens, {100 * held / limit:.1f} % of the limit")
    plan = steps.planner.plan(steps.workload(said))
    row = {"said": said, "held": held, "plan": short_key(plan.key), "refusal": above}
    return row | {"capped": trains(steps, said, limit)}


def check_auto(rows: dict[str, dict[str, Any]], auto: Bounded, limit: int) -> None:
    """Adds to each of ``rows`` what ``auto`` holds at its longest length."""
    for row in rows.values():
        row["auto"] = auto.held(AUTO, row["said"])


def trains(steps: Bounded, seq_len: int, limit: int) -> bool:
    """Whether a step works where no more memory can be had than the limit leaves."""
    steps.run(16, AUTO)
    steps.free()
    static = steps.planner.static_bytes
    gradients = static // 4  # beside weights and two moments; the step begins without
    failed = False
    with capped(int((limit - static + gradients) * (1 + SLACK))):
        try:
            steps.run(seq_len, AUTO)
        except (RuntimeError, MemoryError):
            failed = True
    steps.free()
    if dist.is_initialized():
        dist.barrier()
    return not largest(failed)


def share(num_bytes: float, limit: int) -> str:
    return "refused" if num_bytes == math.inf else f"{100 * num_bytes / limit:.1f} %"


def report(bench: Benchmark, found: dict[str, Any], args: Namespace) -> None:
    """Table and goals of one number of ranks."""
    limit, rows = found["limit"], found["rows"]
    of = f"{args.ranks} rank{'s' * (args.ranks > 1)}"
    none = rows[NONE]["said"]
    table = []
    for name, row in rows.items():
        cells = [name, f"{row['said']:,}", f"{row['said'] / none:.1f}x"]
        cells += [share(row["held"], limit), share(row["auto"], limit)]
        table.append([*cells, "trains" if row["capped"] else "**runs out**", row["plan"]])
    header = ["levers", "longest, tokens", "of none", "held there", "`auto` holds there"]
    title = f"## {of}: {format_bytes(limit)} a rank, {format_bytes(found['static'])} of them static"
    bench.table([*header, "under RLIMIT_AS", "plan"], table, title)
    at_most = "trains" if rows[NONE]["at most"] else "runs out of memory"
    bench.add(
        "",
        f"Without levers the longest of these lengths {at_most} under RLIMIT_AS.",
        f"A little longer, with all: {rows[ALL]['refusal'] or '**not refused**'}",
    )
    bench.at_least(f"{of}: longest with all levers over none", rows[ALL]["said"] / none, TIMES)
    off = max(abs(row["held"] / limit - 1) for row in rows.values())
    bench.at_most(f"{of}: prediction off, most of any, %", 100 * off, OFF)
    most = max(max(row["held"], row["auto"]) for row in rows.values())
    bench.at_most(f"{of}: most that was held, of the limit", most / limit, 1.0)
    silent = [name for name, row in rows.items() if "memory_limit" not in row["refusal"]]
    if silent:
        bench.add(f"Not refused just above their longest length, by levers: {', '.join(silent)}.")
    bench.at_most(f"{of}: lengths just above that are not refused in words", len(silent), 0)
    failed = sum(not row["capped"] for row in rows.values()) + rows[NONE]["at most"]
    bench.at_most(f"{of}: otherwise than predicted under RLIMIT_AS", failed, 0)


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> None:
    bench.add(
        f"Llama of hidden {args.hidden}, {args.layers} layers, vocabulary {args.vocabulary:,}, "
        f"inner={args.inner}, tiles of {args.tile} tokens of a rank. The limit is what "
        f"{args.length} tokens need without levers; shares are of it, as measured."
    )
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed is given back
    for num_ranks in list(args.ranks):
        args.ranks = num_ranks
        with tempfile.TemporaryDirectory() as folder:
            args.profile_path = f"{folder}/profile.jsonl"
            report(bench, bench.on_ranks(measure), args)
