"""Attention kernels on one GPU: TFLOP/s forward and backward, ours beside the libraries'.

    python benchmarks/attention_gpu.py                     # all lengths, widths and masks
    python benchmarks/attention_gpu.py --lengths 16384 --widths 128 --masks causal
    python benchmarks/attention_gpu.py --write-table kernels/selection.json
    python benchmarks/attention_gpu.py --check             # correctness alone, tiny; also on a CPU

Contenders: ours (Triton); ATen's flash attention and cuDNN's, where the mask is plain; PyTorch's
memory-efficient kernel with the dense mask that a HuggingFace model would build; flex_attention,
compiled. 16,384 tokens a batch (one sequence where it is longer), 2,048 / width heads, documents of
2,048 tokens on average. Operations are those of visible pairs: 4 x width each forward, 2.5 times
that backward. Before a contender is timed, one head of its output and of every gradient is compared
with attention computed in float64; one that does not fit the memory says so. --write-table leaves
the fastest kernel for each plain mask, by the longest length up to 16,384, for
``paradyse.kernels.selection`` to choose by.
"""

import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from attention_cases import MASKS, PLAIN, Case, check, contenders
from runner import Benchmark, benchmark, log, median, take_turns

from paradyse.kernels.selection import BACKWARD, FORWARD, KERNELS, VARIABLE, capability_of

LENGTHS = tuple(1024 * 2**i for i in range(8))  # 1K to 128K
TABLE_LENGTH = 16384

OPTIONS: dict[str, Any] = {"lengths": LENGTHS, "widths": (64, 128), "runs": 7}
OPTIONS["masks"] = {"nargs": "+", "choices": MASKS, "default": list(MASKS)}
OPTIONS["dtype"] = {"choices": ("bfloat16", "float16"), "default": "bfloat16"}
OPTIONS["check"] = {"action": "store_true", "help": "correctness alone, tiny sizes"}
OPTIONS["write_table"] = {"type": Path, "metavar": "PATH"}
QUICK = {"lengths": (1024,), "runs": 3}

Times = dict[str, dict[str, float]]
"""Contender -> direction -> seconds, infinitely many where it runs out of memory."""


def seconds_of(step: Callable[[], Any], repeats: int) -> float:
    """Seconds of one ``step`` on the GPU, the mean of ``repeats`` in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def measure(case: Case, runs: int) -> Times:
    """Every contender that can compute the case, forward and backward."""
    inputs, n = case.inputs(), case.tokens
    times: Times = {}
    turns: dict[tuple[str, str], Callable[[int], float]] = {}
    for c in contenders(case):
        times[c.name] = dict.fromkeys((FORWARD, BACKWARD), math.inf)
        try:
            check(case, c, inputs)
            for direction, step in zip((FORWARD, BACKWARD), c.steps(inputs), strict=True):
                seconds_of(step, 1)
                repeats = max(1, int(2e-3 / seconds_of(step, 1)))
                turns[c.name, direction] = lambda n, f=step, r=repeats: seconds_of(f, r)
        except torch.OutOfMemoryError:
            log(f"{c.name}: out of memory")
        torch.cuda.empty_cache()
    for (name, direction), found in take_turns(turns, [n], range(runs)).items():
        times[name][direction] = median(found[n])
    return times


def rate(case: Case, direction: str, seconds: float) -> str:
    if seconds == math.inf:
        return "out of memory"
    return f"{case.operations(direction) / seconds / 1e12:.0f}"


def add_goals(bench: Benchmark, case: Case, times: Times) -> None:
    """What these figures are held to, where they are of a case that has a goal."""

    def goal(what: str, other: str, directions: Sequence[str], limit: float) -> None:
        if other in times:
            theirs, ours = (sum(times[n][d] for d in directions) for n in (other, "triton"))
            if theirs + ours < math.inf:
                bench.at_least(what, theirs / ours, limit)

    if (case.mask, case.tokens, case.width) == ("causal", 16384, 128):
        for direction, limit in ((FORWARD, 0.9), (BACKWARD, 0.85)):
            what = f"causal, 16K, width 128, {direction}: of the rate of ATen's flash"
            goal(what, "aten_flash", [direction], limit)
    if case.mask not in PLAIN and case.tokens == 32768:
        what = f"{case.mask}, 32K, width {case.width}: times as fast as SDPA's dense mask"
        goal(what, "efficient, dense mask", (FORWARD, BACKWARD), 5)


def table_rows(case: Case, times: Times) -> list[dict[str, Any]]:
    """The fastest kernel of ``selection`` forward and backward."""
    rows = []
    where = {"capability": capability_of(torch.device("cuda")), "mask": case.mask}
    where |= {"dtype": str(case.dtype).removeprefix("torch."), "width": case.width}
    for d in (FORWARD, BACKWARD):
        if seconds := {n: times[n][d] for n in KERNELS if n in times and times[n][d] < math.inf}:
            found = {"kernel": min(seconds, key=seconds.__getitem__), "tokens": case.tokens}
            rows.append({**where, "direction": d, **found, "seconds": seconds})
    return rows


def run_checks() -> int:
    """Correctness at tiny sizes, on whatever device there is."""
    cuda, failed = torch.cuda.is_available(), 0
    device, names = ("cuda", ["bfloat16", "float16"]) if cuda else ("cpu", ["float32"])
    for name, mask, (tokens, width) in product(names, MASKS, ((64, 16), (200, 64), (257, 24))):
        case = Case(mask, tokens, width, getattr(torch, name), device, 2, 2, 2, tokens // 4)
        for c in contenders(case):
            try:
                check(case, c, case.inputs())
                verdict = "ok"
            except AssertionError as e:
                verdict, failed = f"WRONG: {e}", failed + 1
            print(f"{name} {mask}, {tokens} tokens, width {width}, {c.name}: {verdict}")
    print(f"{failed} wrong" if failed else "all right")
    return int(failed > 0)


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> str:
    bench.dtype = args.dtype
    os.environ[VARIABLE] = "triton"  # ours is timed as ours, whatever the table says
    if args.check:
        sys.exit(run_checks())
    if not torch.cuda.is_available():
        sys.exit(
            "attention_gpu needs a CUDA device, and PyTorch sees none; `--check` compares results "
            "on a CPU, attention_cpu.py times the CPU's kernels"
        )
    bench.add(
        f"TFLOP/s of one attention operator, medians of {args.runs} interleaved runs; forward / "
        "backward. Correctness was checked first."
    )
    chosen: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for mask, width in product(args.masks, args.widths):
        rows = []
        for tokens in args.lengths:
            batch, heads = max(1, 16384 // tokens), 2048 // width
            sizes = batch, heads, heads, min(4096, tokens // 4), max(3, tokens // 2048)
            case = Case(mask, tokens, width, getattr(torch, args.dtype), "cuda", *sizes)
            times = measure(case, args.runs)
            rates = ([rate(case, d, t) for d, t in of.items()] for of in times.values())
            rows.append([f"{tokens:,}", *map(" / ".join, rates)])
            add_goals(bench, case, times)
            log(f"{mask}, width {width}:", *rows[-1])
            if mask in PLAIN and tokens <= TABLE_LENGTH:
                chosen[width, mask] = table_rows(case, times)
        bench.table(["tokens", *times], rows, f"## {MASKS[mask]}, width {width}")
    if args.write_table:
        text = json.dumps({"rows": [r for rows in chosen.values() for r in rows]}, indent=1)
        args.write_table.write_text(text + "\n")
        bench.add("", f"Fastest kernels of plain masks: {args.write_table.name}")
    return "one GPU"
