"""Plans on paper for 10-billion-class models: LLaMA and OPT on 8 and on 1,024 devices, and on a
cluster of unequal devices; and how far Llama 3 8B gets on eight H100s and on one.

    python benchmarks/paper_plans.py | tee benchmarks/results/paper_plans.txt
    python benchmarks/paper_plans.py --gpus        # how far Llama 3 8B gets, a minute

Nothing is trained or measured on a device: see ``paradyse/offline/dry_run.py`` and
``paradyse/offline/devices.py``.
"""

import time
from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from runner import Benchmark, benchmark

from paradyse.cli.commands.plan import (
    default_lengths,
    dry_run_of,
    levers_chart,
    remarks,
    tables_of,
    tables_of_the_longest,
)
from paradyse.cli.pages import write_svg
from paradyse.offline.devices import DEVICES, Cluster, Network, machine_of, read_cluster
from paradyse.offline.outlook import MIXTURE, look_ahead
from paradyse.planning.tables import text_table
from paradyse.types import LEVERS

# LLaMA-13B (arXiv 2302.13971, table 2) and OPT-13B (arXiv 2205.01068, table 1).
SIZES = {"num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 40}
MODELS: dict[str, dict[str, Any]] = {
    "LLaMA-13B": {"model_type": "llama", "intermediate_size": 13824, "vocab_size": 32000},
    "OPT-13B": {"model_type": "opt", "ffn_dim": 20480, "vocab_size": 50272},
}
MODELS["OPT-13B"]["word_embed_proj_dim"] = 5120

# Two kinds in one axis: the older has half the memory.
UNEQUAL = Cluster((DEVICES["a100-80gb"], DEVICES["a100-40gb"]), Network())

# Llama 3 8B (arXiv 2407.21783, table 3).
LLAMA_3 = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32}
LLAMA_3 |= {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
LLAMA_3 |= {"vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False}

ON_DEVICE = tuple(v for v in LEVERS if v != "offload")
LONGEST = (
    (8, False, LEVERS, 3_700_000),
    (8, False, ON_DEVICE, 1_000_000),
    (1, True, LEVERS, 500_000),
)
"""Devices, whether weights and optimizer states lie on the host, levers, and the goal: tokens of a
sequence. The first and the last are what DeepSpeed's ALST reports of such devices (arXiv
2506.13996)."""

LAYERS = {"type": int, "help": "fewer than the models have"}


PICTURE = Path(__file__).parent.parent / "docs" / "memory_by_lever.svg"


def how_far(bench: Benchmark, args: Namespace) -> None:
    """The longest sequences of Llama 3 8B, by lever, and what a rank holds then."""
    cluster = read_cluster("h100-80gb")
    runs = {
        (num_gpus, on_host): dry_run_of(LLAMA_3, args.layers, "bfloat16", num_gpus, True, on_host)
        for num_gpus, on_host in dict.fromkeys(of[:2] for of in LONGEST)
    }
    for num_gpus, on_host, levers, goal in LONGEST:
        machine = machine_of(cluster, num_gpus)
        outlook = look_ahead(
            runs[num_gpus, on_host], machine, default_lengths, torch.bfloat16, levers=levers
        )
        where = f"{num_gpus} x h100-80gb" + ("" if levers == LEVERS else ", nothing offloaded")
        where += ", weights and optimizer on the host" * on_host
        bench.add("", f"## Llama 3 8B on {where}")
        for title, header, rows in tables_of_the_longest(outlook):
            bench.table(header, rows, f"### {title}")
        bench.at_least(f"{where}: longest sequence, tokens", outlook.longest[MIXTURE], goal)
        if (num_gpus, on_host, levers) == LONGEST[0][:3] and not args.quick:
            write_svg(PICTURE, levers_chart(outlook))


@benchmark({"gpus": (2,), "layers": 1}, gpus=(8, 1024), layers=LAYERS)
def main(bench: Benchmark, args: Namespace) -> str:
    bench.add(
        "AdamW states on the device, bfloat16, one sequence a step; the dry run is of rank 0."
    )
    how_far(bench, args)
    for num_gpus, (name, config) in product(args.gpus, MODELS.items()):
        start = time.process_time()
        run = dry_run_of(SIZES | config, args.layers, "bfloat16", num_gpus, sharded=True)
        took = time.process_time() - start
        clusters = {"a100-80gb": read_cluster("a100-80gb")}
        if num_gpus <= 8:
            clusters["a100-80gb and a100-40gb"] = UNEQUAL
        for devices, cluster in clusters.items():
            machine = machine_of(cluster, num_gpus)
            outlook = look_ahead(run, machine, default_lengths, torch.bfloat16)
            print(f"# {name} on {num_gpus} x {devices}, bfloat16, batch 1, sharded weights")
            print(f"# {machine.source}; the dry run took {took:.0f} s of one core\n")
            for title, header, rows in tables_of(outlook, cluster, num_gpus):
                print(f"{title}\n{text_table(header, rows)}\n", flush=True)
    for remark in remarks(machine_of(UNEQUAL, 8))[1:]:
        print(f"note: {remark}")
    return "one core, no device"
