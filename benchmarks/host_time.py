"""Time of the host: what a step of a short sequence costs a processor, for each layer.

    python benchmarks/host_time.py            # 10 minutes

Llamas of two depths, hidden 64, float32: there is little to compute, so what is measured is what
every step costs the host. Two depths tell what a layer costs from what a step does; forward and
backward are timed apart, in seconds of a processor. One process of one thread trains eagerly, with
inductor, and with us. Then two ranks with whole weights train under ``auto`` and under one plan
that splits, and the first of them also trains the model as it is, by itself, while the other waits:
there the clock counts.

All are warmed up for as many steps as it takes until everything is compiled.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from contenders import AUTO, BACKENDS, Contender, compiled, llama, ours
from runner import Benchmark, alone, benchmark, log, median, take_turns

from paradyse.cli.launch import Rank
from paradyse.runtime.runs import FUSE_AFTER

EAGER, OURS = "eager", "paradyse"
OPTIONS: dict[str, Any] = {"layers": (2, 6), "hidden": 64, "lengths": (16, 128, 512), "runs": 41}
RANKS: dict[str, Any] = {"plan": "megatron_cz", "ranks": 2, "inner": "inductor"}
QUICK: dict[str, Any] = {"layers": (1, 2), "lengths": (16,), "runs": 2, "inner": "eager"}


class Taken(NamedTuple):
    """One step on this rank."""

    forward_s: float
    """Seconds of a processor, all threads together."""
    backward_s: float
    step_s: float
    """By the clock."""


Times = dict[tuple[str, int], dict[int, list[Taken]]]
"""Contender and number of layers -> length -> steps."""


def time_step(contender: Contender, seq_len: int) -> Taken:
    """One step of ``contender``; on ranks, from a common start."""
    ids = contender.tokens(seq_len)
    contender.model.zero_grad()
    if dist.is_initialized():
        dist.barrier()
    start, begin = time.perf_counter(), time.process_time()
    loss = contender.run(input_ids=ids, labels=ids, use_cache=False).loss
    between = time.process_time()
    loss.backward()
    end = time.process_time()
    return Taken(between - begin, end - between, time.perf_counter() - start)


def time_all(
    contenders: Mapping[tuple[str, int], Contender],
    args: Namespace,
    waits: Sequence[str] = (),
    tell: Callable[[str], object] = log,
) -> Times:
    """The steps of all, in turns; those named by ``waits`` are taken by other ranks."""
    for (name, layers), contender in contenders.items():
        if name != EAGER:
            contender.check(f"{name}, {layers} layers", contenders[EAGER, layers], *args.lengths)
    turns = {key: partial(time_step, c) for key, c in contenders.items()}
    for name, layers in contenders:
        if name in waits:
            turns[name, layers] = lambda seq_len: dist.barrier()
    return take_turns(turns, args.lengths, range(-FUSE_AFTER - 2, args.runs), tell)


def in_one_process(args: Namespace) -> Times:
    """Eager, inductor and ours."""
    torch.set_num_threads(1)
    contenders = {(EAGER, n): Contender(llama(n, args.hidden)) for n in args.layers}
    for n in args.layers:
        for name in BACKENDS if args.inner == "inductor" else (OURS,):
            model = llama(n, args.hidden)
            known = ours(model, "auto", args.inner) if name == OURS else compiled(model, name)
            contenders[name, n] = known
    return time_all(contenders, args)


def on_ranks(rank: Rank, args: Namespace) -> Times:
    """Ours on all ranks, and the first one by itself."""
    contenders = {(EAGER, n): Contender(llama(n, args.hidden)) for n in args.layers}
    for n in args.layers:
        for plan in (AUTO, args.plan):
            contenders[plan, n] = ours(llama(n, args.hidden), plan, args.inner)
    return time_all(contenders, args, [EAGER] if rank.rank else [], rank.report)


def rows_of(times: Times, args: Namespace) -> dict[tuple[str, int], tuple[float, ...]]:
    """Contender and length -> seconds a layer, forward and backward; seconds a step beside layers;
    seconds of a step of the deeper model by the clock."""
    few, many = min(args.layers), max(args.layers)
    found = {}
    for name in dict.fromkeys(n for n, _ in times):
        for seq_len in args.lengths:
            deep, flat = times[name, many][seq_len], times[name, few][seq_len]
            both = [
                [median([taken[i] for taken in steps]) for steps in (flat, deep)] for i in (0, 1)
            ]
            forward, backward = ((b - a) / (many - few) for a, b in both)
            rest = sum(a for a, _ in both) - few * (forward + backward)
            step = median([taken.step_s for taken in deep])
            found[name, seq_len] = forward, backward, rest, step
    return found


def add_table(bench: Benchmark, times: Times, args: Namespace, above: str) -> dict[Any, Any]:
    """Reports ``times``; returns what ``rows_of`` gives."""
    found = rows_of(times, args)
    rows = []
    for (name, seq_len), (forward, backward, rest, step) in found.items():
        values = forward, backward, forward + backward, rest, step
        rows.append([f"{name}, {seq_len} tokens", *(f"{s * 1e3:.2f}" for s in values)])
    columns = [
        "forward",
        "backward",
        "a layer",
        "beside layers",
        f"step, {max(args.layers)} layers",
    ]
    bench.table(["ms", *columns], rows, above)
    return found


@benchmark(QUICK, **OPTIONS, **RANKS)
def main(bench: Benchmark, args: Namespace) -> str:
    few, many = min(args.layers), max(args.layers)
    bench.add(
        f"Llamas of {few} and {many} layers, hidden {args.hidden}; processor time in milliseconds, "
        f"medians of {args.runs} interleaved steps. Forward, backward and their sum are those of "
        "one layer; the last column is a step by the clock."
    )
    alone_times = alone(in_one_process, args)
    found = add_table(bench, alone_times, args, "One process of one thread")
    first = min(args.lengths)
    per_layer = sum(found[OURS, first][:2])
    bench.at_most(f"ms of the host a layer, {first} tokens, one process", per_layer * 1e3, 0.5)
    times = bench.on_ranks(on_ranks)
    found = add_table(bench, times, args, bench.ranks)
    at = min(args.lengths, key=lambda n: abs(n - 128))
    share = found[AUTO, at][-1] / found[EAGER, at][-1]
    what = f"a step of {at} tokens on {bench.num_ranks} ranks over an eager one of one process"
    bench.at_most(what, share, 1.5)
    return f"one process, then {bench.num_ranks}, of one thread each"
