"""One GPU: a training step of an unmodified Llama of 1.1 billion parameters, long sequences.

    python benchmarks/one_device.py                     # 32K and 128K tokens
    python benchmarks/one_device.py --lengths 16384     # other lengths
    python benchmarks/one_device.py --quick             # tiny, also on a CPU, to see that it runs

torch.compile(backend="paradyse") against torch.compile(backend="inductor"): HuggingFace's Llama in
the shape of TinyLlama-1.1B (22 layers, hidden 2,048, 32 heads and 4 KV heads of width 64, MLP
5,632, vocabulary 32,000), bfloat16, batch 1. From --checkpoint-from tokens on with HuggingFace's
activation checkpointing, for both.

Every contender runs in a process of its own, and they take turns, --rounds times: so a peak of
memory is one contender's, and one that runs out of memory takes nobody along; the table then says
so. What is compared of gradients is the projection of each on a random vector. The peak is the
allocator's (torch.cuda.max_memory_allocated).
"""

import sys
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from contenders import BACKENDS, compiled, llama
from runner import Benchmark, alone, benchmark, check_equal, log, median, take_turns

OPTIONS = {"lengths": (32768, 131072), "steps": 5, "rounds": 2, "checkpoint_from": 32768}
QUICK = {"lengths": (128, 192), "steps": 2, "rounds": 1, "checkpoint_from": 192}
TINY_LLAMA = {"layers": 22, "hidden": 2048, "heads": 32, "kv_heads": 4}
TINY_LLAMA |= {"vocabulary": 32000, "intermediate": 5632}
"""Zhang et al., TinyLlama, arXiv 2401.02385, table 2."""

WARM_UP = 2
"""Steps of each run that are not timed: they compile."""

TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
"""Of a gradient's projection, relative to its norm: bfloat16 rounds every activation to 2^-9."""


@dataclass(frozen=True)
class Run:
    """What one process saw."""

    seconds: list[float]
    peak_gib: float
    loss: float
    projections: dict[str, tuple[float, float]]
    """Of each gradient: its product with a random vector of unit length, and its norm."""


def run_one(backend: str, seq_len: int, dtype: str, args: Namespace) -> Run | None:
    """One contender in this process; None where it runs out of memory."""
    cuda = torch.cuda.is_available()
    try:
        sizes: Any = {"layers": 2, "hidden": 64} if args.quick else TINY_LLAMA
        model = llama(**sizes, max_tokens=max(seq_len, 2048))
        model.to("cuda" if cuda else "cpu", getattr(torch, dtype)).train()
        if seq_len >= args.checkpoint_from:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        contender = compiled(model, backend)
        losses = [contender.loss(seq_len) for _ in range(WARM_UP)]
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = [contender.time_s(seq_len) for _ in range(args.steps)]
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        found = {}
        for i, (name, grad) in enumerate(contender.gradients().items()):
            torch.manual_seed(i)
            direction = torch.randn_like(grad, dtype=torch.float32)
            product = (grad.float() * direction).sum() / direction.norm()
            found[name] = float(product), float(grad.float().norm())
        return Run(seconds, peak, losses[-1], found)
    except torch.OutOfMemoryError:
        return None


def compare(reference: Run, other: Run, tolerance: float) -> None:
    """Exits where the loss or a gradient is not inductor's."""
    check_equal({"inductor": reference.loss, "paradyse": other.loss}, tolerance)
    for name, (product, norm) in reference.projections.items():
        error = abs(other.projections[name][0] - product) / norm
        if not error <= tolerance:
            sys.exit(f"not timed: the gradients of {name} differ by {error:.1e}")


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> str:
    cuda = torch.cuda.is_available()
    if not args.quick and not cuda:
        sys.exit(
            "one_device needs a CUDA device, and PyTorch sees none; `--quick` runs a tiny model on "
            "the CPU, one_process.py is the same comparison for CPUs"
        )
    bench.dtype = "bfloat16" if cuda else "float32"

    def run(n: int, backend: str) -> Run | None:
        found = alone(run_one, backend, n, bench.dtype, args)
        told = found and f"{median(found.seconds):.3f} s, peak {found.peak_gib:.1f} GiB"
        log(f"{n:,} tokens, {backend}: {told or 'out of memory'}")
        return found

    turns = {b: partial(run, backend=b) for b in BACKENDS}
    runs = take_turns(turns, args.lengths, range(args.rounds))
    rows = []
    for n in args.lengths:
        good = [[r for r in of[n] if r] for of in runs.values()]
        if all(good):
            compare(good[0][0], good[1][0], TOLERANCE[bench.dtype])
        times = [median([s for r in of for s in r.seconds]) if of else 0.0 for of in good]
        cells = [f"{t:.3f}" if t else "out of memory" for t in times]
        ratio = f"{times[0] / times[1]:.2f}" if all(times) else ""
        peaks = [max((r.peak_gib for r in of), default=0.0) for of in good]
        what = f"{n:,} tokens" + ", checkpointing" * (n >= args.checkpoint_from)
        rows.append([what, *cells, ratio, *(f"{p:.1f}" if p else "" for p in peaks)])
    bench.add(
        "Training step of a Llama of 1.1 billion parameters on one device, batch 1, medians of "
        f"{args.rounds} x {args.steps} steps."
    )
    header = ["length", "inductor, s", "paradyse, s", "ratio"]
    bench.table([*header, "inductor peak, GiB", "paradyse peak, GiB"], rows)
    return "one GPU" if cuda else "the CPU, tiny"
