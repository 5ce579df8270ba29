"""Choosing a plan: the exact solver beside the published heuristic, over random cost tables.

    python benchmarks/choice.py            # five minutes

A table gives each strategy a time, saved bytes and a workspace, for attention and for MLP blocks;
the limit is drawn between the least memory that any plan needs and that of the fastest. Both get
the same five strategies for every block, as the heuristic needs it.
"""

import math
import random
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import torch
from runner import Benchmark, benchmark, median, seconds_of

from paradyse.config import parse_options
from paradyse.planning.costs import NOTHING, BlockCost, Machine
from paradyse.planning.planner import Planner
from paradyse.planning.solver import Choices, Points
from paradyse.runtime.guard import Guard
from paradyse.types import ATTENTION_STRATEGIES, BlockSpec, Workload

SEED = 20251121
RATES = Machine(1e14, 1e12, 1e-5, 1e11)


def random_choices(rng: random.Random, layers: int) -> Choices:
    """Attention and MLP blocks: what is faster tends to need more memory."""

    def cost(fast: float) -> BlockCost:
        time_s = 1 + 2 * (1 - fast) * rng.random()
        saved = int(1e6 * (1 + 9 * fast * rng.random()))
        return BlockCost(time_s, saved, int(1e6 * rng.uniform(1, 20)), 0)

    kinds = [{s: cost(i / 4) for i, s in enumerate(ATTENTION_STRATEGIES)} for _ in range(2)]
    return Choices([ATTENTION_STRATEGIES] * 2 * layers, kinds * layers, NOTHING, 0, 0, 0.0, 0)


def with_levers(rng: random.Random, choices: Choices, layers: int) -> Choices:
    """``choices`` in which every strategy may also keep a tenth: computed again as a whole, or in
    chunks, which need little room."""

    def points(costs: Mapping[str, BlockCost]) -> dict[str, BlockCost]:
        found = dict(costs)
        for s, c in costs.items():
            kept, slower = c.saved_bytes // 10, c.time_s * rng.uniform(1.1, 1.4)
            held = c.saved_bytes + c.workspace_bytes - kept
            found[f"{s}+recompute"] = replace(
                c, time_s=slower, saved_bytes=kept, workspace_bytes=held
            )
            found[f"{s}+tiled"] = replace(
                c, time_s=slower * 1.02, saved_bytes=kept, workspace_bytes=held // 8
            )
        return found

    kinds = [points(costs) for costs in choices.costs[:2]]
    return replace(choices, names=[tuple(kinds[0])] * 2 * layers, costs=kinds * layers)


def exact_s(layers: int, num_tables: int) -> list[float]:
    """Processor seconds of the exact choice over all strategies, each with two levers."""
    rng, seconds = random.Random(SEED + layers), []
    for _ in range(num_tables):
        choices = with_levers(rng, random_choices(rng, layers), layers)
        most = choices.peak(choices.fastest(float("inf")) or ())
        limit = rng.uniform(choices.smallest()[0], most)
        choices = replace(choices)  # nothing of it is known yet
        start = time.process_time()
        assert choices.fastest(limit) is not None
        seconds.append(time.process_time() - start)
    return seconds


def planned_s(layers: int, calls: int) -> list[float]:
    """Processor seconds of a plan for a new length, costs included, where some levers are needed:
    the limit is drawn between the least and what the fastest plan needs."""
    rng, free, seconds = random.Random(SEED), planner_of(layers), []
    for _ in range(calls):
        workload = Workload(1, rng.randrange(4096, 131_072), torch.bfloat16, True, 8)
        least, most = free.least_bytes(workload), free.predict(free.plan(workload), workload)[1]
        planner = planner_of(layers, memory_limit=rng.randrange(least, most + 1))
        planner.plan(replace(workload, seq_len=128))
        start = time.process_time()
        planner.plan(workload)
        seconds.append(time.process_time() - start)
    return seconds


