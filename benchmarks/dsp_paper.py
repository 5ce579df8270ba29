"""Which dim is split where, on paper: a Latte of 3 billion parameters on 8 and on 64 GPUs.

    python benchmarks/dsp_paper.py      # a minute, no device

The model is diffusers' Latte (attention over space, over a text, then over time), unmodified, on
the meta device, captured as it would be for one of so many ranks. Times are the analytic prior's,
of all blocks, forward and backward, at the rates of described devices. Embedded sequence
parallelism is the best of the strategies that know one dim (Ulysses, Megatron's tensor parallel
with split sequences, rings), the same for all blocks; DSP's paper (arXiv 2403.10266) gives 32 % to
10x against these. There they pay for attention over space as well, which here sends nothing under
any strategy that has time split, so that less is left to gain. Memory is not looked at: levers are
a matter of their own.
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import latte
import torch
from runner import Benchmark, benchmark

from paradyse.config import parse_options
from paradyse.offline.capture import capture_program, fake_world
from paradyse.offline.devices import machine_of, read_cluster
from paradyse.planning.explain import count_names
from paradyse.planning.planner import Planner
from paradyse.planning.splits import Splits
from paradyse.planning.units import format_seconds
from paradyse.runtime.describe import describe_blocks
from paradyse.runtime.program import Program
from paradyse.types import ALONG_SEQUENCE, BATCH, DSP, BlockSpec, Plan, Workload

SIDE = 32
"""Of the frames that it is captured with: their number of patches is the workload's."""

LEAST = 1.32
"""Goal: the gain of DSP that its paper gives at least, here at the largest size."""

OPTIONS: dict[str, Any] = {"gpus": (8, 64), "device": "h100-80gb", "layers": latte.LAYERS}
OPTIONS |= {"shapes": ("16x1024", "64x1024", "64x4096", "128x4096", "128x16384")}
OPTIONS |= {"batches": (1, 8)}


def repeated(blocks: tuple[BlockSpec, ...], layers: int) -> list[BlockSpec]:
    """The blocks of one layer as those of so many."""
    found = []
    for i in range(layers):
        for b in blocks:
            kind = [x for x in blocks if x.kind == b.kind]
            found.append(replace(b, layer=i * len(kind) + kind.index(b), name=f"{i}.{b.name}"))
    return found


def planned(num_gpus: int, args: Namespace) -> tuple[Splits, int]:
    """What plans the model on so many ranks; and its number of parameters, embeddings left out."""
    machine = replace(machine_of(read_cluster(args.device), num_gpus), capacity_bytes=None)
    programs: dict[str, Program] = {}
    with fake_world(num_gpus) as axis:
        for split in ("", BATCH):
            torch._dynamo.reset()
            with torch.device("meta"):
                model, videos = latte.make_model(1, SIDE).train(), latte.make_batch(3, SIDE)
            programs[split] = capture_program(model, videos, axis, split)
        blocks = {s: repeated(describe_blocks(p), args.layers) for s, p in programs.items()}
    options = parse_options({"levers": []})
    planner = Planner(options, blocks[""], num_gpus, lambda dtype: machine, sharded=True)
    splits = Splits(planner)
    splits.describe = lambda split: (blocks[split], None) if split in blocks else "it is not made"
    return splits, sum(b.num_weight_elements for b in blocks[""])


def workloads(num_gpus: int, args: Namespace) -> Iterator[tuple[str, Workload]]:
    """Name and workload of each size: time is split, space is beside it."""
    for shape in args.shapes:
        time, space = map(int, shape.split("x"))
        for batch in args.batches:
            others = ((batch * time, space),)
            of = Workload(batch * space, time, torch.bfloat16, True, num_gpus, others=others)
            yield f"{shape}, batch {batch}", of


def splits_of(splits: Splits, plan: Plan, layer: int) -> str:
    """What is split in the stages of the first ``layer`` blocks of ``plan``, in words."""
    at_rest = "batch" if plan.split == BATCH else "time"
    blocks = splits.planner_of(plan).blocks[:layer]
    found = []
    for block, point in zip(blocks, plan.strategies):
        switched = point == DSP and block.switch is not None
        found.append(f"{at_rest} to space" if switched else f"{at_rest} ({point})")
    return count_names(found)


@benchmark({"gpus": (2,), "layers": 1, "shapes": ("8x64",)}, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> str:
    gains = {}
    for num_gpus in args.gpus:
        splits, parameters = planned(num_gpus, args)
        layer = len(splits.planner.blocks) // args.layers
        rows = []
        for name, w in workloads(num_gpus, args):
            statics = {s: splits.planner.static(s, w) for s in (*ALONG_SEQUENCE, DSP)}
            times = {s: splits.predict(p, w)[0] for s, p in statics.items() if s != "metp"}
            embedded = min(t for s, t in times.items() if s != DSP)
            plan = splits.plan(w)
            auto = splits.predict(plan, w)[0]
            gains[num_gpus, name] = embedded / times[DSP]
            cells = [*map(format_seconds, times.values()), format_seconds(auto)]
            ratios = [f"{x / y:.2f}" for x, y in ((embedded, times[DSP]), (embedded, auto))]
            rows.append([name, *cells, *ratios, splits_of(splits, plan, layer)])
        header = [
            "time x space",
            *times,
            "auto",
            "dsp gains",
            "auto gains",
            "auto: stages of a layer",
        ]
        title = f"## {num_gpus} x {args.device}, {parameters / 1e9:.1f}B parameters in blocks"
        bench.table(header, rows, title)
    bench.add("", "Gains are of the best strategy of one dim, for all blocks.")
    if not args.quick:
        for num_gpus in args.gpus:
            best = max(gain for (n, _), gain in gains.items() if n == num_gpus)
            bench.at_least(f"{num_gpus} GPUs: the largest gain of `dsp`", best, LEAST)
    return "one core, no device"
