"""One GPU: the longest sequence that a Llama of 1.1 billion parameters trains, with and without
levers.

    python benchmarks/longest_device.py                   # as long as this GPU's memory allows
    python benchmarks/longest_device.py --limit 80GiB     # as on a smaller one
    python benchmarks/longest_device.py --quick           # tiny, also on a CPU, to see that it runs

The planner says how far it gets without levers, with those of the device, and with all, which keep
something on the host too. A step of that length, or of --most tokens where it is longer, is then
run in a process of its own: what it holds at its peak, gradients, weights and two moments of an
optimizer included, and whether it runs out of memory; then the length is taken a --step smaller,
up to --tries times. The model is bfloat16, as in `one_device.py`.
"""

import sys
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
from bounded import MOST, Bounded
from contenders import AUTO, llama
from one_device import TINY_LLAMA
from runner import Benchmark, alone, benchmark, log

from paradyse.config import parse_bytes
from paradyse.distributed.failures import is_out_of_memory
from paradyse.planning.explain import short_key
from paradyse.planning.units import format_bytes
from paradyse.types import LEVERS, ON_HOST

OPTIONS: dict[str, Any] = {"most": 131072, "tries": 4, "step": 0.05, "inner": "inductor"}
OPTIONS["limit"] = {"type": parse_bytes, "metavar": "BYTES", "help": "as 80GiB; default: all"}
QUICK = {"most": 512, "tries": 2, "inner": "eager"}
SETS = {
    "none": (),
    "on the device": tuple(v for v in LEVERS if v not in ON_HOST),
    "all": LEVERS,
}
SHORT = 32
"""Tokens of the step that makes the graph known; without a device the limit is what eight times as
many need."""


@dataclass(frozen=True)
class Reach:
    """How far one set of levers gets."""

    said: int
    """Tokens that the planner says; 0: none."""
    limit: int
    """Bytes that it plans with."""
    plan: str
    """Of the length that was run."""
    ran: int = 0
    """Tokens of the step that was run; 0: none had memory."""
    held: float = 0.0
    """Bytes at the peak of that step."""
    predicted: int = 0
    """Bytes that the planner says of it."""


def reach(levers: tuple[str, ...], args: Namespace) -> Reach:
    """In this process."""
    cuda = torch.cuda.is_available()
    sizes: Any = {"layers": 2, "hidden": 64} if args.quick else TINY_LLAMA
    with torch.device("cuda" if cuda else "cpu"):  # where random weights take no time
        model = llama(**sizes, max_tokens=args.most)
    model.to(torch.bfloat16 if cuda else torch.float32)
    options = {"levers": list(levers), "inner": args.inner, "retry_out_of_memory": False}
    limit = args.limit
    if limit is None and not cuda:
        free = Bounded(model, options | {"levers": []}, SHORT)
        limit = free.planner.least_bytes(free.workload(8 * SHORT))
    given = {} if limit is None else {"memory_limit": limit}
    steps = Bounded(model, options | given, SHORT)
    planner = steps.planner
    limit = planner.memory_limit(steps.workload(1).dtype)
    said = planner.longest(steps.workload(1), MOST)
    length = min(said, args.most)
    for _ in range(args.tries if said else 0):
        workload = steps.workload(length)
        plan = planner.plan(workload)
        _, predicted = planner.predict(plan, workload)
        try:
            held = steps.held(AUTO, length)
            return Reach(said, limit, short_key(plan.key), length, held, predicted)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            steps.free()
            length = int(length * (1 - args.step))
    return Reach(said, limit, "")


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> str:
    cuda = torch.cuda.is_available()
    if not args.quick and not cuda:
        sys.exit(
            "longest_device needs a CUDA device, and PyTorch sees none; `--quick` runs a tiny "
            "model on the CPU, longest.py asks the same of CPUs"
        )
    bench.dtype = "bfloat16" if cuda else "float32"
    header = ["levers", "longest, tokens", "run, tokens", "held, of the limit", "off", "plan"]
    rows: list[list[str]] = []
    limit = 0
    for name, levers in SETS.items():
        found = alone(reach, levers, args)
        limit = found.limit
        row = [name, f"{found.said:,}", "out of memory" if found.said else "none", "", "", ""]
        if found.ran:
            off = f"{100 * (found.predicted / found.held - 1):+.1f} %"
            row[2:] = f"{found.ran:,}", f"{found.held / found.limit:.3f}", off, found.plan
            what = f"levers {name}: most that was held, of the limit"
            if cuda:  # elsewhere the lengths are too short for the planner's count
                bench.at_most(what, found.held / found.limit, 1.0)
        rows.append(row)
        log(*row)
        bench.draft(args.out, header, rows)
    bench.add(f"A limit of {format_bytes(limit)}; off: the prediction, of what was held.")
    bench.table(header, rows)
    return "one GPU" if cuda else "the CPU, tiny"
