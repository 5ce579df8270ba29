"""Two ranks: the longest sequence that each static strategy and ``auto`` train under a limit.

    python benchmarks/memory_bound.py            # 5 minutes on two cores

A profile is made first, without a limit and up to --longest tokens. Limits are what the static
strategies need, in the middle, at parts of that length. Memory is measured in real steps: weights,
gradients and two moments of an optimizer, and the most that is held beyond them in a step.

By measurement: the longest length at which a step was measured to stay within the limit, searched
for until a thousandth. ``auto`` is asked for a plan for all of these lengths, and its steps are
measured too. Predicted: what the planner says before anything runs.
"""

import math
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import AUTO, make_profile, model_of
from runner import Benchmark

from paradyse.cli.launch import Rank
from paradyse.cli.models import whole_graphs
from paradyse.planning.planner import Planner, format_bytes, longest_length
from paradyse.profiling.steps import Steps
from paradyse.types import ATTENTION_STRATEGIES, Plan, Workload

OPTIONS: dict[str, Any] = {"hidden": 256, "layers": 4, "ranks": 2, "inner": "inductor"}
OPTIONS["model"] = {"help": "config.json; default: a Llama of --hidden"}
OPTIONS["longest"] = {"type": int, "default": 4096, "help": "tokens"}
OPTIONS["sharded"] = {"action": "store_true", "help": "weights 1/p on each rank"}
QUICK = {"longest": 512, "layers": 2, "hidden": 64, "inner": "eager"}

PARTS = (0.25, 0.5)
"""Of the longest profiled length: where the limits are."""

CLOSE = 1 / 256
"""How near to the true longest length the search by measurement goes, as a share."""


class Bounded:
    """Steps of one model under a memory limit, and the planner that plans them."""

    def __init__(self, model: Any, options: Mapping[str, Any], shortest: int):
        from paradyse.runtime.registry import captures_of

        self.steps = Steps(model, options, 1, True, None)
        self.steps.find_blocks(shortest)
        mine = [c for c in captures_of(model) if c.options.plan == self.steps._current_plan]
        graphs = [g for c in mine for g in c.graphs.values() if g.blocks]
        self.planner: Planner = graphs[-1].planner
        self.dtype: torch.dtype = graphs[-1].dtype

    def work(self, seq_len: int) -> Workload:
        return Workload(1, seq_len, self.dtype, True, self.planner.num_ranks)

    def need(self, strategy: str, seq_len: int) -> int:
        """Bytes predicted."""
        names = (strategy,) * len(self.planner.blocks)
        return self.planner.predict(Plan(names), self.work(seq_len))[1]

    def held(self, plan: str, seq_len: int) -> int:
        """Bytes measured, of the rank that holds most."""
        self.steps.run(seq_len, plan)
        memory = self.steps.memory(seq_len, plan).peak_bytes
        told = torch.tensor(self.planner.static_bytes + memory)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return int(told)

    def longest(self, strategy: str, limit: int, start: int) -> int:
        """The longest length whose step is measured to fit; 0 if none does.

        Args:
            start: a length near it.
        """
        at = cache(lambda n: self.held(strategy, n))
        low, high = 0, 0
        n = max(1, start)
        while not (low and high and high - low <= max(1, CLOSE * low)):
            if at(n) <= limit:
                low = n
                n = (low + high) // 2 if high else math.ceil(n * (1 + 8 * CLOSE))
            else:
                high = n
                n = (low + high) // 2 if low else math.floor(n / (1 + 8 * CLOSE))
            if n < 1:
                return 0
        return low


