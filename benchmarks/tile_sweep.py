"""Tile sizes of our attention kernels by time: what each kernel is fastest with on this GPU.

    python benchmarks/tile_sweep.py                        # 10 min: bfloat16, widths 64 and 128
    python benchmarks/tile_sweep.py --widths 256 --minutes 5
    python benchmarks/tile_sweep.py --write-table kernels/tiles.json
    TRITON_INTERPRET=1 python benchmarks/tile_sweep.py --quick   # on a CPU, to see that it runs

From the tiles that ``paradyse.kernels.flash_plan`` has, one number at a time is changed (a side of
the tile, warps, stages) and the best change is kept, until none helps or the --minutes of a width
are over. The time is that of all --masks together; of the forward kernel its own, of the two
backward kernels both together. A tile that does not fit the device is passed over. Results under
the tiles that were found are compared with float64 at the end. --write-table leaves them for
``flash_plan``, written anew after every width; `PARADYSE_TILES` names such a table.
"""

import json
import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from functools import partial
from importlib import import_module
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

OPTIONS: dict[str, Any] = {"widths": (64, 128), "tokens": 16384, "group": 4, "minutes": 5.0}
OPTIONS["masks"] = {"nargs": "+", "choices": MASKS, "default": ["causal", "window"]}
OPTIONS["dtype"] = {"choices": ("bfloat16", "float16", "float32"), "default": "bfloat16"}
OPTIONS["write_table"] = {"type": Path, "metavar": "PATH"}
QUICK = {"widths": (16,), "tokens": 64, "group": 2, "minutes": 0.2, "dtype": "float32"}

WORTH = 0.01
"""A change is kept if it saves this share of the time."""

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
        not fit the device."""
        with using(configs):
            try:
                step = Kernels(self.case).parts(self.inputs)[of]
                seconds_of(step, 1)
                return median([seconds_of(step, 1) for _ in range(runs)])
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


def changes(config: Config) -> Iterator[Config]:
    """Those by one number."""
    for name in ("block_m", "block_n"):
        size = getattr(config, name)
        for other in (size // 2, size * 2):
            if 16 <= other <= 256:
                yield replace(config, **{name: other})
    for warps in (config.num_warps // 2, config.num_warps * 2):
        if 4 <= warps <= 16:
            yield replace(config, num_warps=warps)
    for stages in (config.num_stages - 1, config.num_stages + 1):
        if 1 <= stages <= 5:
            yield replace(config, num_stages=stages)
            yield replace(config, num_stages=stages, masked_stages=stages)
    masked = config.num_stages if config.masked_stages == 1 else 1
    yield replace(config, masked_stages=masked)


def sweep(works: list[Work], configs: Configs, kernel: str, until: float, runs: int) -> Any:
    """The configs with the best of ``kernel``, its seconds before and after, how many were tried;
    none begins after ``until`` (``time.monotonic``)."""

    def seconds(config: Config) -> float:
        given = replace(configs, **{kernel: config})
        return sum(work.seconds(given, KERNELS[kernel], runs) for work in works)

    best = getattr(configs, kernel)
    known = {best: seconds(best)}
    before = known[best]
    improved = True
    while improved:
        improved = False
        for config in list(changes(best)):
            if config not in known and time.monotonic() < until:
                known[config] = seconds(config)
        fastest = min(known, key=known.__getitem__)
        if known[fastest] < known[best] * (1 - WORTH):
            best, improved = fastest, True
    return replace(configs, **{kernel: best}), before, known[best], len(known)


def works_of(args: Namespace, width: int) -> list[Work]:
    """One for each mask."""
    cuda = torch.cuda.is_available()
    heads, tokens = (max(args.group, 2048 // width) if cuda else args.group), args.tokens
    sizes = 1, heads, heads // args.group, min(4096, tokens // 4), max(3, tokens // 2048)
    where = getattr(torch, args.dtype), "cuda" if cuda else "cpu"
    cases = [Case(mask, tokens, width, *where, *sizes) for mask in args.masks]
    return [Work(case, case.inputs()) for case in cases]


def key_of(work: Work) -> flash_plan.TileKey:
    """Of the table that ``flash_plan`` reads."""
    cuda = work.case.device == "cuda"
    capability = torch.cuda.get_device_capability() if cuda else (0, 0)
    return capability, work.case.dtype.itemsize, max(64, flash_plan.padded_width(work.case.width))


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
    os.environ.pop(flash_plan.TILES_VARIABLE, None)
    bench.dtype, runs = args.dtype, 1 if args.quick else 5
    bench.add(
        f"Tiles [queries, keys, warps, stages, stages where masked] of {', '.join(args.masks)} at "
        f"{args.tokens:,} tokens, {args.group} query heads a KV head; ms of forward or backward."
    )
    header = ["kernel", "tile before", "ms", "tile found", "ms", "tried"]
    rows, found = [], []
    for width in args.widths:
        works = works_of(args, width)
        q, _, v, _ = works[0].inputs
        configs = flash_plan.device_configs(q, v, SimpleNamespace(has_documents=False))
        share = 60 * args.minutes / len(KERNELS)
        for kernel in KERNELS:
            was = getattr(configs, kernel)
            until = time.monotonic() + share
            configs, before, after, tried = sweep(works, configs, kernel, until, runs)
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
        found.append(flash_plan.tile_row(key_of(works[0]), configs))
        if args.write_table:
            args.write_table.write_text(json.dumps({"rows": found}, indent=1) + "\n")
    bench.table(header, rows)
    return "one GPU" if torch.cuda.is_available() else "Triton's interpreter"
