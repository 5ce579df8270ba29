"""Numbers with units, and workloads, for people."""

from __future__ import annotations

import torch

from paradyse.types import Workload


def format_bytes(n: float) -> str:
    """Bytes ``n`` for people: ``1.5 GiB``."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(n) >= 1024 and len(units) > 1:
        n /= 1024
        units.pop(0)
    return f"{n:.0f} B" if units[0] == "B" else f"{n:.1f} {units[0]}"


def format_seconds(s: float) -> str:
    """Seconds ``s`` for people: ``1.25 ms``, ``45 min``."""
    units = (("us", 1e-6, 1e-3), ("ms", 1e-3, 1.0), ("s", 1.0, 120.0), ("min", 60.0, 7200.0))
    for unit, scale, end in units:
        if s < 0.9995 * end:
            return f"{s / scale:.3g} {unit}"
    hours = s / 3600
    return f"{hours:.3g} h" if hours < 1000 else f"{hours:,.0f} h"


def format_count(n: int) -> str:
    """A number ``n`` of parameters for people: ``1.92 billion``."""
    for name, scale in (("billion", 10**9), ("million", 10**6), ("thousand", 10**3)):
        if n >= 0.9995 * scale:
            return f"{n / scale:.3g} {name}"
    return str(n)


def describe_workload(w: Workload) -> str:
    """The workload ``w`` for people."""
    mode = "training" if w.training else "inference"
    dtype = dtype_name(w.dtype)
    return f"batch {w.batch} x {w.lengths} tokens, {dtype}, {mode}, {w.num_ranks} ranks"


def dtype_name(dtype: torch.dtype) -> str:
    """``dtype`` for people, as ``profile_file.Header.dtype`` has it: ``float32``."""
    return str(dtype).removeprefix("torch.")
