"""Attention kernels on one GPU: TFLOP/s forward and backward, ours beside the libraries'.

    python benchmarks/attention_gpu.py                     # all lengths, widths and masks
    python benchmarks/attention_gpu.py --lengths 16384 --widths 128 --masks causal
    python benchmarks/attention_gpu.py --write-table kernels/selection.json
    python benchmarks/attention_gpu.py --check             # correctness alone, tiny; also on a CPU,
                                                           # with TRITON_INTERPRET=1 our kernels too

Contenders: ours (Triton); ATen's flash attention and cuDNN's, where the mask is plain; PyTorch's
memory-efficient kernel with the dense mask that a HuggingFace model would build; flex_attention,
compiled. 16,384 tokens a batch (one sequence where it is longer), 2,048 / width heads. Operations
are those of visible pairs: 4 x width each forward, 2.5 times that backward. Medians of interleaved
runs. Before a contender is timed, one head of its output and of every gradient is compared with
attention computed in float64; one that is wrong stops the benchmark, one that does not fit the
memory says so. --write-table leaves the fastest kernel for each plain mask, by the longest length
up to 16,384, for ``paradyse.kernels.selection`` to choose by.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attention_cases import (
    DTYPES,
    MASKS,
    PLAIN,
    Case,
    check,
    contenders,
)
from common import Goal, Report, median, parser, table

from paradyse.kernels.selection import BACKWARD, FORWARD, KERNELS, VARIABLE, capability_of

LENGTHS = [1024 * 2**i for i in range(8)]  # 1K to 128K
TABLE_LENGTH = 16384

Times = dict[str, dict[str, float | str]]
"""Contender -> direction -> seconds, or why there are none."""


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
    inputs = case.inputs()
    times: Times = {}
    steps: dict[tuple[str, str], Callable[[], Any]] = {}
    for c in contenders(case):
        try:
            check(case, c, inputs)
            steps[c.name, FORWARD], steps[c.name, BACKWARD] = c.steps(*inputs)
            times[c.name] = {}
        except torch.OutOfMemoryError:
            times[c.name] = dict.fromkeys((FORWARD, BACKWARD), "out of memory")
        torch.cuda.empty_cache()
    repeats: dict[tuple[str, str], int] = {}
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for key, step in list(steps.items()):
        try:
            seconds_of(step, 1)
            repeats[key] = max(1, int(2e-3 / seconds_of(step, 1)))
        except torch.OutOfMemoryError:
            times[key[0]][key[1]] = "out of memory"
            del steps[key], taken[key]
    for _ in range(runs):
        for key, step in steps.items():
            taken[key].append(seconds_of(step, repeats[key]))
    for (name, direction), values in taken.items():
        times[name][direction] = median(values)
    return times


def rate(case: Case, direction: str, seconds: float | str) -> str:
    if isinstance(seconds, str):
        return seconds
    return f"{case.operations(direction) / seconds / 1e12:.0f}"


def goals(case: Case, times: Times) -> list[Goal]:
    """What these figures are held to, where they are of a case that has a goal."""

    def ratio(other: str, direction: str) -> float | None:
        a, b = (times.get(n, {}).get(direction) for n in (other, "triton"))
        return a / b if isinstance(a, float) and isinstance(b, float) else None

    found = []
    if (case.mask, case.tokens, case.width) == ("causal", 16384, 128):
        for direction, limit in ((FORWARD, 0.9), (BACKWARD, 0.85)):
            r = ratio("aten_flash", direction)
            if r is not None:
                what = f"causal, 16K, width 128, {direction}: of the rate of ATen's flash"
                found.append(Goal(what, r, limit, at_least=True))
    if case.mask not in PLAIN and case.tokens == 32768:
        a, b = (times.get(n, {}) for n in ("efficient, dense mask", "triton"))
        both = [*a.values(), *b.values()]
        if len(both) == 4 and all(isinstance(x, float) for x in both):
            r = sum(x for x in a.values() if isinstance(x, float)) / sum(
                x for x in b.values() if isinstance(x, float)
            )
            what = f"{case.mask}, 32K, width {case.width}: times as fast as SDPA's dense mask"
            found.append(Goal(what, r, 5, at_least=True))
    return found


def table_rows(case: Case, times: Times) -> list[dict[str, Any]]:
    """The fastest kernel of ``selection`` forward and backward."""
    rows = []
    for direction in (FORWARD, BACKWARD):
        seconds = {n: t for n in KERNELS if isinstance(t := times.get(n, {}).get(direction), float)}
        if seconds:
            rows.append(
                {
                    "capability": capability_of(torch.device("cuda")),
                    "dtype": case.dtype_name,
                    "width": case.width,
                    "mask": case.mask,
                    "direction": direction,
                    "kernel": min(seconds, key=lambda n: seconds[n]),
                    "tokens": case.tokens,
                    "seconds": seconds,
                }
            )
    return rows


def run_checks() -> int:
    """Correctness at tiny sizes, on whatever device there is."""
    failed = 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = ["bfloat16", "float16"] if device == "cuda" else ["float32"]
    for name in names:
        for mask in MASKS:
            for tokens, width in ((64, 16), (200, 64), (257, 24)):
                case = Case(mask, tokens, width, DTYPES[name], device, batch=2, heads=2)
                for c in contenders(case):
                    try:
                        check(case, c, case.inputs())
                        verdict = "ok"
                    except AssertionError as e:
                        verdict, failed = f"WRONG: {e}", failed + 1
                    print(f"{name} {mask}, {tokens} tokens, width {width}, {c.name}: {verdict}")
    print(f"{failed} wrong" if failed else "all right")
    return int(failed > 0)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--check", action="store_true", help="correctness alone, tiny sizes")
    arguments.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    arguments.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    arguments.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    arguments.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    arguments.add_argument("--runs", type=int, default=7)
    arguments.add_argument("--write-table", type=Path, metavar="PATH")
    args = arguments.parse_args()
    # Ours is timed as ours, whatever the table says.
    os.environ[VARIABLE] = "triton"
    if args.check:
        return run_checks()
    if not torch.cuda.is_available():
        sys.exit(
            "attention_gpu needs a CUDA device, and PyTorch sees none; `--check` compares results "
            "on a CPU, attention_cpu.py times the CPU's kernels"
        )
    if args.quick:
        args.lengths, args.runs = [1024], 3
    report = Report("attention_gpu", args, dtype=args.dtype)
    report.add(
        f"TFLOP/s of one attention operator, medians of {args.runs} interleaved runs; forward / "
        "backward. Correctness was checked first.",
    )
    chosen: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for mask in args.masks:
        for width in args.widths:
            rows: list[list[str]] = []
            names: list[str] = []
            for tokens in args.lengths:
                case = Case(mask, tokens, width, DTYPES[args.dtype], "cuda")
                times = measure(case, args.runs)
                names = names or list(times)
                cells = [
                    " / ".join(rate(case, d, times[n][d]) for d in (FORWARD, BACKWARD))
                    for n in names
                ]
                rows.append([f"{tokens:,}", *cells])
                report.goals += goals(case, times)
                print(f"{mask}, width {width}, {tokens:,}: {cells}", file=sys.stderr, flush=True)
                if mask in PLAIN and tokens <= TABLE_LENGTH:
                    chosen[width, mask] = table_rows(case, times)
            report.add("", f"## {MASKS[mask]}, width {width}", "")
            report.add(*table(["tokens", *names], rows))
    if args.write_table:
        text = json.dumps({"rows": [r for rows in chosen.values() for r in rows]}, indent=1)
        args.write_table.write_text(text + "\n")
        report.add("", f"Fastest kernels of plain masks: {args.write_table.name}")
    return report.finish("one GPU")


if __name__ == "__main__":
    sys.exit(main())