def measure(rank: Rank, args: Namespace) -> list[dict[str, Any]]:
    """A row of figures for each limit."""
    import paradyse

    with whole_graphs():
        model, longest = model_of(args), args.longest
        if args.sharded:
            paradyse.shard(model)
        lengths = [longest >> i for i in range(4, -1, -1)]
        make_profile(rank, model, args, lengths, repeats=1)
        options = {"inner": args.inner, "cost_model": args.profile_path}
        free = Bounded(model, options, lengths[0])
        names = [
            s for s in ATTENTION_STRATEGIES if all(s in b.feasible() for b in free.planner.blocks)
        ]
        rows = []
        with free.steps.prepared():
            for part in PARTS:
                needs = sorted(free.need(s, int(part * longest)) for s in names)
                rows.append(bound(rank, model, options, names, needs[len(needs) // 2], lengths[0]))
    return rows


def bound(
    rank: Rank,
    model: Any,
    options: Mapping[str, Any],
    names: list[str],
    limit: int,
    shortest: int,
) -> dict[str, Any]:
    """Everything under one limit."""
    bounded = Bounded(model, {**options, "memory_limit": limit}, min(16, shortest))
    most = 1 << 24
    row: dict[str, Any] = {"limit": limit, "static": bounded.planner.static_bytes}
    row["strategies"] = {}
    for s in names:
        said = longest_length(lambda n, s=s: bounded.need(s, n), limit, most)
        predicted_at = bounded.held(s, said) if said else 0
        real = bounded.longest(s, limit, said)
        rank.send(f"{format_bytes(limit)}, {s}: {said} predicted, {real} measured")
        row["strategies"][s] = {"said": said, "held": predicted_at, "real": real}
        try:
            row["strategies"][s]["auto"] = bounded.held(AUTO, real) if real else 0
        except ValueError:  # refused on every rank alike
            row["strategies"][s]["auto"] = None
    said = bounded.planner.longest(bounded.work(1), most)
    row["auto"] = {"said": said, "held": bounded.held(AUTO, said) if said else 0}
    plan = bounded.planner.plan(bounded.work(said)).strategies if said else ()
    row["plan"] = {s: plan.count(s) for s in dict.fromkeys(plan)}
    try:
        bounded.steps.run(max(2, said + said // 50), AUTO)
        row["refusal"] = ""
    except ValueError as e:
        row["refusal"] = str(e)
    return row


def share(num_bytes: int | None, limit: int) -> str:
    return "refused" if num_bytes is None else f"{100 * num_bytes / limit:.1f} %"


def main() -> int:
    bench = Benchmark("memory_bound", __doc__, QUICK, **OPTIONS)
    args = bench.args
    bench.name += "_sharded" * args.sharded
    with tempfile.TemporaryDirectory() as folder:
        args.profile_path = str(Path(folder) / "profile.jsonl")
        found = bench.on_ranks(measure)
    what = args.model or f"Llama of hidden {args.hidden}"
    weights = "sharded" if args.sharded else "whole"
    bench.add(
        f"{what}, {args.layers} layers, {weights} weights, {bench.ranks}. Lengths in tokens; "
        "shares are of the limit, as measured."
    )
    for row in found:
        report_limit(bench, row)
    return bench.finish()


def report_limit(bench: Benchmark, row: dict[str, Any]) -> None:
    """Table and goals of one limit."""
    limit, auto, of = row["limit"], row["auto"], row["strategies"]
    at = format_bytes(limit)
    bench.add(
        "",
        f"## {at} a rank, {format_bytes(row['static'])} of them weights, gradients and optimizer "
        "state",
        "",
    )
    rows = []
    for s, x in of.items():
        held, by_auto = (share(x[name], limit) for name in ("held", "auto"))
        rows.append([s, str(x["said"]), held, str(x["real"]), by_auto])
    rows.append([AUTO, str(auto["said"]), share(auto["held"], limit), "", ""])
    bench.table(["plan", "longest, predicted", "held there", "by measurement", "auto there"], rows)
    bench.add(
        "",
        "`auto` at its longest: " + ", ".join(f"{n} {s}" for s, n in row["plan"].items()),
        f"2 % longer: {row['refusal'] or '**not refused**'}",
    )
    best = max(x["real"] for x in of.values())
    ratio = auto["said"] / best if best else 1.0
    bench.at_least(f"{at}: longest of `auto` over the best static's, measured", ratio, 1.0)
    held = [x["auto"] for x in of.values() if x["auto"]] + [auto["held"]]
    bench.at_most(f"{at}: most that `auto` held, of the limit", max(held) / limit, 1.0)
    refused = sum(x["auto"] is None for x in of.values())
    bench.at_most(f"{at}: lengths refused that a static strategy trains", refused, 0)
    off = max(abs(limit / x["held"] - 1) for x in of.values() if x["held"])
    bench.at_most(f"{at}: prediction off, most of any static, %", 100 * off, 5)


if __name__ == "__main__":
    sys.exit(main())
