"""Two ranks: every static strategy and ``auto`` against PyTorch's own parallel training.

    python benchmarks/two_ranks.py            # half an hour on two cores, most of it compilation
    python benchmarks/two_ranks.py --quick    # tiny sizes, to see that it runs

Llama of 4 layers, hidden 256, 8 heads, 4 KV heads, float32; a trace of 16 lengths from 128 to
4,096, all of them multiples of 32 because PyTorch's contenders ask for that. A step is zero_grad,
forward, backward, with the gradients of replicated weights whole on every rank at its end. Every
contender is warmed up on every length and has its loss and its gradients compared with
one-process eager; then the contenders take turns on each length, and the slower rank counts. What
is compared is the time of the whole trace: the sum over the lengths of the medians.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from common import (
    Goal,
    Report,
    check_equal,
    llama,
    median,
    milliseconds,
    parser,
    random_tokens,
    table,
)
from contenders import Ours, many_models, plans_of, time_step
from counterparts import ContextParallel, TensorParallel
from ranks import on_two_ranks
from torch.distributed.device_mesh import init_device_mesh

from paradyse.cli.launch import Rank

# Many short, few long, as text has them; 17,312 tokens.
TRACE = (512, 128, 1024, 192, 3072, 256, 160, 640, 1536, 384, 4096, 320, 896, 768, 2048, 1280)
STRATEGIES = ("megatron_ts", "megatron_cz", "ulysses_z", "colossal_z", "metp")
TENSOR, RING, RING_COMPILED = "torch tensor parallel", "torch ring", "torch ring compiled"
TORCH = (TENSOR, RING, RING_COMPILED)
COUNTERPARTS = {"megatron_ts": (TENSOR,), "megatron_cz": (RING, RING_COMPILED)}
"""For the other three PyTorch has none; the table shows them beside the rest."""

TOLERANCE = 1e-4
"""Relative, float32, of losses and of each gradient (by norm), against one-process eager."""


@many_models
def measure(
    rank: Rank,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    trace: tuple[int, ...],
    runs: int,
    inner: str,
    only: tuple[str, ...],
) -> dict[str, Any]:
    """What one rank does; rank 0's seconds are the larger of the two ranks'."""
    mesh = init_device_mesh("cpu", (rank.size,))

    def model() -> Any:
        return llama(layers, hidden, heads, kv_heads)

    make: dict[str, Callable[[], Any]] = {
        TENSOR: lambda: TensorParallel(model(), mesh),
        RING: lambda: ContextParallel(model(), mesh, compiled=False),
        RING_COMPILED: lambda: ContextParallel(model(), mesh, compiled=True),
    }
    for name in (*STRATEGIES, "auto"):
        make[name] = lambda name=name: Ours(model(), name, inner)
    contenders = {name: build() for name, build in make.items() if not only or name in only}
    reference = model()
    for name, contender in contenders.items():
        start = time.perf_counter()
        for seq_len in trace:
            _check(name, contender, reference, seq_len)
        rank.send(f"{name}: agrees with eager at all lengths, {time.perf_counter() - start:.0f} s")
    seconds: dict[str, dict[int, list[float]]] = {n: {s: [] for s in trace} for n in contenders}
    for run in range(runs + 1):
        for seq_len in trace:
            ids = random_tokens(seq_len)
            for name, contender in contenders.items():
                taken = time_step(contender, ids)
                if run:  # the first run warms up
                    seconds[name][seq_len].append(taken)
        rank.send(f"run {run} of {runs}" if run else "warmed up")
    plans = plans_of(contenders["auto"].run) if "auto" in contenders else {}
    return {"seconds": seconds, "plans": plans}


def _check(name: str, contender: Any, reference: Any, seq_len: int) -> None:
    """Loss at this length, and every gradient."""
    ids = random_tokens(seq_len)
    reference.zero_grad()
    expected = reference(input_ids=ids, labels=ids, use_cache=False).loss
    expected.backward()
    contender.model.zero_grad()
    loss = contender.step(ids).clone()
    if name in (RING, RING_COMPILED):  # each rank has its part of the sum
        dist.all_reduce(loss)
    at = f"{name} at {seq_len} tokens"
    check_equal({"eager": float(expected.detach()), at: float(loss)}, TOLERANCE)
    grads = contender.gradients()
    for weight, p in reference.named_parameters():
        error = float((grads[weight] - p.grad).norm() / p.grad.norm())
        if not error <= TOLERANCE:
            sys.exit(f"not timed: {at} has the gradient of {weight} off by {error:.1e}")


@dataclass
class Figures:
    """Medians, and what follows from them."""

    seconds: dict[str, dict[int, list[float]]]
    total: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.total = {n: sum(map(median, by.values())) for n, by in self.seconds.items()}

    def goals(self) -> list[Goal]:
        out = []
        for ours, theirs in COUNTERPARTS.items():
            for other in theirs:
                if ours in self.total and other in self.total:
                    ratio = self.total[other] / self.total[ours]
                    what = f"`{ours}` over {other}, the trace"
                    out.append(Goal(what, ratio, 1.0, at_least=True))
        rivals = [n for n in TORCH if n in self.total]
        if "auto" in self.total and rivals:
            best = min(rivals, key=self.total.__getitem__)
            ratio = self.total[best] / self.total["auto"]
            what = f"`auto` over the fastest of PyTorch's ({best}), the trace"
            out.append(Goal(what, ratio, 1.2, at_least=True))
        return out


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=5)
    arguments.add_argument("--trace", type=int, nargs="*", default=TRACE, help="lengths")
    arguments.add_argument("--inner", default="inductor")
    arguments.add_argument("--only", nargs="*", default=(), help="names of contenders")
    args = arguments.parse_args()
    trace = (64, 128, 96) if args.quick else tuple(args.trace)
    size = {"layers": 2, "hidden": 64} if args.quick else {"layers": 4, "hidden": 256}
    size |= {"heads": 8, "kv_heads": 4}
    given = {"trace": trace, "runs": args.runs, "inner": args.inner, "only": tuple(args.only)}
    result = on_two_ranks("two_ranks:measure", {**size, **given})
    return _report(args, result, trace, size)


def _report(
    args: argparse.Namespace, result: dict[str, Any], trace: tuple[int, ...], size: dict[str, int]
) -> int:
    figures = Figures(result["seconds"])
    names = list(figures.seconds)
    report = Report("two_ranks", args)
    report.add(
        f"Llama of {size['layers']} layers, hidden {size['hidden']}, {size['heads']} heads, "
        f"{size['kv_heads']} KV heads, two ranks, gloo, inner={args.inner}.",
        f"Milliseconds a step, medians of {args.runs} interleaved runs, the slower rank.",
        "",
    )
    rows = []
    for seq_len in sorted(trace):
        times = {n: median(figures.seconds[n][seq_len]) for n in names}
        rows.append([str(seq_len), *(milliseconds(times[n]) for n in names)])
    rows.append(["whole trace", *(milliseconds(figures.total[n]) for n in names)])
    report.add(*table(["tokens", *names], rows))
    if "auto" in figures.total:
        report.add("", "## What auto chose", "")
        chosen = [[str(s), result["plans"].get(s, "")] for s in sorted(trace)]
        report.add(*table(["tokens", "blocks by strategy"], chosen))
        report.add("", "## auto against each contender, the trace", "")
        auto = figures.total["auto"]
        ratios = [[n, f"{figures.total[n] / auto:.2f}"] for n in names if n != "auto"]
        report.add(*table(["contender", "its time over auto's"], ratios))
    report.goals = figures.goals()
    return report.finish("two processes of one thread")


if __name__ == "__main__":
    sys.exit(main())
