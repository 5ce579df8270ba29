"""What the attention kernels compile to for devices that are not here.

    python benchmarks/compiled_kernels.py             # 20 min: sm_80, sm_90, sm_100
    python benchmarks/compiled_kernels.py --arch 90
    python benchmarks/compiled_kernels.py --quick     # one kernel

Every kernel at every width that has tiles of its own, as `tests/kernels/aot_cases.py` launches it,
bfloat16, four query heads a KV head: registers of a thread, bytes of it that lie in local memory
(spills), KiB of shared memory, and how many instructions of the code are products of tiles on
tensor cores: mma (sm_80), wgmma (sm_90), tcgen05 (sm_100). --lines reads what that script has
written instead of compiling.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from runner import Benchmark, benchmark, log

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests" / "kernels" / "aot_cases.py"
SHORT = {"mma.sync": "mma", "wgmma.mma_async": "wgmma", "tcgen05.mma": "tcgen05"}
OWN = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""The product that a device is fastest with."""
PRODUCTS = ("_forward_kernel", "_keys_kernel", "_queries_kernel")
"""Kernels that multiply tiles."""

OPTIONS: dict[str, Any] = {"arch": tuple(OWN), "only": ("",)}
OPTIONS["lines"] = {"nargs": "+", "type": Path, "metavar": "FILE"}
QUICK = {"arch": (80,), "only": ("causal, width 64: _forward",)}


def compiled_rows(arch: int, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """One for each kernel whose name has one of ``names`` in it."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(CASES), "--every", "--arch", str(arch), *filter(None, names)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment | {"PYTHONPATH": path}
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def cells(row: dict[str, Any]) -> list[str]:
    """Of the table."""
    name = row["kernel"].replace(": _", ": ").removesuffix("_kernel")
    products = ", ".join(f"{n} {SHORT[name]}" for name, n in row["products"].items())
    sizes = [str(row["registers"]), str(row["spilled"]), f"{row['shared'] / 1024:.0f}"]
    return [name, *sizes, products or "none", row["tile"].split(", C ")[0]]


def multiplies(row: dict[str, Any]) -> bool:
    return row["kernel"].endswith(PRODUCTS)


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> str:
    if args.lines:
        lines = [line for path in args.lines for line in path.read_text().splitlines()]
        rows = [json.loads(line) for line in lines]
    else:
        rows = []
        for arch in args.arch:
            rows += compiled_rows(arch, args.only)
            log(f"sm_{arch}: {len(rows)} kernels")
    import triton

    bench.dtype = "bfloat16"
    bench.add(
        f"Attention kernels compiled by triton {triton.__version__}: registers and spilled bytes "
        "of a thread, shared memory in KiB, products of tiles in the code."
    )
    header = ["kernel", "registers", "spilled", "shared", "products"]
    for arch in dict.fromkeys(r["arch"] for r in rows):
        found = [r for r in rows if r["arch"] == arch and multiplies(r)]
        bench.table(header, [cells(r)[:5] for r in found], f"## sm_{arch}")
        without = [r for r in found if not r["products"]]
        slower = [r for r in found if r["products"] and OWN[arch] not in r["products"]]
        bench.at_most(f"sm_{arch}: kernels without tensor cores", len(without), 0)
        what = f"sm_{arch}: kernels of which no product is {SHORT[OWN[arch]]}"
        bench.at_most(what, len(slower), 0)
        spills = [r for r in found if r["spilled"]]
        bench.at_most(f"sm_{arch}: kernels that spill", len(spills), 0)
    return f"torch.cuda is {'there' if torch.cuda.is_available() else 'not there'}"
