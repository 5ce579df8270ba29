"""Measures what the analytic prior needs to know of the machine, on the ranks of an axis, once.

Takes about 0.5 s on two CPU ranks. Every rate is the slowest rank's, so all ranks hold equal
numbers and choose equal plans from them.
"""

from __future__ import annotations

import logging
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis, device_of
from paradyse.distributed.checksums import repeatable
from paradyse.distributed.lanes import Overlap
from paradyse.planning.costs import COLLECTIVES, Link, Machine
from paradyse.torch_private import disable_current_modes

log = logging.getLogger(__name__)

RESERVE = 0.1
"""Share of a device's memory left to the allocator's fragmentation, the context and other users."""

NCCL_COMMUNICATOR_BYTES = 400 * 2**20
"""Device memory of an NCCL communicator with default buffers: an upper estimate, not measured. One
is made when its group sends its first message."""

_SMALL, _LARGE = 1 << 10, 1 << 20
"""Elements (float32) of the two messages that give a collective's latency and bandwidth."""

_ROUNDS = 3
"""Times that all collectives are measured; the fastest counts. What else runs for a moment, such as
a compiler that has just finished, would otherwise decide plans for good."""


class Machines(dict[tuple[torch.dtype, str], Machine]):
    """What was measured on an axis, by dtype and device."""


def _times(
    device: torch.device, call: Callable[[], object], repeats: int = 4, inner: int = 1
) -> list[float]:
    """Seconds of each of ``repeats`` runs on ``device``, per call, after one to warm up."""
    sync = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    call()
    times = []
    for _ in range(repeats):
        sync()
        start = time.perf_counter()
        for _ in range(inner):
            call()
        sync()
        times.append((time.perf_counter() - start) / inner)
    return times


def device_capacity(device: torch.device, ranks_per_host: int = 1) -> int:
    """Bytes one rank may use: the memory of ``device``, or of a host's the part of one of
    ``ranks_per_host``, less ``RESERVE``."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return int(total * (1 - RESERVE))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in memory_limits():
        try:
            total = min(total, int(limit.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return int(total * (1 - RESERVE)) // max(1, ranks_per_host)


def memory_limits(root: Path = Path("/")) -> list[Path]:
    """The files that may say how much memory this process is given: of its control group, such as
    a batch job's, and of those around it, by both versions of control groups.

    Args:
        root: of the file system.
    """
    known = root / "proc/self/cgroup"
    lines = known.read_text().splitlines() if known.exists() else []
    groups = [of.split(":", 2) for of in ("0::/", ":memory:/", *lines) if of.count(":") > 1]
    found = []
    for _, controllers, group in groups:
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        at = root / "sys/fs/cgroup" / base / group.lstrip("/")
        inside = len(at.relative_to(root / "sys/fs/cgroup" / base).parts)
        found += [folder / name for folder in (at, *at.parents)[: inside + 1]]
    return list(dict.fromkeys(found))


def _compute_rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Seconds per unit of work: rates would not average over ranks as times do."""
    cuda = device.type == "cuda"
    n = 4096 if cuda else 384
    a = torch.ones(n, n, dtype=dtype, device=device)
    matmul_s = min(_times(device, lambda: a @ a, inner=1 if cuda else 2)) / (2 * n**3)

    heads, s, d = (16, 4096, 64) if cuda else (4, 384, 64)
    q = torch.ones(1, heads, s, d, dtype=dtype, device=device)
    attention = torch.nn.functional.scaled_dot_product_attention
    attention_s = min(_times(device, lambda: attention(q, q, q))) / (4 * heads * s * s * d)

    x = torch.ones((64 if cuda else 4) << 20, dtype=torch.float32, device=device)
    y = torch.empty_like(x)
    memory_s = min(_times(device, lambda: torch.mul(x, 2.0, out=y))) / (2 * x.numel() * 4)

    tiny = torch.ones(8, device=device)
    op_s = min(_times(device, lambda: torch.add(tiny, 1.0), inner=100))
    times = {"matmul": matmul_s, "attention": attention_s, "memory": memory_s, "op": op_s}
    if cuda:
        host = torch.empty(x.shape, pin_memory=True)
        copy_s = min(_times(device, lambda: host.copy_(x, non_blocking=True)))
        times["host"] = copy_s / x.nbytes
    return times


