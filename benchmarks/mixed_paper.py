"""On paper: what groups of different degree side by side gain over one degree for all groups, for
GPTs on the clusters that FlexSP (arXiv 2412.01523) and ByteScale (arXiv 2502.21231) report on.

    python benchmarks/mixed_paper.py                       # half an hour
    python benchmarks/mixed_paper.py --models GPT-7B       # some minutes

Nothing is trained or measured on a device: see ``paradyse/offline/groups.py``. Published speed-ups
are over what the papers compare with, on other lengths and with other kernels, so they stand beside
these as orders of magnitude. Here one degree for all has the same kernels, levers and packing as
groups, sequences dealt out so that its groups take equally long, and the best degree of all.
"""

import random
import time
from argparse import Namespace
from functools import cache
from typing import Any

import torch
from runner import Benchmark, benchmark

from paradyse.cli.commands.plan import dry_run_of, remarks
from paradyse.cli.mixed import shortened
from paradyse.cli.traces import DISTRIBUTIONS, K, LengthDistribution
from paradyse.offline.devices import machine_of, read_cluster
from paradyse.offline.dry_run import DryRun
from paradyse.offline.groups import Comparison, compare, ways_on_paper
from paradyse.planning.explain import format_seconds

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


def show(bench: Benchmark, found: dict[str, Comparison]) -> None:
    """The comparison of each case, and the groups of its first batch."""
    rows = []
    for name, of in found.items():
        num = len(of.plans)
        degree = min(of.static_s, key=lambda d: of.static_s[d])
        rows.append(
            (
                name,
                str(degree),
                *(format_seconds(s / num) for s in (of.best_s, of.best_static_s, of.groups_s)),
                f"{of.best_s / of.groups_s:.2f}",
                f"{max(of.static_s.values()) / of.groups_s:.2f}",
            )
        )
    bench.table(
        ("", "best degree", "it", "best of each batch", "groups", "gain", "over the worst"), rows
    )
    for name, of in found.items():
        bench.add("", f"{name}: {shortened(of.plans[0])}")


def _runs(model: str, layers: int | None) -> Any:
    """The dry run of ``model`` by the number of ranks; each is made once."""

    @cache
    def run_of(num_ranks: int) -> DryRun:
        how = ("bfloat16", num_ranks, True)
        return dry_run_of(config_of(model), layers, *how, levers=LEVERS)

    return run_of


@benchmark(
    {"models": ("GPT-7B",), "gpus": (4,), "layers": 1, "batches": 1, "sequences": 32},
    models=tuple(SIZES),
    gpus=tuple(case[0] for case in CASES),
    layers={"type": int, "help": "fewer than the models have"},
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
        cluster, found = read_cluster(device), dict[str, Comparison]()
        for model in (m for m in models if m in args.models):
            start = time.process_time()
            runs, dtype = _runs(model, args.layers), torch.bfloat16
            ways = ways_on_paper(runs, cluster, num_gpus, dtype, levers=LEVERS)
            for cut in cuts:
                batches = [draw(args.sequences, cut, seed) for seed in range(args.batches)]
                name = f"{model}, {cut // K}K"
                found[name] = compare(batches, ways, num_gpus, args.limit)
            print(f"# {model}: {time.process_time() - start:.0f} s of one core", flush=True)
        if found:
            bench.add("", f"## {num_gpus} x {device} ({published})")
            show(bench, found)
            for remark in remarks(machine_of(cluster, num_gpus)):
                bench.add("", f"Note: {remark}.")
    return "one core, no device"
