"""On paper: what groups of different degree side by side gain over one degree for all groups, for
GPTs on the clusters that FlexSP (arXiv 2412.01523) and ByteScale (arXiv 2502.21231) report on.

    python benchmarks/mixed_paper.py                       # half an hour
    python benchmarks/mixed_paper.py --models GPT-7B       # some minutes
    python benchmarks/mixed_paper.py --pieces FOLDER       # goes on where it ended

Nothing is trained or measured on a device: see ``paradyse/offline/groups.py``. Published speed-ups
are over what the papers compare with, on other lengths and with other kernels, so they stand beside
these as orders of magnitude. Here one degree for all has the same kernels, levers and packing as
groups, sequences dealt out so that its groups take equally long, and the best degree of all.
"""

import json
import random
import time
from argparse import Namespace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from runner import Benchmark, benchmark

from paradyse.cli.commands.plan import dry_run_of, remarks
from paradyse.cli.mixed import shortened
from paradyse.cli.traces import DISTRIBUTIONS, K, LengthDistribution
from paradyse.mixed.ways import Way
from paradyse.offline.devices import machine_of, read_cluster
from paradyse.offline.dry_run import DryRun
from paradyse.offline.groups import Comparison, compare, ways_on_paper
from paradyse.planning.units import format_seconds

# Widths and depths of GPTs of 7, 13 and 30 billion parameters (GPT-3, arXiv 2005.14165, table 2.1,
# and OPT, arXiv 2205.01068, table 1); rotary positions, as no table of positions is that long.
GPT = {"model_type": "gpt_neox", "vocab_size": 50432, "use_parallel_residual": False}
GPT |= {"max_position_embeddings": 2048 * K, "rotary_pct": 1.0, "tie_word_embeddings": False}
SIZES = {"GPT-7B": (4096, 32, 32), "GPT-13B": (5120, 40, 40), "GPT-30B": (7168, 48, 56)}
"""Width, layers, heads."""

GITHUB = DISTRIBUTIONS["GitHubCode"]
LONG_TAIL = LengthDistribution((*GITHUB.edges[:-1], 2048 * K), GITHUB.shares)
"""Source code, whose longest files have two million tokens: those of 128K tokens and more, 1.1 % of
all, spread evenly on a logarithmic scale."""

CASES = (
    (64, "a100-40gb", (192 * K, 384 * K), tuple(SIZES), "FlexSP: up to 1.98"),
    (256, "a100-80gb", (256 * K, 2048 * K), ("GPT-7B",), "ByteScale: up to 7.89"),
)
"""Devices, lengths behind which sequences are cut, models, and what is published. ByteScale's
devices are not named; the memory of these has room for its longest sequences."""


LEVERS = ("recompute", "selective", "tiled")
"""Nothing goes to the host, as in FlexSP."""


def config_of(model: str) -> dict[str, Any]:
    """The HuggingFace configuration of ``model`` of ``SIZES``."""
    hidden, layers, heads = SIZES[model]
    widths = {"hidden_size": hidden, "intermediate_size": 4 * hidden}
    return GPT | widths | {"num_hidden_layers": layers, "num_attention_heads": heads}


def draw(count: int, cut: int, seed: int) -> list[int]:
    """``count`` lengths of ``LONG_TAIL`` cut off behind ``cut`` tokens, one of each equal part."""
    rng = random.Random(seed)
    return [min(cut, LONG_TAIL.draw((i + rng.random()) / count, 2048 * K)) for i in range(count)]


Row = dict[str, Any]
"""Of one case: ``static_s`` by degree as text, ``best_static_s``, ``groups_s``, seconds a step, and
the groups of its first batch in ``words``."""


def row_of(of: Comparison) -> Row:
    """What is shown of a comparison."""
    num = len(of.plans)
    return {
        "static_s": {str(d): s / num for d, s in of.static_s.items()},
        "best_static_s": of.best_static_s / num,
        "groups_s": of.groups_s / num,
        "words": shortened(of.plans[0]),
    }


