"""One GPU: a training step of an unmodified Llama of 1.1 billion parameters, long sequences.

    python benchmarks/one_device.py                     # 32K and 128K tokens
    python benchmarks/one_device.py --lengths 16384     # other lengths
    python benchmarks/one_device.py --quick             # tiny, also on a CPU, to see that it runs

torch.compile(backend="paradyse") against torch.compile(backend="inductor"): HuggingFace's Llama in
the shape of TinyLlama-1.1B (22 layers, hidden 2,048, 32 heads and 4 KV heads of width 64, MLP
5,632, vocabulary 32,000), bfloat16, batch 1. From --checkpoint-from tokens on with HuggingFace's
activation checkpointing, for both. The step is zero_grad, forward, backward.

Every contender runs in a process of its own, and they take turns, --rounds times: so a peak of
memory is one contender's, and one that runs out of memory takes nobody along; the table then says
so. Before times count, the losses and a projection of every gradient on a random vector are
compared. The tables have medians of all steps; the peak is the allocator's
(torch.cuda.max_memory_allocated).
"""

import sys
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
from contenders import Contender, llama
from runner import Benchmark, alone, benchmark, check_equal, log, median, seconds_of, take_turns

OPTIONS = {"lengths": (32768, 131072), "steps": 5, "rounds": 2, "checkpoint_from": 32768}
QUICK = {"lengths": (128, 192), "steps": 2, "rounds": 1, "checkpoint_from": 192}
BACKENDS = ("inductor", "paradyse")
TINY_LLAMA = {"layers": 22, "hidden": 2048, "heads": 32, "kv_heads": 4}
TINY_LLAMA |= {"vocabulary": 32000, "intermediate": 5632}
"""Zhang et al., TinyLlama, arXiv 2401.02385, table 2."""

TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
"""Of a gradient's projection, relative to its norm: bfloat16 rounds every activation to 2^-9."""


@dataclass(frozen=True)
class Case:
    """A model and a length."""

    seq_len: int
    tiny: bool
    device: str
    dtype: str
    checkpointing: bool
    steps: int

    def model(self) -> Any:
        sizes: Any = {"layers": 2, "hidden": 64} if self.tiny else TINY_LLAMA
        model = llama(**sizes, max_tokens=max(self.seq_len, 2048))
        model.to(self.device, getattr(torch, self.dtype)).train()
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model


@dataclass(frozen=True)
class Run:
    """What one process saw."""

    seconds: list[float]
    peak_gib: float
    loss: float
    projections: dict[str, tuple[float, float]]
    """Of each gradient: its product with a random vector of unit length, and its norm."""


def run_one(case: Case, backend: str) -> Run | None:
    """One contender in this process; None where it runs out of memory."""
    cuda = case.device == "cuda"
    try:
        model = case.model()
        contender = Contender(model, torch.compile(model, backend=backend))
        ids = contender.tokens(case.seq_len).to(case.device)
        seconds, losses = [], []
        for i in range(case.steps + 2):  # the first two compile and warm up
            if i == 2 and cuda:
                torch.cuda.reset_peak_memory_stats()
            # The loss on the host is the end of the step's work on a device.
            seconds.append(seconds_of(lambda: losses.append(float(contender.step(ids)))))
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        found = {}
        for i, (name, grad) in enumerate(contender.gradients().items()):
            generator = torch.Generator(grad.device).manual_seed(i)
            direction = torch.randn(grad.shape, generator=generator, device=grad.device)
            product = (grad.float() * direction).sum() / direction.norm()
            found[name] = float(product), float(grad.float().norm())
        return Run(seconds[2:], peak, losses[-1], found)
    except torch.OutOfMemoryError:
        return None


def compare(case: Case, reference: Run, other: Run) -> None:
    """
    Raises:
        SystemExit: the loss or a gradient differs from inductor's.
    """
    tolerance = TOLERANCE[case.dtype]
    check_equal({"inductor": reference.loss, "paradyse": other.loss}, tolerance)
    for name, (product, norm) in reference.projections.items():
        error = abs(other.projections[name][0] - product) / norm
        if not error <= tolerance:
            sys.exit(f"not timed: the gradients of {name} differ by {error:.1e}")


def measure(case: Case, rounds: int) -> list[str]:
    """A row of the table."""
    failed = set()

    def run(backend: str) -> Run | None:
        found = None if backend in failed else alone(run_one, case, backend)
        if found is None:
            failed.add(backend)
        told = found and f"{median(found.seconds):.3f} s, peak {found.peak_gib:.1f} GiB"
        log(f"{case.seq_len:,} tokens, {backend}: {told or 'out of memory'}")
        return found

    turns = {b: lambda n, b=b: run(b) for b in BACKENDS}
    runs = [of[0] for of in take_turns(turns, [0], range(rounds)).values()]
    if not failed:
        compare(case, *(of[0] for of in runs))
    good = [[r for r in of if r] for of in runs]
    times = [median([s for r in of for s in r.seconds]) if of else None for of in good]
    peaks = [max((r.peak_gib for r in of), default=0.0) for of in good]
    ratio = f"{times[0] / times[1]:.2f}" if all(times) else ""
    what = f"{case.seq_len:,} tokens" + ", checkpointing" * case.checkpointing
    cells = [f"{t:.3f}" if t else "out of memory" for t in times]
    return [what, *cells, ratio, *(f"{p:.1f}" if p else "" for p in peaks)]


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> str:
    cuda = torch.cuda.is_available()
    if not args.quick and not cuda:
        sys.exit(
            "one_device needs a CUDA device, and PyTorch sees none; `--quick` runs a tiny model on "
            "the CPU, one_process.py is the same comparison for CPUs"
        )
    device, bench.dtype = ("cuda", "bfloat16") if cuda else ("cpu", "float32")
    bench.add(
        "Training step of a Llama of 1.1 billion parameters on one device, batch 1, medians of "
        f"{args.rounds} x {args.steps} steps.",
    )
    rows = []
    for n in args.lengths:
        case = Case(n, args.quick, device, bench.dtype, n >= args.checkpoint_from, args.steps)
        rows.append(measure(case, args.rounds))
    header = ["length", "inductor, s", "paradyse, s", "ratio"]
    bench.table([*header, "inductor peak, GiB", "paradyse peak, GiB"], rows)
    return "one GPU" if cuda else "the CPU, tiny"
