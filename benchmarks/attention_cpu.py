"""Attention of one rank against PyTorch's, on the CPU: seconds of forward and backward, medians of
interleaved runs.

    python benchmarks/attention_cpu.py --tokens 4096 --heads 8 --kv-heads 4 --head-dim 64 --runs 7

A row is one mask. ``sdpa`` is ``F.scaled_dot_product_attention``: its causal flag where that says
it all, else the dense mask that a HuggingFace model would build. Below 1.0, ``ratio`` says how much
faster ours is.
"""

import sys
from functools import partial
from typing import Any

import torch
from attention_cases import MASKS, Case, Contender, Inputs, compare, ours, sdpa
from runner import Benchmark, median, seconds_of, take_turns

OPTIONS = {"tokens": 4096, "batch": 1, "heads": 8, "kv_heads": 4, "head_dim": 32, "runs": 7}
DTYPE = {"choices": ("float32", "bfloat16", "float64"), "default": "float32"}


def time_s(contender: Contender, inputs: Inputs, _: int) -> tuple[float, float]:
    """Seconds of a forward and of its backward."""
    kept: list[Any] = []
    forward_s = seconds_of(lambda: kept.extend(contender.forward(inputs)))
    return forward_s, seconds_of(lambda: torch.autograd.grad(*kept, inputs[3]))


def main() -> int:
    bench = Benchmark("attention_cpu", __doc__, {"tokens": 256, "runs": 2}, dtype=DTYPE, **OPTIONS)
    args, s = bench.args, bench.args.tokens
    bench.dtype = args.dtype
    rows = []
    for mask, title in MASKS.items():
        sizes = args.batch, args.heads, args.kv_heads, min(512, s // 4), 5
        case = Case(mask, s, args.head_dim, getattr(torch, args.dtype), "cpu", *sizes)
        inputs, made = case.inputs(), (ours(case), sdpa(case, "sdpa", None, False))
        compare(case, made[0].name, *(c.results(inputs) for c in made))
        turns = {c.name: partial(time_s, c, inputs) for c in made}
        seconds = take_turns(turns, [s], range(-1, args.runs))
        times = [median(part) for of in seconds.values() for part in zip(*of[s], strict=True)]
        ratio = sum(times[:2]) / sum(times[2:])
        rows.append([title, *(f"{1e3 * t:.1f}" for t in times), f"{ratio:.2f}"])
    bench.add(
        f"Milliseconds of one attention operator, medians of {args.runs} interleaved runs: {s} "
        f"tokens, batch {args.batch}, {args.heads} heads and {args.kv_heads} KV heads of width "
        f"{args.head_dim}.",
        "",
    )
    header = ["mask", "ours, forward", "backward", "sdpa, forward", "backward", "ratio"]
    bench.table(header, rows)
    return bench.finish(f"{torch.get_num_threads()} threads")


if __name__ == "__main__":
    sys.exit(main())
