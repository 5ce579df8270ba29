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

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from common import Report, check_equal, llama, median, parser, random_tokens, table

BACKENDS = ("inductor", "paradyse")
TINY_LLAMA = {"vocab_size": 32000, "intermediate_size": 5632}
"""Zhang et al., TinyLlama, arXiv 2401.02385, table 2; the other sizes are in ``Case``."""

TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
"""Of a gradient's projection, relative to its norm: bfloat16 rounds every activation to 2^-9."""


@dataclass(frozen=True)
class Case:
    """A model and a length; as JSON, what a child process is asked for."""

    seq_len: int
    layers: int = 22
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    device: str = "cuda"
    dtype: str = "bfloat16"
    checkpointing: bool = False
    steps: int = 5


def build(case: Case, backend: str) -> tuple[Any, Any]:
    """The model, and it compiled."""
    extra = {**TINY_LLAMA, "max_position_embeddings": max(case.seq_len, 2048)}
    if case.hidden != Case.hidden:
        extra = {"max_position_embeddings": case.seq_len}
    model = llama(case.layers, case.hidden, case.heads, case.kv_heads, **extra)
    model.to(case.device, getattr(torch, case.dtype)).train()
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, torch.compile(model, backend=backend)


def projections(model: Any) -> dict[str, tuple[float, float]]:
    """Of each gradient: its product with a random vector of unit length, and its norm."""
    found = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        generator = torch.Generator(p.device).manual_seed(i)
        direction = torch.randn(p.shape, generator=generator, device=p.device)
        grad = p.grad.float()
        product = (grad * direction).sum() / direction.norm()
        found[name] = (float(product), float(grad.norm()))
    return found


def run_one(case: Case, backend: str) -> dict[str, Any]:
    """In a child: seconds of each step, the peak, the loss and the gradients' projections."""
    cuda = case.device == "cuda"
    try:
        model, run = build(case, backend)
        ids = random_tokens(case.seq_len, model.config.vocab_size).to(case.device)
        loss, seconds = 0.0, []
        for step in range(case.steps + 2):  # the first two compile and warm up
            if step == 2 and cuda:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            model.zero_grad()
            out = run(input_ids=ids, labels=ids, use_cache=False).loss
            out.backward()
            loss = float(out.detach())
            del out
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
        return {
            "seconds": seconds[2:],
            "first_s": seconds[0],
            "peak_gib": peak,
            "loss": loss,
            "projections": projections(model),
        }
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}


def ask(case: Case, backend: str) -> dict[str, Any]:
    """``run_one`` in a process of its own."""
    given = json.dumps([backend, asdict(case)])
    out = subprocess.run([sys.executable, __file__, "--one", given], capture_output=True, text=True)
    if out.returncode:
        sys.exit(f"{backend} at {case.seq_len} tokens failed:\n{out.stderr}")
    found: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    told = found.get("error") or f"{median(found['seconds']):.3f} s, peak {found['peak_gib']} GiB"
    print(f"{case.seq_len:,} tokens, {backend}: {told}", file=sys.stderr, flush=True)
    return found


def compare(case: Case, results: dict[str, dict[str, Any]]) -> None:
    """
    Raises:
        SystemExit: a loss or a gradient differs from inductor's.
    """
    tolerance = TOLERANCE[case.dtype]
    check_equal({name: r["loss"] for name, r in results.items()}, tolerance)
    reference, *others = (r["projections"] for r in results.values())
    whole = sum(norm**2 for _, norm in reference.values()) ** 0.5
    for other in others:
        for name, (product, norm) in reference.items():
            # A key bias and the like have a gradient that is zero but for rounding.
            scale = max(norm, 1e-3 * whole)
            error = abs(other[name][0] - product) / scale
            if not error <= tolerance:
                sys.exit(f"not timed: the gradients of {name} differ by {error:.1e}")


def measure(case: Case, rounds: int) -> list[str]:
    """A row of the table."""
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in BACKENDS}
    for _ in range(rounds):
        for name in BACKENDS:
            if not any("error" in r for r in taken[name]):
                taken[name].append(ask(case, name))
    good = {name: runs[0] for name, runs in taken.items() if "error" not in runs[0]}
    if len(good) == len(BACKENDS):
        compare(case, good)
    seconds, cells, peaks = {}, [], []
    for name, runs in taken.items():
        if name not in good:
            cells.append(runs[0]["error"])
            peaks.append("")
            continue
        seconds[name] = median([s for r in runs for s in r["seconds"]])
        peak = max(r["peak_gib"] or 0 for r in runs)
        cells.append(f"{seconds[name]:.3f}")
        peaks.append(f"{peak:.1f}" if peak else "")
    ratio = f"{seconds['inductor'] / seconds['paradyse']:.2f}" if len(seconds) == 2 else ""
    what = f"{case.seq_len:,} tokens" + (", checkpointing" if case.checkpointing else "")
    return [what, *cells, ratio, *peaks]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072])
    arguments.add_argument("--steps", type=int, default=Case.steps)
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--checkpoint-from", type=int, default=32768, metavar="TOKENS")
    arguments.add_argument("--one", help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.one:
        backend, fields = json.loads(args.one)
        print(json.dumps(run_one(Case(**fields), backend)))
        return 0
    if not args.quick and not torch.cuda.is_available():
        sys.exit(
            "one_device needs a CUDA device, and PyTorch sees none; `--quick` runs a tiny model on "
            "the CPU, one_process.py is the same comparison for CPUs"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if device == "cuda" else "float32"
    if args.quick:
        shape = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "device": device}
        cases = [Case(n, **shape, dtype=dtype, steps=2, checkpointing=n > 128) for n in (128, 192)]
    else:
        cases = [
            Case(n, steps=args.steps, checkpointing=n >= args.checkpoint_from) for n in args.lengths
        ]
    rounds = 1 if args.quick else args.rounds
    report = Report("one_device", args, dtype=dtype)
    report.add(
        "Training step of a Llama of 1.1 billion parameters on one device, batch 1, medians of "
        f"{rounds} x {cases[0].steps} steps.",
        "",
    )
    rows = [measure(case, rounds) for case in cases]
    header = ["length", "inductor, s", "paradyse, s", "ratio"]
    report.add(*table([*header, "inductor peak, GiB", "paradyse peak, GiB"], rows))
    return report.finish("one GPU" if device == "cuda" else "the CPU, tiny")


if __name__ == "__main__":
    sys.exit(main())
