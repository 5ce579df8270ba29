"""Attention kernels on one GPU: TFLOP/s forward and backward, ours beside the libraries'.

    python benchmarks/attention_gpu.py                     # all lengths, widths and masks
    python benchmarks/attention_gpu.py --lengths 16384 --widths 128 --masks causal
    python benchmarks/attention_gpu.py --write-table kernels/selection.json
    python benchmarks/attention_gpu.py --check             # correctness alone, tiny; also on a CPU

Contenders: ours (Triton); ATen's flash attention and cuDNN's, where the mask is plain; PyTorch's
memory-efficient kernel with the dense mask that a HuggingFace model would build; flex_attention,
compiled. 16,384 tokens a batch (one sequence where it is longer), 2,048 / width heads, each --group
of which share a KV head, documents of 2,048 tokens on average. Operations are those of visible
pairs: 4 x width each forward, 2.5 times that backward. Before a contender is timed, one head of its
output and of every gradient is compared with attention computed in float64; one that does not fit
the memory says so. A second table has what the first forward and backward of a length took, which a
length seen for the first time costs: plans and compilations. --without leaves
out contenders by the names that the tables have. --write-table leaves the fastest
kernel for each plain mask and for windows, at each length up to 16,384, for
``paradyse.kernels.selection`` to choose by. With --flash FA3 (or another that is installed) it
takes the place of ATen's flash attention; its rows stand in the table beside those of others.
Report and table are written anew after every length.
"""

import json
import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from attention_cases import MASKS, PLAIN, Case, check, contenders
from runner import RESULTS, Benchmark, benchmark, log, median, take_turns
from torch.nn.attention import activate_flash_attention_impl, list_flash_attention_impls

from paradyse.kernels import selection
from paradyse.kernels.selection import (
    BACKWARD,
    CUDNN,
    FORWARD,
    KERNELS,
    OWN_FLASH,
    VARIABLE,
    capability_of,
)

LENGTHS = tuple(1024 * 2**i for i in range(8))  # 1K to 128K
TABLE_LENGTH = 16384

OPTIONS: dict[str, Any] = {"lengths": LENGTHS, "widths": (64, 128), "runs": 7, "group": 1}
OPTIONS["masks"] = {"nargs": "+", "choices": MASKS, "default": list(MASKS)}
OPTIONS["dtype"] = {"choices": ("bfloat16", "float16"), "default": "bfloat16"}
OPTIONS["check"] = {"action": "store_true", "help": "correctness alone, tiny sizes"}
OPTIONS["without"] = {"nargs": "+", "default": (), "metavar": "CONTENDER", "help": "leave out"}
OPTIONS["flash"] = {"choices": list_flash_attention_impls(), "help": "in place of ATen's"}
OPTIONS["write_table"] = {"type": Path, "metavar": "PATH"}
QUICK = {"lengths": (64, 128), "widths": (16,), "runs": 2}

FIRST = "first"
Times = dict[str, dict[str, float]]
"""Contender -> direction -> seconds, infinitely many where it runs out of memory; and ``FIRST``:
those of the first forward and backward of the length, not a number where it failed."""


def seconds_of(step: Callable[[], Any], repeats: int) -> float:
    """Seconds of one ``step`` on the GPU, or on the CPU where there is none, the mean of
    ``repeats`` in a row."""
    if not torch.cuda.is_available():
        return clock_of(lambda: [step() for _ in range(repeats)]) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def clock_of(step: Callable[[], Any]) -> float:
    """Seconds of ``step`` by the host's clock, what it left to the GPU included."""
    begin = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def warm_up(case: Case, without: Sequence[str]) -> None:
    """One call of each kernel of ``selection`` at a length that is not timed: what a kernel makes
    once for all lengths is no part of what the first of a length costs."""
    inputs = case.inputs()
    for c in contenders(case):
        if c.name in KERNELS and c.name not in without:
            with suppress(RuntimeError, NotImplementedError):  # which ``measure`` tells of
                c.results(inputs)


