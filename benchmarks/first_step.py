"""Time of the first step: backend="paradyse" against torch.compile(inductor), nothing cached.

    python benchmarks/first_step.py            # about 15 minutes
    python benchmarks/first_step.py --quick    # few layers, to see that it runs

Llama of 24 layers, hidden 256, 512 tokens, float32, one process. Each run is a process of its own
with an empty cache folder (TORCHINDUCTOR_CACHE_DIR); the contenders take turns. The clock starts
before torch.compile and stops when the first backward is done; then it takes a step of another
length, for which both capture anew, with symbolic sizes, and one of a third length, for which
nothing should be compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
from common import Goal, Report, check_equal, llama, median, parser, random_tokens, table

BACKENDS = ("inductor", "paradyse")
LENGTHS = (512, 640, 576)


def _print_run(backend: str, layers: int, hidden: int) -> None:
    """In the child: the seconds of a step at each of ``LENGTHS``, and the losses, as JSON."""
    model = llama(layers, hidden)
    seconds, losses = [], []
    start = time.perf_counter()
    compiled = torch.compile(model, backend=backend)
    for seq_len in LENGTHS:
        ids = random_tokens(seq_len)
        model.zero_grad()
        loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
        start = time.perf_counter()
    print(json.dumps({"seconds": seconds, "losses": losses}))


def run(backend: str, layers: int, hidden: int) -> dict[str, list[float]]:
    """A first step, and two more, in a process with empty caches."""
    with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
        given = json.dumps([backend, layers, hidden])
        out = subprocess.run(
            [sys.executable, __file__, "--run", given],
            capture_output=True,
            text=True,
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder},
        )
    if out.returncode:
        sys.exit(out.stderr)
    result: dict[str, list[float]] = json.loads(out.stdout.splitlines()[-1])
    print(backend, *(f"{s:.1f} s" for s in result["seconds"]), file=sys.stderr, flush=True)
    return result


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, default=24)
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--run", help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.run:
        _print_run(*json.loads(args.run))
        return 0
    layers, hidden, runs = (3, 64, 1) if args.quick else (args.layers, 256, args.runs)
    results: dict[str, list[dict[str, list[float]]]] = {b: [] for b in BACKENDS}
    for _ in range(runs):
        for backend in BACKENDS:
            results[backend].append(run(backend, layers, hidden))
            for i, seq_len in enumerate(LENGTHS):
                losses = {b: r[0]["losses"][i] for b, r in results.items() if r}
                check_equal({f"{b} at {seq_len} tokens": v for b, v in losses.items()})
    report = Report("first_step", args)
    report.add(
        f"Llama of {layers} layers, hidden {hidden}, one process, empty caches; seconds, medians "
        f"of {runs} runs.",
        "",
    )
    took = {
        b: [median([r["seconds"][i] for r in results[b]]) for i in range(len(LENGTHS))]
        for b in BACKENDS
    }
    first, second, third = LENGTHS
    names = [
        f"first, {first} tokens",
        f"second, {second} tokens: symbolic sizes",
        f"third, {third} tokens: nothing new",
    ]
    rows = [[n, *(f"{took[b][i]:.2f}" for b in BACKENDS)] for i, n in enumerate(names)]
    report.add(*table(["step", *BACKENDS], rows))
    share = took["paradyse"][0] / took["inductor"][0]
    what = "first step, paradyse's time over inductor's"
    report.goals.append(Goal(what, share, 0.5, at_least=False))
    return report.finish(f"one process of {torch.get_num_threads()} threads")


if __name__ == "__main__":
    sys.exit(main())
