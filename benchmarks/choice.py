"""Choosing a plan: the exact solver beside the published heuristic, over random cost tables.

    python benchmarks/choice.py            # five minutes
    python benchmarks/choice.py --quick    # few tables, to see that it runs

A table gives each strategy a time, saved bytes and a workspace, for attention and for MLP blocks;
the limit is drawn between the least memory that any plan needs and that of the fastest. Both get
the same five strategies for every block, as the heuristic needs it.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import Goal, Report, median, parser, table
from published import published

from paradyse.config import parse_options
from paradyse.planning.costs import BlockCost, Machine
from paradyse.planning.planner import Planner
from paradyse.planning.solver import Choices
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
    return Choices([ATTENTION_STRATEGIES] * 2 * layers, kinds * layers, (), 0, 0, 0.0, RATES)


def compare(layers: int, num_tables: int) -> tuple[list[float], list[float], list[float], int]:
    """Per table how much slower the heuristic's plan is, and processor seconds of each;
    tables for which the heuristic finds none that fits."""
    rng = random.Random(SEED + layers)
    gaps, exact_s, heuristic_s, unfit = [], [], [], 0
    for _ in range(num_tables):
        choices = random_choices(rng, layers)
        most = choices.peak(choices.fastest(float("inf")) or ())
        limit = rng.uniform(choices.smallest()[0], most)
        start = time.process_time()
        exact = choices.fastest(limit)
        middle = time.process_time()
        heuristic, fits = published(choices, limit, layers)
        exact_s.append(middle - start)
        heuristic_s.append(time.process_time() - middle)
        assert exact is not None
        if fits:
            gaps.append(choices.time_s(heuristic) / choices.time_s(exact) - 1)
        else:
            unfit += 1
    return gaps, exact_s, heuristic_s, unfit


def cached_s(layers: int, calls: int) -> tuple[float, float]:
    """Median seconds for a workload seen before: of asking the planner, and of the guard at the
    entry of a compiled model."""
    blocks = []
    for layer in range(layers):
        attention = BlockSpec("a", "attention", layer, "a", {}, 4096, 32, 8, 128, 0, 10**8, 10**8)
        mlp = BlockSpec("m", "mlp", layer, "m", {}, 4096, 0, 0, 0, 11008, 10**8, 10**8)
        blocks += [attention, mlp]
    planner = Planner(parse_options(None), blocks, 8, lambda dtype: RATES)
    workload = Workload(1, 8192, torch.bfloat16, True, 8)
    guard = Guard(planner.plan, True, workload)

    def seconds(call: Callable[[], Any]) -> float:
        call()
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return median(times)

    asked_s = seconds(lambda: planner.plan(workload))
    return asked_s, seconds(lambda: guard(1, 8192, True, lambda plan: plan))


def share(values: Sequence[float], of: float) -> float:
    return sorted(values)[min(len(values) - 1, int(of * len(values)))]


def main() -> int:
    args = parser(__doc__).parse_args()
    num_tables = 20 if args.quick else 100
    report = Report("choice", args)
    report.add(f"{num_tables} random tables of costs for each depth, five strategies.", "")
    rows, worst, exact_96 = [], 0.0, 0.0
    for layers in (8, 24, 96):
        gaps, exact_s, heuristic_s, unfit = compare(layers, num_tables)
        worst = min([worst, *gaps])
        exact_96 = median(exact_s)
        row = [f"{layers} layers", f"{sum(g > 1e-9 for g in gaps) / num_tables:.0%}"]
        row += [f"{median(gaps):.2%}", f"{share(gaps, 0.9):.2%}", f"{max(gaps):.1%}"]
        row += [f"{unfit / num_tables:.1%}", f"{exact_96 * 1e3:.3f}"]
        row += [f"{share(exact_s, 0.99) * 1e3:.3f}", f"{median(heuristic_s) * 1e3:.2f}"]
        rows.append(row)
    header = ["model", "heuristic slower in", "median gap", "90 %", "largest"]
    header += ["finds none that fits", "exact, ms", "99 %", "heuristic, ms"]
    report.add(*table(header, rows))
    cached, guarded = cached_s(96, 1000)
    text = f"A workload seen before, 96 layers: {cached * 1e6:.2f} us"
    report.add("", f"{text}, {guarded * 1e6:.2f} us by a compiled model's guard.")
    report.goals += [
        Goal("largest advantage of the heuristic, share of time", abs(worst), 1e-9, False),
        Goal("exact choice for 96 layers, ms", exact_96 * 1e3, 50, False),
        Goal("a workload seen before, us", max(cached, guarded) * 1e6, 20, False),
    ]
    return report.finish("one thread")


if __name__ == "__main__":
    sys.exit(main())
