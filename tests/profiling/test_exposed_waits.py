"""What a trace says of the waits of a rank, and the regions that say it."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from tiny import Tiny, tokens

from paradyse.distributed import collectives
from paradyse.profiling.exposed_waits import LEAST_S, ExposedWait, exposed_waits

LATE_S = 0.3


def write_trace(folder: Path, *events: tuple[str, float, str], name: str = "t.json") -> Path:
    """A trace of regions: name, microseconds and category."""
    path, traced = folder / name, [{"name": n, "dur": us, "cat": c} for n, us, c in events]
    text = json.dumps({"traceEvents": [{"ph": "M"}, *traced]}).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_waits_are_added_up_by_strategy_and_collective(tmp_path: Path, name: str) -> None:
    short = LEAST_S * 1e6 / 2
    trace = write_trace(
        tmp_path,
        ("wait ring_exchange layers.0.attention megatron_cz", 4000, "user_annotation"),
        ("wait ring_exchange layers.1.attention megatron_cz", short, "user_annotation"),
        ("wait all_gather weights layers.1.mlp megatron_cz+recompute", 1000, "user_annotation"),
        ("wait all_gather agreement: calls the model", 2000, "user_annotation"),
        ("wait ring_exchange layers.0.attention megatron_cz", 9000, "cpu_op"),
        ("layers.0.attention megatron_cz", 9000, "user_annotation"),
        name=name,
    )
    agreed, ring, gather = exposed_waits(trace)
    assert agreed == ExposedWait("", "all_gather", "", 1, pytest.approx(2e-3))
    assert ring == ExposedWait(
        "megatron_cz", "ring_exchange", "", 1, pytest.approx(4e-3 + short * 1e-6)
    )
    assert gather == ExposedWait(
        "megatron_cz+recompute", "all_gather", "weights", 1, pytest.approx(1e-3)
    )
    assert str(gather) == "megatron_cz+recompute: 1 waits for all_gather of weights, 1.0 ms"
    assert str(agreed) == "no block: 1 waits for all_gather, 2.0 ms"


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    for text in ("", "{}", "[1]"):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match="is no trace of torch.profiler"):
            exposed_waits(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="is no trace of torch.profiler"):
        exposed_waits(tmp_path / "none.json")
    nccl = write_trace(tmp_path, ("ncclDevKernel_AllGather_RING", 5, "kernel"))
    with pytest.raises(ValueError, match="NCCL carried messages"):
        exposed_waits(nccl)


def trace_step(folder: Path) -> tuple[list[ExposedWait], set[str]]:
    """The waits of rank 0, whose neighbour sends keys and values late; and names of regions."""
    import paradyse

    compiled: Any = torch.compile(
        paradyse.shard(Tiny()),
        backend="paradyse",
        options={"plan": "megatron_cz", "inner": "eager"},
    )
    ids, exchange = tokens(2, 11), collectives.ring_exchange
    compiled(ids, ids).backward()

    def late(*args: Any) -> Any:
        time.sleep(LATE_S * dist.get_rank())
        return exchange(*args)

    path = folder / f"{dist.get_rank()}.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with patch.object(collectives, "ring_exchange", late):
            loss = compiled(ids, ids)
        loss.backward()
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    named = {e["name"] for e in events if e.get("cat") == "user_annotation"}
    return exposed_waits(path), named


def test_a_late_message_is_an_exposed_wait_of_its_strategy(
    tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    (waits, named), _ = ranks(2).run(trace_step, tmp_path)
    assert {"layers.0.attention megatron_cz", "layers.1.mlp megatron_cz"} <= named
    assert "wait reduce_scatter gradients layers.0.mlp megatron_cz" in named
    seconds = {(w.strategy, w.collective): w.seconds for w in waits}
    late = seconds.pop(("megatron_cz", "ring_exchange"))
    assert 2 * LATE_S - 0.1 < late < 2 * LATE_S + 1  # one ring for each of two layers
