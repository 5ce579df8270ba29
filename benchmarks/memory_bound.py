"""Two ranks: the longest sequence that each static strategy and ``auto`` train under a limit.

    python benchmarks/memory_bound.py            # 5 minutes on two cores

A profile is made first, without a limit and up to --longest tokens. Limits are what the static
strategies need, in the middle, at parts of that length. Memory is measured in real steps: weights,
gradients and two moments of an optimizer, and the most that is held beyond them in a step.

By measurement: the longest length at which a step was measured to stay within the limit, searched
for up to twice the predicted one, in steps of 1/256 of it. ``auto`` is asked for a plan for all of
these lengths, and its steps are measured too. Predicted: what the planner says before anything
runs.
"""

import math
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from typing import Any

from bounded import MOST, Bounded
from contenders import AUTO, make_profile, model_of
from runner import Benchmark, benchmark

import paradyse
from paradyse.cli.launch import Rank
from paradyse.planning.units import format_bytes
from paradyse.types import ATTENTION_STRATEGIES, Plan

OPTIONS: dict[str, Any] = {"hidden": 256, "layers": 4, "ranks": 2, "inner": "inductor"}
OPTIONS["model"] = {"help": "config.json; default: a Llama of --hidden"}
OPTIONS["longest"] = {"type": int, "default": 4096, "help": "tokens"}
OPTIONS["sharded"] = {"action": "store_true", "help": "weights 1/p on each rank"}
QUICK = {"longest": 512, "layers": 2, "hidden": 64, "inner": "eager"}

PARTS = (0.25, 0.5)
"""Of the longest profiled length: where the limits are."""


def measure(rank: Rank, args: Namespace) -> list[dict[str, Any]]:
    """A row of figures for each limit."""
    model = model_of(args)
    if args.sharded:
        paradyse.shard(model)
    lengths = [args.longest >> i for i in range(4, -1, -1)]
    make_profile(rank, model, args, lengths, repeats=1)
    options = {"inner": args.inner, "cost_model": args.profile_path}
    free = Bounded(model, options, lengths[0])
    feasible = [s for s in ATTENTION_STRATEGIES if all(s in b.feasible() for b in free.blocks)]
    plans = {s: free.planner.static(s, free.workload(1)) for s in feasible}
    rows = []
    with free.prepared():
        for part in PARTS:
            work = free.workload(int(part * args.longest))
            needs = sorted(free.planner.least_bytes(work, plan) for plan in plans.values())
            limit = needs[len(needs) // 2]
            bounded = Bounded(model, options | {"memory_limit": limit}, min(16, lengths[0]))
            rows.append(bound(rank, bounded, plans, limit))
    return rows


def bound(rank: Rank, bounded: Bounded, plans: Mapping[str, Plan], limit: int) -> dict[str, Any]:
    """Everything under one limit."""
    planner, of = bounded.planner, {}
    for s, plan in plans.items():
        said = planner.longest(bounded.workload(1), MOST, plan)
        held, real = bounded.held(s, said), bounded.longest(s, limit, said)
        rank.report(f"{format_bytes(limit)}, {s}: {said} predicted, {real} measured")
        of[s] = {"said": said, "held": held, "real": real, "auto": bounded.held(AUTO, real)}
    said = planner.longest(bounded.workload(1), MOST)
    chosen = planner.plan(bounded.workload(said)).strategies if said else ()
    row = {"limit": limit, "static": planner.static_bytes, "strategies": of}
    row |= {"said": said, "held": bounded.held(AUTO, said), "plan": Counter(chosen)}
    return row | {"refusal": bounded.refusal(max(2, said + said // 50), AUTO)}


def share(num_bytes: float, limit: int) -> str:
    return "refused" if num_bytes == math.inf else f"{100 * num_bytes / limit:.1f} %"


def report_limit(bench: Benchmark, row: dict[str, Any]) -> None:
    """Table and goals of one limit."""
    limit, said, of = row["limit"], row["said"], row["strategies"]
    at, static = format_bytes(limit), format_bytes(row["static"])
    rows = []
    for s, x in of.items():
        held, by_auto = (share(x[name], limit) for name in ("held", "auto"))
        rows.append([s, str(x["said"]), held, str(x["real"]), by_auto])
    rows.append([AUTO, str(said), share(row["held"], limit), "", ""])
    bench.table(
        ["plan", "longest, predicted", "held there", "by measurement", "auto there"],
        rows,
        f"## {at} a rank, {static} of them weights, gradients and optimizer state",
    )
    bench.add(
        "",
        "`auto` at its longest: " + ", ".join(f"{n} {s}" for s, n in row["plan"].items()),
        f"2 % longer: {row['refusal'] or '**not refused**'}",
    )
    best = max(x["real"] for x in of.values())
    ratio = said / best if best else 1.0
    bench.at_least(f"{at}: longest of `auto` over the best static's, measured", ratio, 1.0)
    held_by_auto = [row["held"], *(x["auto"] for x in of.values() if x["auto"] < math.inf)]
    bench.at_most(f"{at}: most that `auto` held, of the limit", max(held_by_auto) / limit, 1.0)
    refused = sum(x["auto"] == math.inf for x in of.values())
    bench.at_most(f"{at}: lengths refused that a static strategy trains", refused, 0)
    off = max(abs(limit / x["held"] - 1) for x in of.values() if x["held"])
    bench.at_most(f"{at}: prediction off, most of any static, %", 100 * off, 5)


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        args.profile_path = f"{folder}/profile.jsonl"
        found = bench.on_ranks(measure)
    what = args.model or f"Llama of hidden {args.hidden}"
    weights = "sharded" if args.sharded else "whole"
    bench.add(
        f"{what}, {args.layers} layers, {weights} weights, {bench.ranks}. Lengths in tokens; "
        "shares are of the limit, as measured."
    )
    for row in found:
        report_limit(bench, row)
