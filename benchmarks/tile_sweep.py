"""Tile sizes of our attention kernels by time: what each kernel is fastest with on this GPU.

    python benchmarks/tile_sweep.py                        # bfloat16, widths 64 and 128
    python benchmarks/tile_sweep.py --widths 256 --minutes 5
    python benchmarks/tile_sweep.py --masks documents      # which have tiles of their own
    python benchmarks/tile_sweep.py --write-table kernels/tiles.json
    TRITON_INTERPRET=1 python benchmarks/tile_sweep.py --quick   # on a CPU, to see that it runs

Every tile of a grid is tried: 64 to 256 of what a program holds and 32 to 128 of what it steps
through, 4 and 8 warps, 2 to 4 stages, but for those that leave registers idle or need more than
there are of them, or of shared memory. --workers processes compile them, into Triton's cache, for
half of the --minutes at most; then this one times each alone, until the minutes are over; of the
fastest, loops over partly visible tiles are tried without stages too. The time is that of all
--masks together; of the forward kernel its own, of the two backward kernels both together. A tile
that does not fit the device is passed over. Results under the tiles that were found are compared
with float64 at the end. --write-table leaves them for ``flash_plan``, written anew after every
width, with what the table has of others; `PARADYSE_TILES` names such a table.
"""

import json
import math
import os
import sys
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from attention_cases import MASKS, Case, Inputs, check
from attention_gpu import seconds_of
from runner import Benchmark, benchmark, log, median

from paradyse.kernels import flash_backward, flash_forward, flash_plan, flash_runs
from paradyse.kernels.attention_core import Backward
from paradyse.kernels.attention_mask import AttentionSpec
from paradyse.kernels.flash_plan import Config, Configs

OPTIONS: dict[str, Any] = {"widths": (64, 128), "tokens": 16384, "group": 4, "minutes": 8.0}
DOCUMENTS = "documents"
OPTIONS["masks"] = {"nargs": "+", "choices": list(MASKS), "default": ["causal", "window"]}
OPTIONS["dtype"] = {"choices": ("bfloat16", "float16", "float32"), "default": "bfloat16"}
OPTIONS |= {"workers": max(1, min(14, (os.cpu_count() or 1) - 1))}
OPTIONS["write_table"] = {"type": Path, "metavar": "PATH"}
QUICK = {"widths": (16,), "tokens": 64, "group": 2, "minutes": 0.2, "dtype": "float32"}

REGISTERS = 64, 192
"""Of a thread, for sums and scores: the least and the most that a tile of the grid has."""

SHARED_BYTES = 232_448
"""Of shared memory, that a program may have on sm_90 (CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability"); elsewhere larger tiles are passed over when launched."""

HELD, STEPPED, WARPS, STAGES = (64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4)
"""Of the grid: sides of what a program holds and of what it steps through."""

KERNELS = {"forward": 0, "keys": 1, "queries": 1}
"""Those of ``Configs``, and which of (forward, backward) they are timed by."""


