"""Benchmarks on two ranks: starting them, and timing what they do together."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paradyse.cli.launch import RanksFailed, Setting, run_ranks


def on_two_ranks(target: str, arguments: Mapping[str, Any]) -> Any:
    """What rank 0 returns of ``target(rank, **arguments)``; shows the lines that it sends.

    Args:
        target: ``module:function`` of this folder.
    """

    def show(rank: int, line: str) -> None:
        if rank == 0:
            print(line, file=sys.stderr, flush=True)

    folder = str(Path(__file__).parent)
    setting = Setting(timeout_s=7200, silence_s=1800, env={"PYTHONPATH": folder})
    try:
        return run_ranks(target, 2, arguments, setting, show)[0]
    except RanksFailed as e:
        sys.exit(str(e))


def slower_rank(step: Callable[[], object]) -> float:
    """Seconds of ``step()`` from a common start, on the slower rank."""
    dist.barrier()
    start = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)