def measure(case: Case, runs: int, without: Sequence[str] = ()) -> Times:
    """Every contender that can compute the case, forward and backward, but for those ``without``
    which it is to be."""
    inputs, n = case.inputs(), case.tokens
    times: Times = {}
    turns: dict[tuple[str, str], Callable[[int], float]] = {}
    for c in contenders(case):
        if c.name in without:
            continue
        times[c.name] = dict.fromkeys((FORWARD, BACKWARD, FIRST), math.inf)
        try:
            times[c.name][FIRST] = clock_of(partial(c.results, inputs))
            check(case, c, inputs)
            if not c.differentiable:
                continue
            for direction, step in zip((FORWARD, BACKWARD), c.steps(inputs), strict=True):
                seconds_of(step, 1)
                repeats = max(1, int(2e-3 / seconds_of(step, 1)))
                turns[c.name, direction] = lambda n, f=step, r=repeats: seconds_of(f, r)
        except torch.OutOfMemoryError:
            times[c.name][FIRST] = math.inf
            log(f"{c.name}: out of memory")
        except (RuntimeError, NotImplementedError) as e:  # a kernel that is not for this device
            times[c.name][FIRST] = math.nan
            log(f"{c.name}, {MASKS[case.mask]}, {n:,} tokens: {type(e).__name__}: {e}")
        torch.cuda.empty_cache()  # which does nothing without a GPU
    for (name, direction), found in take_turns(turns, [n], range(runs)).items():
        times[name][direction] = median(found[n])
    return times


def rate(case: Case, seconds: dict[str, float]) -> str:
    """TFLOP/s forward and backward."""
    if math.isnan(seconds[FIRST]):
        return "failed"
    found = []
    for direction in (FORWARD, BACKWARD):
        per_s = case.operations(direction) / seconds[direction] / 1e12
        found.append(f"{per_s:.0f}" if per_s >= 10 or not per_s else f"{per_s:.2g}")
    if seconds[FIRST] == math.inf:
        return "out of memory"
    return " / ".join(found) if seconds[FORWARD] < math.inf else "not timed"


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
    """The fastest kernel of ``selection`` forward and backward, and half of what the first of a
    length cost in both where that is a plan of cuDNN's."""
    rows = []
    device = torch.device(case.device)
    where = {"capability": capability_of(device) if device.type == "cuda" else "cpu"}
    where |= {"mask": case.mask, "flash": selection.flash_in_use()}
    where |= {"dtype": str(case.dtype).removeprefix("torch."), "width": case.width}
    for d in (FORWARD, BACKWARD):
        if seconds := {n: times[n][d] for n in KERNELS if n in times and times[n][d] < math.inf}:
            found: dict[str, Any] = {"kernel": min(seconds, key=seconds.__getitem__)}
            found |= {"tokens": case.tokens, "pairs": case.batch * case.heads * case.tokens**2}
            if found["kernel"] == CUDNN:  # ours are compiled once for all lengths
                steady = sum(times[CUDNN][of] for of in (FORWARD, BACKWARD))
                found["setup_s"] = max(0.0, times[CUDNN][FIRST] - steady) / 2
            rows.append({**where, "direction": d, **found, "seconds": seconds})
    return rows


def run_checks(bench: Benchmark, without: Sequence[str]) -> None:
    """Correctness at tiny sizes, on whatever device there is, of all contenders but ``without``."""
    cuda, rows, right = torch.cuda.is_available(), [], 0
    device, names = ("cuda", ["bfloat16", "float16"]) if cuda else ("cpu", ["float32"])
    shapes = ((64, 16, 2), (200, 64, 1), (257, 24, 2))
    header = ["wrong", "by"]
    for name, mask, (tokens, width, kv_heads) in product(names, MASKS, shapes):
        sizes = device, 2, 2, kv_heads, tokens // 4
        case = Case(mask, tokens, width, getattr(torch, name), *sizes)
        for c in contenders(case):
            if c.name in without:
                continue
            try:
                check(case, c, case.inputs())
                right += 1
            except (AssertionError, RuntimeError, NotImplementedError) as e:
                what = f"{name} {mask}, {tokens} tokens, width {width}, {kv_heads} KV heads of 2"
                rows.append([f"{what}, {c.name}", str(e).splitlines()[0]])
        log(f"{name} {mask}, {tokens} tokens, width {width}: {right} right, {len(rows)} wrong")
        bench.draft(bench.args.out, header, rows)
    bench.add(f"Compared with float64 on {device}, {', '.join(names)}: {right} results are right.")
    if rows:
        bench.table(header, rows)
    bench.at_most("results that are wrong", len(rows), 0)