def published(choices: Choices, limit: float, layers: int) -> Points:
    """The heuristic's plan for at most ``limit`` bytes (arXiv 2511.13198).

    Strategies that another beats in both time and memory are dropped. The fastest that fits runs
    all layers; else, of every pair, the first layers take one and the rest the other, at the split
    that is fastest among those that fit; else, though too large, the smallest runs all layers.

    Args:
        choices: every block offers the same strategies: a strategy runs whole layers.
        layers: of as many blocks each.
    """
    (offered,) = set(choices.names)
    blocks = len(choices.names)
    kept: list[Points] = []
    for plan in sorted([(s,) * blocks for s in offered], key=choices.time_s):
        if not kept or choices.peak(plan) < choices.peak(kept[-1]):
            kept.append(plan)
    if choices.peak(kept[0]) <= limit:
        return kept[0]
    cuts = range(blocks // layers, blocks + 1, blocks // layers)
    mixed = (a[:cut] + b[cut:] for a, b, cut in product(kept, kept, cuts))
    fitting = (plan for plan in mixed if choices.peak(plan) <= limit)
    return min(fitting, key=choices.time_s, default=kept[-1])


def compare(layers: int, num_tables: int) -> np.ndarray:
    """[3, num_tables]: how much slower the heuristic's plan is (infinitely, where it finds none
    that fits), and processor seconds of the exact choice and of the heuristic's."""
    rng, rows = random.Random(SEED + layers), []
    for _ in range(num_tables):
        choices = random_choices(rng, layers)
        most = choices.peak(choices.fastest(float("inf")) or ())
        limit = rng.uniform(choices.smallest()[0], most)
        start = time.process_time()
        exact = choices.fastest(limit)
        middle = time.process_time()
        heuristic = published(choices, limit, layers)
        end = time.process_time()
        assert exact is not None
        fits = choices.peak(heuristic) <= limit
        gap = choices.time_s(heuristic) / choices.time_s(exact) - 1 if fits else math.inf
        rows.append((gap, middle - start, end - middle))
    return np.array(rows).T


def planner_of(layers: int, **options: object) -> Planner:
    """Of a Llama of 7 billion parameters with so many ``layers``, on eight ranks."""
    weights = {"num_weight_elements": 10**8, "num_split_weight_elements": 10**8}
    attention = BlockSpec("a", "attention", 0, "a", {}, 4096, 32, 8, 128, **weights)
    mlp = BlockSpec("m", "mlp", 0, "m", {}, 4096, intermediate=11008, **weights)
    blocks = [replace(b, layer=layer) for layer in range(layers) for b in (attention, mlp)]
    return Planner(parse_options(options), blocks, 8, lambda dtype: RATES)


def cached_s(layers: int, calls: int) -> tuple[float, float]:
    """Median seconds for a workload seen before: of asking the planner, and of the guard at the
    entry of a compiled model."""
    planner = planner_of(layers)
    workload = Workload(1, 8192, torch.bfloat16, True, 8)
    guard = Guard(planner.plan, True)
    ask, enter = partial(planner.plan, workload), partial(guard, workload)
    asked_s, entered_s = ([seconds_of(call) for _ in range(calls)] for call in (ask, enter))
    return median(asked_s), median(entered_s)


@benchmark({"tables": 5}, tables=100)
def main(bench: Benchmark, args: Namespace) -> str:
    bench.add(f"{args.tables} random tables of costs for each depth, five strategies.")
    rows, worst, exact_96 = [], 0.0, 0.0
    for layers in (8, 24, 96):
        gaps, exact, heuristic = compare(layers, args.tables)
        fit = gaps[gaps < math.inf]
        worst, exact_96 = min(worst, *fit), median(exact)
        row = [f"{layers} layers", f"{sum(fit > 1e-9) / args.tables:.0%}"]
        row += [f"{median(fit):.2%}", f"{np.quantile(fit, 0.9):.2%}", f"{max(fit):.1%}"]
        row += [f"{1 - len(fit) / args.tables:.1%}", f"{exact_96 * 1e3:.3f}"]
        row += [f"{np.quantile(exact, 0.99) * 1e3:.3f}", f"{median(heuristic) * 1e3:.2f}"]
        rows.append(row)
    header = ["model", "heuristic slower in", "median gap", "90 %", "largest"]
    header += ["finds none that fits", "exact, ms", "99 %", "heuristic, ms"]
    bench.table(header, rows)
    levered = exact_s(96, args.tables)
    planned = planned_s(96, args.tables)
    bench.add("", "96 layers, every strategy with two levers more:")
    header = ["what", "median, ms", "99 %, ms"]
    timed = {"exact choice": levered, "a new length, its costs included": planned}
    bench.table(
        header,
        [
            [what, f"{median(s) * 1e3:.3f}", f"{np.quantile(s, 0.99) * 1e3:.3f}"]
            for what, s in timed.items()
        ],
    )
    cached, guarded = cached_s(96, 1000)
    text = f"A workload seen before, 96 layers: {cached * 1e6:.2f} us"
    bench.add("", f"{text}, {guarded * 1e6:.2f} us by a compiled model's guard.")
    bench.at_most("largest advantage of the heuristic, share of time", abs(worst), 1e-9)
    bench.at_most("exact choice for 96 layers, ms", exact_96 * 1e3, 1)
    bench.at_most("the same with levers, ms", median(levered) * 1e3, 1)
    bench.at_most("a workload seen before, us", max(cached, guarded) * 1e6, 20)
    return "one thread"
