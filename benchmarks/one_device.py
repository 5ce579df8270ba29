"""One GPU: a training step of an unmodified Llama of 1.1 billion parameters, long sequences.

    python benchmarks/one_device.py                     # 32K and 128K tokens
    python benchmarks/one_device.py --lengths 16384     # other lengths
    python benchmarks/one_device.py --backends paradyse --profile  # and where its time goes
    python benchmarks/one_device.py --quick             # tiny, also on a CPU, to see that it runs

torch.compile(backend="paradyse") against torch.compile(backend="inductor"): HuggingFace's Llama in
the shape of TinyLlama-1.1B (22 layers, hidden 2,048, 32 heads and 4 KV heads of width 64, MLP
5,632, vocabulary 32,000), bfloat16, batch 1. From --checkpoint-from tokens on with HuggingFace's
activation checkpointing, for both.

Every contender runs in a process of its own, and they take turns, --rounds times: so a peak of
memory is one contender's, and one that runs out of memory takes nobody along; the table then says
so. What is compared of gradients is the projection of each on a random vector. The peak is the
allocator's (torch.cuda.max_memory_allocated). --profile adds, for each contender and length, the
kernels that take most of the time of one more step of the first round. The report is written anew
after every run.
"""

import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from contenders import BACKENDS, Contender, compiled, llama
from runner import Benchmark, alone, benchmark, check_equal, log, median, take_turns

from paradyse.runtime.runs import FUSE_AFTER, FUSED_TOKENS

OPTIONS: dict[str, Any] = {"lengths": (32768, 131072), "steps": 5, "rounds": 2}
OPTIONS |= {"checkpoint_from": 32768, "seconds": 600.0}
OPTIONS["backends"] = {"nargs": "+", "choices": BACKENDS, "default": list(BACKENDS)}
OPTIONS["profile"] = {"action": "store_true", "help": "the kernels that take most of the time"}
QUICK: dict[str, Any] = {"lengths": (128, 192), "steps": 2, "rounds": 1, "checkpoint_from": 192}
TINY_LLAMA = {"layers": 22, "hidden": 2048, "heads": 32, "kv_heads": 4}
TINY_LLAMA |= {"vocabulary": 32000, "intermediate": 5632}
"""Zhang et al., TinyLlama, arXiv 2401.02385, table 2."""

MOST_KERNELS = 20
"""In a table of what was profiled."""

WARM_UP = 2
"""Steps of each run that are not timed: they compile."""
STEADY = FUSE_AFTER + 2
"""As many of a sequence so short that blocks run together once their plan is used often."""

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
    kernels: list[tuple[str, int, float]]
    """Name, calls and milliseconds of those that a profiled step spent most time in."""


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
        warm_up = STEADY if seq_len <= FUSED_TOKENS else WARM_UP
        losses = [contender.loss(seq_len) for _ in range(warm_up)]
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds, end = [contender.time_s(seq_len)], time.monotonic() + args.seconds
        while len(seconds) < args.steps and time.monotonic() < end:
            seconds.append(contender.time_s(seq_len))
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        found = {}
        for i, (name, grad) in enumerate(contender.gradients().items()):
            torch.manual_seed(i)
            direction = torch.randn_like(grad, dtype=torch.float32)
            product = (grad.float() * direction).sum() / direction.norm()
            found[name] = float(product), float(grad.float().norm())
        kernels = profiled(contender, seq_len) if args.profile else []
        return Run(seconds, peak, losses[-1], found, kernels)
    except torch.OutOfMemoryError:
        return None


def profiled(contender: Contender, seq_len: int) -> list[tuple[str, int, float]]:
    """``Run.kernels`` of one step: kernels on a GPU, operators on a CPU."""
    with torch.profiler.profile() as found:
        contender.loss(seq_len)
    # ranges that were marked on the host are on the device's line too
    events = [e for e in found.key_averages() if not e.is_user_annotation]
    on_device = [e for e in events if e.device_type != torch.autograd.DeviceType.CPU]
    if on_device:
        rows = [(e.key, e.count, e.self_device_time_total / 1e3) for e in on_device]
    else:
        rows = [(e.key, e.count, e.self_cpu_time_total / 1e3) for e in events]
    return sorted(rows, key=lambda row: -row[2])


def show_kernels(bench: Benchmark, what: str, run: Run) -> None:
    """A table of the kernels of ``run``."""
    total = sum(ms for *_, ms in run.kernels)
    rows = [
        [name.replace("|", "/")[:70], str(n), f"{ms:.2f}", f"{ms / total:.1%}"]
        for name, n, ms in run.kernels[:MOST_KERNELS]
    ]
    title = f"### {what}: {total:.1f} ms in {sum(n for _, n, _ in run.kernels):,} calls"
    bench.table(["kernel", "calls", "ms", "share"], rows, title)


def compare(reference: Run, other: Run, tolerance: float) -> None:
    """Exits where the loss or a gradient is not inductor's."""
    check_equal({"inductor": reference.loss, "paradyse": other.loss}, tolerance)
    for name, (product, norm) in reference.projections.items():
        error = abs(other.projections[name][0] - product) / norm
        if not error <= tolerance:
            sys.exit(f"not timed: the gradients of {name} differ by {error:.1e}")


def row_of(seq_len: int, runs: dict[str, list[Run]], checkpointing: bool) -> list[str]:
    """Of the table: times, their ratio, peaks."""
    times = [median([s for r in of for s in r.seconds]) if of else 0.0 for of in runs.values()]
    cells = [f"{t:.3f}" if t else "out of memory" for t in times]
    ratio = f"{times[0] / times[1]:.2f}" if len(times) == 2 and all(times) else ""
    peaks = [max((r.peak_gib for r in of), default=0.0) for of in runs.values()]
    what = f"{seq_len:,} tokens" + ", checkpointing" * checkpointing
    return [what, *cells, ratio, *(f"{p:.1f}" if p else "" for p in peaks)]


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

    turns = {b: partial(run, backend=b) for b in args.backends}
    columns = [[f"{b}{what}" for b in args.backends] for what in (", s", " peak, GiB")]
    header = ["length", *columns[0], "ratio", *columns[1]]
    bench.add(
        "Training step of a Llama of 1.1 billion parameters on one device, batch 1, medians of "
        f"at most {args.rounds} x {args.steps} steps; ratio: {' / '.join(args.backends[:2])}."
    )
    rows, profiles = [], []
    for n in args.lengths:
        runs: dict[str, list[Run]] = {b: [] for b in args.backends}
        for r in range(args.rounds):
            for b, found in take_turns(turns, [n], [r]).items():
                runs[b] += [x for x in found[n] if x]
            row = row_of(n, runs, n >= args.checkpoint_from)
            bench.draft(args.out, header, [*rows, row])
        if all(runs.values()) and len(runs) == 2:
            compare(runs[BACKENDS[0]][0], runs[BACKENDS[1]][0], TOLERANCE[bench.dtype])
        rows.append(row)
        profiles += [(f"{n:,} tokens, {b}", x[0]) for b, x in runs.items() if x and args.profile]
    bench.table(header, rows)
    for what, run in profiles:
        show_kernels(bench, what, run)
    return "one GPU" if cuda else "the CPU, tiny"