def _link_times(device: torch.device, axis: Axis, block_id: int) -> dict[str, float]:
    """Seconds of a small and of a large message for every collective: medians, as a message also
    waits for the other ranks' threads to be scheduled."""

    def exchange(x: torch.Tensor) -> None:
        collectives.ring_exchange(x, axis, block_id).wait()

    p, times = axis.size, dict[str, float]()
    for size, elements, repeats in (("small", _SMALL, 11), ("large", _LARGE, 5)) * _ROUNDS:
        x = torch.ones(p, -(-elements // p), device=device)
        calls: dict[str, Callable[[], object]] = {
            "all_gather": partial(collectives.all_gather, x[0], axis, block_id),
            "reduce_scatter": partial(collectives.reduce_scatter, x, axis, block_id),
            "all_reduce": partial(collectives.all_reduce, x, axis, block_id),
            "all_to_all": partial(collectives.all_to_all, x, axis, block_id),
            "ring_exchange": partial(exchange, x),
        }
        for name, call in calls.items():
            key, taken = f"{name} {size}", statistics.median(_times(device, call, repeats))
            times[key] = min(times.get(key, taken), taken)
    return times


def _overlap(device: torch.device, axis: Axis, block_id: int) -> float:
    """``Machine.overlap`` of this rank: how much sooner a large message and as long a computation
    are done together than one after the other, over the shorter of both."""
    x = torch.ones(_LARGE, device=device)
    n = 4096 if device.type == "cuda" else 256
    a = torch.ones(n, n, device=device)

    def message() -> None:
        collectives.ring_exchange(x, axis, block_id).wait()

    def compute(rounds: int) -> None:
        for _ in range(rounds):
            torch.mm(a, a)

    def both(rounds: int) -> None:
        pending = collectives.ring_exchange(x, axis, block_id)
        compute(rounds)
        pending.wait()

    message_s = statistics.median(_times(device, message, 5))
    once_s = statistics.median(_times(device, partial(compute, 4), 5)) / 4
    # Ranks may have other numbers of rounds, but send the same messages.
    rounds = max(1, round(message_s / once_s))
    compute_s = statistics.median(_times(device, partial(compute, rounds), 5))
    both_s = statistics.median(_times(device, partial(both, rounds), 5))
    hidden = (message_s + compute_s - both_s) / min(message_s, compute_s)
    return min(1.0, max(0.0, hidden))


def _sent(collective: str, size: int, p: int) -> float:
    """Bytes ``_link_times`` sends per call, counted as collectives and prior do."""
    total = 4.0 * p * -(-size // p)
    return total * {"all_reduce": 2 * (p - 1) / p, "ring_exchange": 1.0}.get(
        collective, (p - 1) / p
    )


def _agree(
    values: list[float], axis: Axis, device: torch.device, choose: Callable[[Tensor, int], Tensor]
) -> list[float]:
    """What ``choose`` makes of the values of all ranks, [p, n], along their dim 0."""
    if axis.group is None:
        return values
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    agreed: list[float] = choose(
        collectives.all_gather(mine, axis, collectives.MACHINE), 0
    ).tolist()
    return agreed


def measure_machine(
    axis: Axis, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Machine:
    """Rates of a rank of ``axis`` for values of ``dtype``, measured on first use and kept.

    Every rank of the axis must call it at the same point of the program, as it issues collectives.
    Rates are the slowest rank's, the capacity is the smallest; all ranks get equal numbers.

    Args:
        axis: the ranks to measure; one rank has no collectives to time.
        dtype: of the matmul and the attention.
        device: where to measure; None: the current CUDA device unless the axis runs on gloo.
    """
    device = device or device_of(axis.group)
    key, known = (dtype, str(device)), axis.session.of(Machines)
    if key not in known:
        start = time.perf_counter()
        # Called from run-time code of a compiled model: neither its modes nor its autocast may
        # leak in.
        with disable_current_modes(), torch.no_grad(), torch.autocast(device.type, enabled=False):
            known[key] = _measure(axis, dtype, device)
        axis.session.of(Overlap).hidden = known[key].overlap
        log.info("measured in %.2f s: %s", time.perf_counter() - start, known[key])
    return known[key]


def agreed_capacity(axis: Axis, device: torch.device | None = None) -> tuple[int, int]:
    """Bytes of ``device`` and bytes of its host that every rank of ``axis`` may use; a collective
    of all its ranks."""
    device = device or device_of(axis.group)
    every = dist.get_world_size() if dist.is_initialized() else 1  # maybe all on one host
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", every))
    mine = [float(device_capacity(d, local_ranks)) for d in (device, torch.device("cpu"))]
    with disable_current_modes():
        on_device, on_host = _agree(mine, axis, device, torch.amin)
    return int(on_device), int(on_host)


def describe_device(device: torch.device) -> str:
    """The name of ``device``, as ``profile_file.Header.device`` has it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [s.split(":")[1].strip() for s in lines if s.startswith("model name")]
    return f"cpu, {names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def _measure(axis: Axis, dtype: torch.dtype, device: torch.device) -> Machine:
    p = axis.size
    if axis.group is not None:
        start_together = torch.ones(1, device=device)
        collectives.all_reduce(start_together, axis, collectives.MACHINE)
    times = _compute_rates(device, dtype)
    if p > 1:
        times |= _link_times(device, axis, collectives.MACHINE)
        times["exposed"] = 1 - _overlap(device, axis, collectives.MACHINE)
    names = list(times)
    times = dict(zip(names, _agree([times[n] for n in names], axis, device, torch.amax)))

    links = {}
    for name in COLLECTIVES if p > 1 else ():
        small_s, large_s = times[f"{name} small"], times[f"{name} large"]
        extra = _sent(name, _LARGE, p) - _sent(name, _SMALL, p)
        # Noise can make the difference vanish; half the large message's time is then the floor.
        links[name] = Link(small_s, extra / max(large_s - small_s, large_s / 2))
    capacity_bytes, host_bytes = agreed_capacity(axis, device)
    latency_s = max((link.latency_s for link in links.values()), default=0.0)
    bandwidth = min(
        (link.bandwidth_bytes for link in links.values()), default=1.0 / times["memory"]
    )
    return Machine(
        matmul_flops=1 / times["matmul"],
        memory_bandwidth=1 / times["memory"],
        latency_s=latency_s,
        bandwidth_bytes=bandwidth,
        attention_flops=1 / times["attention"],
        op_overhead_s=times["op"],
        overlap=1 - times.get("exposed", 1.0),
        links=links,
        capacity_bytes=capacity_bytes,
        communicator_bytes=NCCL_COMMUNICATOR_BYTES if device.type == "cuda" and p > 1 else 0,
        host_bandwidth=1 / times["host"] if "host" in times else None,
        host_capacity_bytes=host_bytes,
        repeatable=repeatable(device),
        source=f"measured on {p} rank{'s' * (p > 1)}, {device.type}, {dtype}",
    )
