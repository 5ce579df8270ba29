"""One process: backend="paradyse" against torch.compile(inductor), seconds a training step.

    python benchmarks/one_process.py            # 15 minutes: a long step takes inductor one
    python benchmarks/one_process.py --quick    # tiny sizes, to see that it runs

Two cases, both HuggingFace Llamas in training with use_cache=False, float32, all cores:

- long: 2 layers, hidden 256, 16,384 tokens. HuggingFace hands SDPA a dense [1, 1, S, S] mask as
  soon as the model is traced; inductor computes with it, ParaDySe recovers that it is causal.
- short: 12 layers, hidden 512, 512 tokens. Nothing to win: what ParaDySe costs in overhead.

Both contenders live in one process and take turns. Before that their losses and all gradients are
compared. Peak memory is the resident peak (VmHWM, so Linux only) of a process of its own for each
contender after one step, libraries included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import Goal, Report, check_equal, llama, median, parser, random_tokens, table

BACKENDS = ("inductor", "paradyse")


@dataclass(frozen=True)
class Case:
    """A model, a length, and how often to run it."""

    name: str
    layers: int
    hidden: int
    seq_len: int
    runs: int


LONG = Case("long", 2, 256, 16384, 3)
SHORT = Case("short", 12, 512, 512, 21)
QUICK = (Case("long", 2, 64, 1024, 3), Case("short", 3, 64, 128, 5))


@dataclass
class Contender:
    """A compiled model."""

    model: Any
    run: Any

    @classmethod
    def build(cls, case: Case, backend: str) -> Contender:
        model = llama(case.layers, case.hidden)
        return cls(model, torch.compile(model, backend=backend))

    def step(self, ids: torch.Tensor) -> float:
        """A training step without the optimizer; the loss."""
        self.model.zero_grad()
        loss = self.run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return float(loss.detach())


def measure(case: Case) -> dict[str, list[float]]:
    """Backend -> seconds of each run."""
    ids = random_tokens(case.seq_len)
    contenders = {name: Contender.build(case, name) for name in BACKENDS}
    check_equal({name: c.step(ids) for name, c in contenders.items()})
    reference, ours = (dict(contenders[b].model.named_parameters()) for b in BACKENDS)
    for name, p in reference.items():
        error = float((ours[name].grad - p.grad).norm() / p.grad.norm())
        if not error <= 1e-4:
            sys.exit(f"not timed: the gradients of {name} differ by {error:.1e}")
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(case.runs):
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender.step(ids)
            seconds[name].append(time.perf_counter() - start)
            print(f"{case.name} {name} {seconds[name][-1]:.3f} s", file=sys.stderr, flush=True)
    return seconds


def peak_gib(case: Case, backend: str) -> float:
    """GiB resident at most in a process that builds the model and runs one step."""
    given = json.dumps([backend, case.layers, case.hidden, case.seq_len])
    out = subprocess.run(
        [sys.executable, __file__, "--peak-of", given], capture_output=True, text=True
    )
    if out.returncode:
        sys.exit(out.stderr)
    return float(out.stdout.split()[-1])


def _print_peak(given: str) -> None:
    backend, *size = json.loads(given)
    case = Case("peak", *size, runs=1)
    Contender.build(case, backend).step(random_tokens(case.seq_len))
    # Not ru_maxrss: a child begins with its parent's.
    status = Path("/proc/self/status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    print(kib / 2**20)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--long-runs", type=int, default=LONG.runs)
    arguments.add_argument("--short-runs", type=int, default=SHORT.runs)
    arguments.add_argument("--only", choices=("short", "long"))
    arguments.add_argument("--no-memory", action="store_true", help="skip the peak memory runs")
    arguments.add_argument("--peak-of", help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.peak_of:
        _print_peak(args.peak_of)
        return 0
    runs = (replace(LONG, runs=args.long_runs), replace(SHORT, runs=args.short_runs))
    long, short = QUICK if args.quick else runs
    report = Report("one_process", args)
    report.add(
        f"Training step of a Llama in one process, medians of interleaved runs: {short.runs} of "
        f"the short case, {long.runs} of the long one.",
        "",
    )
    ratio, rows = {}, []
    for case in (c for c in (short, long) if args.only in (None, c.name)):
        seconds = {name: median(values) for name, values in measure(case).items()}
        theirs, ours = (seconds[b] for b in BACKENDS)
        ratio[case.name] = theirs / ours
        peaks = ["", ""]
        if not args.no_memory:
            peaks = [f"{peak_gib(case, b):.2f}" for b in BACKENDS]
        model = f"{case.layers} layers, hidden {case.hidden}, {case.seq_len:,} tokens"
        rows.append([model, f"{theirs:.3f}", f"{ours:.3f}", f"{theirs / ours:.2f}", *peaks])
    header = ["model", "inductor, s", "paradyse, s", "ratio"]
    report.add(*table([*header, "inductor peak, GiB", "paradyse peak, GiB"], rows))
    if "long" in ratio:
        what = "long, inductor's time over paradyse's"
        report.goals.append(Goal(what, ratio["long"], 4, at_least=True))
    if "short" in ratio:
        what = "short, paradyse's time over inductor's"
        report.goals.append(Goal(what, 1 / ratio["short"], 1.05, at_least=False))
    return report.finish(f"one process of {torch.get_num_threads()} threads")


if __name__ == "__main__":
    sys.exit(main())
