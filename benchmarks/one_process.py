"""One process: backend="paradyse" against torch.compile(inductor), seconds a training step.

    python benchmarks/one_process.py            # 15 minutes: a long step takes inductor one

Two cases, both HuggingFace Llamas in training with use_cache=False, float32, all cores:

- long: 2 layers, hidden 256, 16,384 tokens. HuggingFace hands SDPA a dense [1, 1, S, S] mask as
  soon as the model is traced; inductor computes with it, ParaDySe recovers that it is causal.
- short: 12 layers, hidden 512, 512 tokens. Nothing to win: what ParaDySe costs in overhead.

Both contenders live in one process. Peak memory is the resident peak (VmHWM, so Linux only) of a
process of its own for each contender after one step, libraries included.
"""

from argparse import Namespace
from functools import partial
from typing import Any, NamedTuple

import torch
from contenders import BACKENDS, compiled, llama
from runner import Benchmark, alone, benchmark, log, median, take_turns

from paradyse.cli.rank_jobs import peak_bytes


class Case(NamedTuple):
    """A model and a length."""

    layers: int
    hidden: int
    seq_len: int

    def __str__(self) -> str:
        return f"{self.layers} layers, hidden {self.hidden}, {self.seq_len:,} tokens"


CASES = {"short": Case(12, 512, 512), "long": Case(2, 256, 16384)}
OPTIONS: dict[str, Any] = {"long_runs": 3, "short_runs": 21, "only": {"choices": tuple(CASES)}}
OPTIONS["no_memory"] = {"action": "store_true"}
QUICK = {"short": Case(3, 64, 128), "long": Case(2, 64, 1024)}


def measure(case: Case, runs: int) -> list[float]:
    """The median step of each backend, in seconds."""
    contenders = {b: compiled(llama(case.layers, case.hidden), b) for b in BACKENDS}
    contenders["paradyse"].check("paradyse", contenders["inductor"], case.seq_len)
    steps = {name: c.time_s for name, c in contenders.items()}
    seconds = take_turns(steps, [case.seq_len], range(runs), partial(log, case))
    return [median(seconds[b][case.seq_len]) for b in BACKENDS]


def peak_gib(case: Case, backend: str) -> float:
    """GiB resident at most in this process after one step."""
    compiled(llama(case.layers, case.hidden), backend).loss(case.seq_len)
    return peak_bytes("cpu") / 2**30


@benchmark({"short_runs": 5}, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> str:
    bench.add(
        f"Training step of a Llama in one process, medians of interleaved runs: {args.short_runs} "
        f"of the short case, {args.long_runs} of the long one."
    )
    rows = []
    for name, case in (QUICK if args.quick else CASES).items():
        if args.only not in (None, name):
            continue
        theirs, ours = measure(case, vars(args)[f"{name}_runs"])
        peaks = ["" if args.no_memory else f"{alone(peak_gib, case, b):.2f}" for b in BACKENDS]
        rows.append([str(case), f"{theirs:.3f}", f"{ours:.3f}", f"{theirs / ours:.2f}", *peaks])
        if name == "long":
            bench.at_least("long, inductor's time over paradyse's", theirs / ours, 4)
        else:
            bench.at_most("short, paradyse's time over inductor's", ours / theirs, 1.05)
    header = ["model", "inductor, s", "paradyse, s", "ratio"]
    bench.table([*header, "inductor peak, GiB", "paradyse peak, GiB"], rows)
    return f"one process of {torch.get_num_threads()} threads"
