"""The measured machine: equal on all ranks, kept, no trace in the caller's state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import RankPool
from torch._subclasses.fake_tensor import FakeTensorMode

from paradyse.distributed.axis import SINGLE, resolve_axis
from paradyse.planning import machine
from paradyse.planning.costs import COLLECTIVES, Machine
from paradyse.planning.machine import device_capacity, measure_machine, memory_limits


def measure_on_rank() -> tuple[Machine, bool, bool]:
    resolve_axis().session.forget(machine.Machines)
    rng = torch.get_rng_state()
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        m = measure_machine(resolve_axis())
    kept = measure_machine(resolve_axis()) is m
    return m, kept, torch.equal(rng, torch.get_rng_state())


def test_ranks_hold_equal_numbers_and_measure_once(pool2: RankPool) -> None:
    (m, kept, rng_untouched), (other, *_) = pool2.run(measure_on_rank)
    assert m == other
    assert kept
    assert rng_untouched
    assert set(m.links) == set(COLLECTIVES)
    rates = [m.matmul_flops, m.memory_bandwidth, m.attention_flops, m.op_overhead_s]
    rates += [x for link in m.links.values() for x in (link.latency_s, link.bandwidth_bytes)]
    assert all(r is not None and 0 < r < float("inf") for r in rates)
    assert m.capacity_bytes is not None
    assert 0 < m.capacity_bytes <= device_capacity(torch.device("cpu"), 2)
    assert m.host_bandwidth is None and m.host_capacity_bytes == m.capacity_bytes
    assert m.source == "measured on 2 ranks, cpu, torch.float32"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_rank_has_no_links(dtype: torch.dtype) -> None:
    m = measure_machine(SINGLE, dtype, torch.device("cpu"))
    assert m.links == {}
    assert m.matmul_flops > 1e6


def test_memory_is_what_the_control_groups_around_a_process_leave(tmp_path: Path) -> None:
    """Of the second version of control groups, and of the first."""
    known = tmp_path / "proc" / "self" / "cgroup"
    known.parent.mkdir(parents=True)
    known.write_text("12:memory:/slurm/job_7\n4:cpu,cpuacct:/slurm\n0::/system.slice/a:b.scope\n")
    found = [f.relative_to(tmp_path / "sys/fs/cgroup") for f in memory_limits(tmp_path)]
    assert found == [
        Path("memory.max"),
        Path("memory/memory.limit_in_bytes"),
        Path("memory/slurm/job_7/memory.limit_in_bytes"),
        Path("memory/slurm/memory.limit_in_bytes"),
        Path("system.slice/a:b.scope/memory.max"),
        Path("system.slice/memory.max"),
    ]
    assert memory_limits(tmp_path / "nowhere")[:1] == [
        tmp_path / "nowhere/sys/fs/cgroup/memory.max"
    ]


@pytest.mark.gpu
def test_rates_of_a_gpu_are_plausible() -> None:
    m = measure_machine(SINGLE, torch.bfloat16, torch.device("cuda"))
    assert 1e13 < m.matmul_flops < 1e16
    assert 1e11 < m.memory_bandwidth < 2e13
    assert 1e-7 < m.op_overhead_s < 1e-3
    assert m.host_bandwidth is not None and 1e9 < m.host_bandwidth < m.memory_bandwidth
