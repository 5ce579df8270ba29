"""Attention of one rank against PyTorch's, on the CPU: seconds of forward and backward, medians of
interleaved runs.

    python benchmarks/attention_cpu.py --tokens 4096 --heads 8 --kv-heads 4 --head-dim 64 --runs 7

A row is one mask. ``sdpa`` is ``F.scaled_dot_product_attention``: its causal flag where that says
it all, else the dense mask that a HuggingFace model would build. Below 1.0, ``ratio`` says how much
faster ours is.
"""

from argparse import Namespace

import torch
from attention_cases import MASKS, Case, check, ours, sdpa
from runner import Benchmark, benchmark, median, seconds_of, take_turns

OPTIONS = {"tokens": 4096, "batch": 1, "heads": 8, "kv_heads": 4, "head_dim": 32, "runs": 7}
DTYPE = {"choices": ("float32", "bfloat16", "float64"), "default": "float32"}


@benchmark({"tokens": 256, "runs": 2}, dtype=DTYPE, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> str:
    s, bench.dtype = args.tokens, args.dtype
    rows = []
    for mask, title in MASKS.items():
        sizes = args.batch, args.heads, args.kv_heads, min(512, s // 4), 5
        case = Case(mask, s, args.head_dim, getattr(torch, args.dtype), "cpu", *sizes)
        inputs, made = case.inputs(), (ours(case), sdpa(case, "sdpa", None, False))
        for contender in made:
            check(case, contender, inputs)
        steps = [step for c in made for step in c.steps(inputs)]
        turns = {str(i): lambda n, step=step: seconds_of(step) for i, step in enumerate(steps)}
        taken = take_turns(turns, [s], range(-1, args.runs))
        times = [median(of[s]) for of in taken.values()]
        ratio = sum(times[:2]) / sum(times[2:])
        rows.append([title, *(f"{1e3 * t:.1f}" for t in times), f"{ratio:.2f}"])
    bench.add(
        f"Milliseconds of one attention operator, medians of {args.runs} interleaved runs: {s} "
        f"tokens, batch {args.batch}, {args.heads} heads and {args.kv_heads} KV heads of width "
        f"{args.head_dim}."
    )
    header = ["mask", "ours, forward", "backward", "sdpa, forward", "backward", "ratio"]
    bench.table(header, rows)
    return f"{torch.get_num_threads()} threads"