def case_of(mask: str, width: int, tokens: int, args: Namespace) -> Case:
    """The operator that is timed."""
    cuda = torch.cuda.is_available()
    batch, heads = max(1, 16384 // tokens) if cuda else 1, max(2048 // width if cuda else 2, 1)
    if heads % args.group:
        sys.exit(f"--group {args.group}: {heads} heads of width {width} are no multiple of it")
    sizes = batch, heads, heads // args.group, min(4096, tokens // 4), max(3, tokens // 2048)
    dtype = getattr(torch, args.dtype if cuda else "float32")
    return Case(mask, tokens, width, dtype, "cuda" if cuda else "cpu", *sizes)


def use_flash(name: str) -> None:
    """Have the implementation ``name`` take the place of PyTorch's own flash attention."""
    try:
        activate_flash_attention_impl(name)
    except (ImportError, RuntimeError) as e:
        sys.exit(f"--flash {name}: {type(e).__name__}: {e}; install it, or leave the option out")


def write_table(path: Path | None, chosen: Iterable[list[dict[str, Any]]]) -> None:
    """Writes the ``chosen`` rows for ``paradyse.kernels.selection``, if there is a ``path``: beside
    those that stand there of what was not measured again."""
    rows = [row for of in chosen for row in of]
    if path and rows:
        held = json.loads(path.read_text())["rows"] if path.exists() else []
        again = {_measured_at(row) for row in rows}
        rows = [row for row in held if _measured_at(row) not in again] + rows
        text = json.dumps({"rows": rows}, indent=1)
        path.write_text(text + "\n")


def _measured_at(row: dict[str, Any]) -> tuple[Any, ...]:
    """All of a row but what was found."""
    at = "capability", "dtype", "width", "mask", "direction", "tokens"
    return row.get("flash", OWN_FLASH), *(row.get(name) for name in at)


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> str:
    cuda = torch.cuda.is_available()
    bench.dtype = args.dtype if cuda else "float32"
    os.environ[VARIABLE] = "triton"  # ours is timed as ours, whatever the table says
    if args.flash:
        use_flash(args.flash)
    where = "one GPU" if cuda else "the CPU, tiny"
    if args.check:
        bench.name += "_check"
        args.out = None if args.out == RESULTS else args.out
        run_checks(bench, args.without)
        return where
    if not cuda and not args.quick:
        sys.exit(
            "attention_gpu needs a CUDA device, and PyTorch sees none; `--check` compares results "
            "on a CPU, `--quick` runs to its end there, attention_cpu.py times the CPU's kernels"
        )
    bench.add(
        f"TFLOP/s of one attention operator, medians of {args.runs} interleaved runs; forward / "
        f"backward. {args.group} query heads a KV head. Correctness was checked first."
    )
    chosen: list[list[dict[str, Any]]] = []
    failed = 0
    for mask, width in product(args.masks, args.widths):
        rows, first = [], []
        title = f"## {MASKS[mask]}, width {width}"
        warm_up(case_of(mask, width, min(args.lengths) // 2, args), args.without)
        for tokens in args.lengths:
            case = case_of(mask, width, tokens, args)
            times = measure(case, args.runs, args.without)
            rows.append([f"{tokens:,}", *(rate(case, of) for of in times.values())])
            first.append([f"{tokens:,}", *(f"{1e3 * of[FIRST]:.1f}" for of in times.values())])
            add_goals(bench, case, times)
            failed += sum(math.isnan(of[FIRST]) for of in times.values())
            log(f"{mask}, width {width}:", *rows[-1])
            if mask in selection.MASKS and tokens <= TABLE_LENGTH:
                chosen.append(table_rows(case, times))
            write_table(args.write_table, chosen)
            bench.draft(args.out, ["tokens", *times], rows, title)
        bench.table(["tokens", *times], rows, title)
        bench.table(["tokens", *times], first, "The first forward and backward of a length, ms:")
    bench.at_most("contenders that failed, as the log says", failed, 0)
    if args.write_table:
        bench.add("", f"Fastest kernels of plain masks: {args.write_table.name}")
    return where
