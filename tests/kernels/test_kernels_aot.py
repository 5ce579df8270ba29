"""Every Triton kernel compiles for the devices we name, without spilling registers, and fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aot import SHARED_LIMIT

pytest.importorskip("triton.backends.nvidia", reason="triton was built without its CUDA compiler")


MEASURED = {
    ("flash causal: _keys_kernel", 90, "D 128"): 560,
    ("flash window, documents, padding: _keys_kernel", 90, "D 128"): 400,
}
"""Bytes that a kernel may spill whose tile was the fastest on the device all the same: on an H100
(benchmarks/results/h100/tile_sweep.md and tile_sweep_documents.md). Its name, device and what its
tile begins with."""


def most_spilled(row: dict[str, Any]) -> int:
    """Bytes of a thread. The tiles are chosen for triton 3.9; 3.6's ptxas spills up to 32 bytes in
    three of these kernels."""
    import triton

    if measured := MEASURED.get((row["kernel"], row["arch"], row["tile"].partition(",")[0])):
        return measured
    return 0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 32


@pytest.mark.broad
@pytest.mark.parametrize(
    ("family", "arch"),
    [
        ("merge", 80),
        ("exchange", 80),
        ("flash", 90),
        *(
            pytest.param(family, arch, marks=pytest.mark.slow)
            for family, arch in (("merge", 90), ("exchange", 90), ("flash", 80))
        ),
    ],
)
def test_kernels_compile_without_spills_and_fit_the_device(
    family: str, arch: int, capsys: pytest.CaptureFixture
) -> None:
    script = Path(__file__).parent / "aot_cases.py"
    path = os.pathsep.join([str(script.parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("TRITON_INTERPRET", None)
    out = subprocess.run(
        [sys.executable, str(script), "--arch", str(arch), family],
        capture_output=True,
        text=True,
        env=environment,
        timeout=540,
    )
    assert out.returncode == 0, out.stderr
    rows = [json.loads(line) for line in out.stdout.splitlines()]
    with capsys.disabled():
        print(f"\n{'kernel':58}{'arch':>5}{'registers':>11}{'spilled':>9}{'shared':>9}  tile")
        for r in rows:
            sizes = f"{r['registers']:11}{r['spilled']:9}{r['shared']:9}"
            print(f"{r['kernel']:58}{r['arch']:5}{sizes}  {r['tile']}")
    assert {r["arch"] for r in rows} == {arch}
    spilled = [
        f"{r['kernel']} (sm_{r['arch']}): {r['spilled']} bytes"
        for r in rows
        if r["spilled"] > most_spilled(r)
    ]
    assert not spilled, spilled
    products = ("_forward_kernel", "_keys_kernel", "_queries_kernel")
    slow = [r["kernel"] for r in rows if r["kernel"].endswith(products) and not r["products"]]
    assert not slow, f"without tensor cores: {slow}"
    unwritten = {r["kernel"]: r["unwritten"] for r in rows if r["unwritten"]}
    assert not unwritten, f"read before they are written: {unwritten}"
    too_large = [r for r in rows if r["shared"] > SHARED_LIMIT[r["arch"]]]
    assert not too_large, too_large