def show(bench: Benchmark, found: dict[str, Row]) -> None:
    """The comparison of each case, and the groups of its first batch."""
    degrees = sorted({d for of in found.values() for d in of["static_s"]}, key=int)
    table, gains = [], []
    for name, of in found.items():
        static, groups_s = of["static_s"], of["groups_s"]
        best = min(static, key=lambda d: static[d])
        each = (format_seconds(static[d]) if d in static else "-" for d in degrees)
        table.append((name, *each, *(format_seconds(s) for s in (of["best_static_s"], groups_s))))
        over = (static[best], of["best_static_s"], max(static.values()))
        gains.append((name, best, *(f"{s / groups_s:.2f}" for s in over)))
    header = (*(f"degree {d}" for d in degrees), "best of each batch", "groups")
    bench.table(("", *header), table)
    over = ("over it", "over the best of each batch", "over the worst degree")
    bench.table(("gain of groups", "best degree", *over), gains)
    for name, of in found.items():
        bench.add("", f"{name}: {of['words']}")


@cache
def _runs(model: str, layers: int | None) -> Any:
    """The dry run of ``model`` by the number of ranks; each is made once, for all clusters."""

    @cache
    def run_of(num_ranks: int) -> DryRun:
        how = ("bfloat16", num_ranks, True)
        return dry_run_of(config_of(model), layers, *how, levers=LEVERS)

    return run_of


def _piece(args: Namespace, num_gpus: int, name: str) -> Path | None:
    """The file of one case, by all that it depends on."""
    if args.pieces is None:
        return None
    how = f"{args.sequences} x {args.batches}, {args.layers or 'all'} layers, {args.limit:g} s"
    return Path(args.pieces) / f"{num_gpus}, {name}, {how}.json"


@benchmark(
    {"models": ("GPT-7B",), "gpus": (4,), "layers": 1, "batches": 1, "sequences": 32},
    models=tuple(SIZES),
    gpus=tuple(case[0] for case in CASES),
    layers={"type": int, "help": "fewer than the models have"},
    pieces={"type": Path, "metavar": "FOLDER", "help": "keeps each case; done ones are read"},
    batches=3,
    sequences=512,
    limit=5.0,
)
def main(bench: Benchmark, args: Namespace) -> str:
    bench.add(
        f"Seconds of a step of {args.sequences} sequences, forward and backward, weights 1/N at "
        "rest, bfloat16. Gain: of groups over the best one degree for all batches."
    )
    for num_gpus, device, cuts, models, published in CASES:
        if args.quick:
            num_gpus, cuts = args.gpus[0], cuts[:1]
        elif num_gpus not in args.gpus:
            continue
        cluster, found = read_cluster(device), dict[str, Row]()
        for model in (m for m in models if m in args.models):
            start = time.process_time()
            ways: list[Way] = []
            for cut in cuts:
                name = f"{model}, {cut // K}K"
                piece = _piece(args, num_gpus, name)
                if piece and piece.is_file():
                    found[name] = json.loads(piece.read_text())
                    continue
                runs, dtype = _runs(model, args.layers), torch.bfloat16
                ways = ways or ways_on_paper(runs, cluster, num_gpus, dtype, levers=LEVERS)
                batches = [draw(args.sequences, cut, seed) for seed in range(args.batches)]
                found[name] = row_of(compare(batches, ways, num_gpus, args.limit))
                if piece:
                    piece.parent.mkdir(parents=True, exist_ok=True)
                    piece.write_text(json.dumps(found[name], indent=1))
            print(f"# {model}: {time.process_time() - start:.0f} s of one core", flush=True)
        if found:
            bench.add("", f"## {num_gpus} x {device} ({published})")
            show(bench, found)
            for remark in remarks(machine_of(cluster, num_gpus)):
                bench.add("", f"Note: {remark}.")
    return "one core, no device"