@dataclass(frozen=True)
class Kernels:
    """Our kernels themselves, as a contender: no table sends their work to another library."""

    case: Case
    name: str = "triton"

    def parts(self, inputs: Inputs) -> tuple[Any, Any]:
        """Forward, and backward of its results, to be called again and again."""
        q, k, v, grad = inputs
        call = *(((0, self.case.tokens),),) * 2, spec_of(self.case)
        forward = partial(flash_runs.forward, q, k, v, *call)
        return forward, partial(flash_runs.backward, Backward(grad, q, k, v, *forward()), *call)

    def results(self, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        forward, backward = self.parts(inputs)
        return (forward()[0], *backward())


def spec_of(case: Case) -> AttentionSpec:
    """The mask of ``case`` as our kernels take it."""
    return AttentionSpec(
        case.tokens,
        case.width**-0.5,
        left=case.window - 1 if case.mask == "window" else None,
        right=None if case.mask == "full" else 0,
        document_ids=case.documents[None] if case.mask == "documents" else None,
        key_padding=(case.positions >= case.num_padded)[None] if case.mask == "padding" else None,
    )


class Work(NamedTuple):
    """What is timed: a case, and its tensors."""

    case: Case
    inputs: Inputs

    def seconds(self, configs: Configs, of: int, runs: int) -> float:
        """The median of forward (0) or backward (1) with ``configs``; infinite where a tile does
        not fit the device. Without ``runs`` it is launched once, and nobody reads the time."""
        with using(configs):
            try:
                step = Kernels(self.case).parts(self.inputs)[of]
                seconds_of(step, 1)
                return median([seconds_of(step, 1) for _ in range(runs)] or [0.0])
            except Exception as e:
                if type(e).__name__ not in ("OutOfResources", "PTXASError", "CompilationError"):
                    raise
                return math.inf


def using(configs: Configs) -> ExitStack:
    """Inside, our kernels are launched with ``configs``."""
    stack = ExitStack()
    for module in (flash_forward, flash_backward):
        stack.enter_context(patch.object(module, "device_configs", lambda *_: configs))
    return stack


def grid(kernel: str, width: int, itemsize: int) -> list[Config]:
    """The tiles to try, with as many stages in both loops.

    A thread has float32 sums (of keys both dk and dv) and scores (backward their gradients too);
    shared memory has what is held (backward two tensors of it) and two tensors a stage.
    """
    found = []
    for held, stepped, warps, stages in product(HELD, STEPPED, WARPS, STAGES):
        sums = held * width * (2 if kernel == "keys" else 1)
        scores = held * stepped * (1 if kernel == "forward" else 2)
        tensors = held * (1 if kernel == "forward" else 2) + 2 * stepped * stages
        fits = tensors * width * itemsize <= SHARED_BYTES
        if fits and REGISTERS[0] <= (sums + scores) / (32 * warps) <= REGISTERS[1]:
            sides = (stepped, held) if kernel == "keys" else (held, stepped)
            found.append(Config(*sides, warps, stages, stages))
    return found


_prepared: dict[int, list[Work]] = {}
"""In a process that compiles: by width."""


def prepare(args: Namespace, width: int, given: Configs, of: int) -> None:
    """In a process of its own: launch forward (0) or backward (1) with the configs ``given``, which
    leaves it compiled in Triton's cache."""
    if width not in _prepared:
        _prepared[width] = works_of(args, width)
    for work in _prepared[width]:
        work.seconds(given, of, 0)


def compile_all(
    args: Namespace, defaults: dict[int, Configs], itemsize: int, seconds: float
) -> None:
    """Compile the grids of all kernels and widths by ``--workers`` processes; what they have not
    begun after so many ``seconds`` is compiled when it is timed."""
    for (width, configs), of in product(defaults.items(), set(KERNELS.values())):
        prepare(args, width, configs, of)  # which all candidates have in common
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        jobs = [
            pool.submit(prepare, args, width, replace(configs, **{kernel: config}), of)
            for width, configs in defaults.items()
            for kernel, of in KERNELS.items()
            for config in grid(kernel, width, itemsize)
        ]
        done, left = wait(jobs, seconds)
        pool.shutdown(cancel_futures=True)  # nothing else is on the device when tiles are timed
    log(f"compiled {len(done)} tiles by {args.workers} processes, {len(left)} were left")
    for error in {str(job.exception()) for job in done if job.exception()}:
        log(f"a tile that did not compile: {error}")


def sweep(
    works: list[Work], configs: Configs, kernel: str, candidates: list[Config], until: float,
    runs: int,
) -> Any:  # fmt: skip
    """The configs with the best of ``kernel``, its seconds before and after, how many were tried;
    none begins after ``until`` (``time.monotonic``)."""

    def seconds(config: Config) -> float:
        given = replace(configs, **{kernel: config})
        return sum(work.seconds(given, KERNELS[kernel], runs) for work in works)

    before = getattr(configs, kernel)
    known = {before: seconds(before)}

    def try_all(some: list[Config]) -> Config:
        for config in some:
            if config not in known and time.monotonic() < until:
                known[config] = seconds(config)
        return min(known, key=known.__getitem__)

    best = try_all(candidates)
    best = try_all([replace(best, masked_stages=1)])
    for config in sorted(known, key=known.__getitem__)[:5]:
        log(kernel, list(astuple(config)), f"{1e3 * known[config]:.2f} ms")
    return replace(configs, **{kernel: best}), known[before], known[best], len(known)


def works_of(args: Namespace, width: int) -> list[Work]:
    """One for each mask."""
    cuda = torch.cuda.is_available()
    heads, tokens = (max(args.group, 2048 // width) if cuda else args.group), args.tokens
    sizes = 1, heads, heads // args.group, min(4096, tokens // 4), max(3, tokens // 2048)
    where = getattr(torch, args.dtype), "cuda" if cuda else "cpu"
    cases = [Case(mask, tokens, width, *where, *sizes) for mask in args.masks]
    return [Work(case, case.inputs()) for case in cases]


def default_configs(work: Work) -> Configs:
    """Those that are used today."""
    q, _, v, _ = work.inputs
    documents = work.case.mask == DOCUMENTS
    return flash_plan.device_configs(q, v, SimpleNamespace(has_documents=documents))


def key_of(work: Work) -> flash_plan.TileKey:
    """Of the table that ``flash_plan`` reads."""
    cuda = work.case.device == "cuda"
    capability = torch.cuda.get_device_capability() if cuda else (0, 0)
    width = max(64, flash_plan.padded_width(work.case.width))
    documents = work.case.mask == DOCUMENTS
    return flash_plan.TileKey(capability, work.case.dtype.itemsize, width, documents)


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> str:
    if not (torch.cuda.is_available() or flash_plan.INTERPRETED):
        sys.exit(
            "tile_sweep needs a CUDA device, and PyTorch sees none; with TRITON_INTERPRET=1 and "
            "--quick it runs to its end on a CPU"
        )
    if flash_plan.INTERPRETED:  # what Triton's interpreter needs of it
        sys.path.append(str(Path(__file__).parents[1] / "tests" / "kernels"))
        import_module("kernel_device")
    if DOCUMENTS in args.masks and len(args.masks) > 1:
        sys.exit(f"--masks {' '.join(args.masks)}: documents have tiles of their own, alone")
    os.environ.pop(flash_plan.TILES_VARIABLE, None)
    bench.dtype, runs = args.dtype, 1 if args.quick else 5
    itemsize = getattr(torch, args.dtype).itemsize
    bench.add(
        f"Tiles [queries, keys, warps, stages, stages where masked] of {', '.join(args.masks)} at "
        f"{args.tokens:,} tokens, {args.group} query heads a KV head; ms of forward or backward."
    )
    header = ["kernel", "tile before", "ms", "tile found", "ms", "tried"]
    table = args.write_table
    found = dict(flash_plan.load_tiles(table)) if table and table.exists() else {}
    rows = []
    end = time.monotonic() + 60 * args.minutes
    works_by_width = {width: works_of(args, width) for width in args.widths}
    defaults = {width: default_configs(works[0]) for width, works in works_by_width.items()}
    if not flash_plan.INTERPRETED:
        compile_all(args, defaults, itemsize, 60 * args.minutes / 2)
    begin = time.monotonic()
    share = (end - begin) / len(args.widths)
    for i, (width, works) in enumerate(works_by_width.items()):
        configs = defaults[width]
        for k, kernel in enumerate(KERNELS):
            was = getattr(configs, kernel)
            candidates = [was] if flash_plan.INTERPRETED else grid(kernel, width, itemsize)
            until = begin + share * (i + (k + 1) / len(KERNELS))
            configs, before, after, tried = sweep(works, configs, kernel, candidates, until, runs)
            tiles = [str(list(astuple(c))) for c in (was, getattr(configs, kernel))]
            times = [f"{1e3 * t:.2f}" for t in (before, after)]
            rows.append(
                [f"{kernel}, width {width}", tiles[0], times[0], tiles[1], times[1], str(tried)]
            )
            log(*rows[-1])
            bench.draft(args.out, header, rows)
        with using(configs):
            for work in works:
                check(work.case, Kernels(work.case), work.inputs)
        found[key_of(works[0])] = configs
        if table:
            written = [flash_plan.tile_row(key, of) for key, of in found.items()]
            table.write_text(json.dumps({"rows": written}, indent=1) + "\n")
    bench.table(header, rows)
    return "one GPU" if torch.cuda.is_available() else "Triton's interpreter"
