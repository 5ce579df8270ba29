"""Plans on paper for 10-billion-class models: LLaMA and OPT on 8 and on 1,024 devices, and on a
cluster of unequal devices.

    python benchmarks/paper_plans.py | tee benchmarks/results/paper_plans.txt

Nothing is trained or measured on a device: see ``paradyse/offline/dry_run.py`` and
``paradyse/offline/devices.py``.
"""

import time
from argparse import Namespace
from itertools import product
from typing import Any

import torch
from runner import Benchmark, benchmark

from paradyse.cli.commands.plan import default_lengths, dry_run_of, remarks, tables_of
from paradyse.offline.devices import DEVICES, Cluster, Network, machine_of, read_cluster
from paradyse.offline.outlook import look_ahead
from paradyse.planning.explain import text_table

# LLaMA-13B (arXiv 2302.13971, table 2) and OPT-13B (arXiv 2205.01068, table 1).
SIZES = {"num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 40}
MODELS: dict[str, dict[str, Any]] = {
    "LLaMA-13B": {"model_type": "llama", "intermediate_size": 13824, "vocab_size": 32000},
    "OPT-13B": {"model_type": "opt", "ffn_dim": 20480, "vocab_size": 50272},
}
MODELS["OPT-13B"]["word_embed_proj_dim"] = 5120

# Two kinds in one axis: the older has half the memory.
UNEQUAL = Cluster((DEVICES["a100-80gb"], DEVICES["a100-40gb"]), Network())

LAYERS = {"type": int, "help": "fewer than the models have"}


@benchmark({"gpus": (2,), "layers": 1}, gpus=(8, 1024), layers=LAYERS)
def main(bench: Benchmark, args: Namespace) -> None:
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
    for remark in remarks(machine)[1:]:
        print(f"note: {remark}")
