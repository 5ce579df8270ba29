"""Machines on paper: devices, networks of two levels, and the rates of a rank that follow.

``machine_of`` gives what ``measure_machine`` would have measured, from vendors' data and published
shares of them. A prediction from it is no measurement: it orders strategies and tells orders of
magnitude.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch

from paradyse.planning.costs import Link, Machine
from paradyse.planning.machine import NCCL_COMMUNICATOR_BYTES, RESERVE

MOST = 1e18
"""No machine has more of anything, a second or at all."""

OVERLAP = 0.9
"""``Machine.overlap`` of all devices: an estimate, not measured."""

GB = 1e9
"""Vendors count bandwidth and, on their sheets, capacity in powers of ten."""


@dataclass(frozen=True)
class Device:
    """One accelerator. Rates are the vendor's peaks, dense; shares say what programs reach."""

    name: str
    matmul_flops: Mapping[torch.dtype, float]
    """Peak operations per second of the matrix units, without sparsity."""
    memory_bandwidth: float
    """Peak bytes per second of the device's memory."""
    capacity_bytes: int
    """Memory as the driver reports it."""
    link_bandwidth: float
    """Bytes per second that one device sends to others of its node, one direction."""
    host_bandwidth: float = 32 * GB
    """Peak bytes per second between the device and the host's memory, one direction: PCIe 4.0 of
    16 lanes, 64 GB/s both directions together."""
    matmul_share: float = 0.8
    """Of the peak, by a large matmul. 8192 x 8192 x 8192 in bfloat16 on random data: 798 TFLOP/s
    on an H100 and 788 on an H200 (torch 2.11, measured), 0.80 of 989; 0.8 to 0.9 is also what the
    authors of FlashAttention-2 report of matmuls (arXiv 2307.08691, section 1)."""
    attention_share: float = 0.6
    """Of the peak, by flash attention forward and backward together. On an A100 FlashAttention-2
    reaches 0.73 forward and 0.63 backward (arXiv 2307.08691, section 1)."""
    memory_share: float = 0.9
    """Of the peak, by an elementwise operator. A copy on an H100 moves 3.0 of 3.35 TB/s, on an H200
    4.3 of 4.8 (torch 2.11, measured)."""
    host_share: float = 0.77
    """Of the peak, by copies from and to pinned memory: 24.8 of 32 GB/s on an A100 (nvbandwidth
    0.8, eight A100-SXM4-80GB; NVIDIA developer forums, thread 352186)."""
    op_overhead_s: float = 5e-6
    """Seconds to launch one operator from Python: the default of ``costs.Machine``."""


@dataclass(frozen=True)
class Network:
    """Links of two levels: inside a node, and between nodes.

    Latencies are the constants that NCCL chooses its algorithms by (nccl 2.21, src/graph/tuning.cc,
    tables ``baseLat`` and ``hwLat``, protocol LL, which small messages take).
    """

    gpus_per_node: int = 8
    """HGX and DGX boards of A100, H100 and H200."""
    node_bandwidth: float = 8 * 25 * GB
    """Bytes per second that a node sends to others, one direction, shared by its devices: eight
    ports of 200 Gbit/s (HDR InfiniBand; DGX A100 datasheet, NVIDIA, 2020)."""
    host_bytes: int = 2 * 2**40
    """Memory of a node's host, shared by its devices (datasheets of DGX A100 640GB, DGX H100 and
    DGX H200: system memory 2 TB)."""
    link_share: float = 0.8
    """Of a link's bandwidth, by collectives. NCCL's own table takes 20 of 25 GB/s of an NVLink of
    Ampere (``SM80_NVLINK_BW``, src/graph/topo.h)."""
    base_s: float = 6.6e-6
    """Of any collective, whatever its steps."""
    intra_s: float = 0.6e-6
    """Of one step over NVLink."""
    inter_s: float = 2.7e-6
    """Of one step over the network."""


@dataclass(frozen=True)
class Cluster:
    """What ``machine_of`` needs: devices and how they are joined."""

    devices: tuple[Device, ...]
    """Kinds of devices among the ranks; one where all are equal."""
    network: Network


# Peaks of SXM modules without sparsity, from NVIDIA's datasheets: "A100 Tensor Core GPU" (June
# 2021), "H100 Tensor Core GPU" (2023), "H200 Tensor Core GPU" (2024). float32 matmuls of PyTorch
# run on the float32 units unless TF32 is allowed, and so does this table. Capacities are what the
# CUDA driver reports as the device's total memory: 40,441 MiB of an A100 of 40 GB (PC2 Paderborn,
# documentation of its nodes), 0.99 of the sheet's figure taken as GiB, and so of the others.
# NVLink: 600 GB/s (third generation) and 900 GB/s (fourth), both directions together.
_A100_FLOPS = {torch.bfloat16: 312e12, torch.float16: 312e12, torch.float32: 19.5e12}
_A100_FLOPS[torch.float64] = 19.5e12
_H100_FLOPS = {torch.bfloat16: 989e12, torch.float16: 989e12, torch.float32: 67e12}
_H100_FLOPS[torch.float64] = 67e12
# FlashAttention-2 reaches 0.35 of an H100's peak (arXiv 2407.08608, abstract); version 3's 0.75
# takes instructions that our kernels do not use. PCIe 5.0: 128 GB/s both directions together.
_HOPPER = {"link_bandwidth": 450 * GB, "host_bandwidth": 64 * GB, "attention_share": 0.35}

DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        Device("a100-40gb", _A100_FLOPS, 1555 * GB, 40441 * 2**20, 300 * GB),
        Device("a100-80gb", _A100_FLOPS, 2039 * GB, int(0.99 * 80 * 2**30), 300 * GB),
        Device("h100-80gb", _H100_FLOPS, 3350 * GB, int(0.99 * 80 * 2**30), **_HOPPER),
        Device("h200-141gb", _H100_FLOPS, 4800 * GB, int(0.99 * 141 * 2**30), **_HOPPER),
    )
}
"""By name. B200 is left out until there are published shares of its peaks to put beside it."""

# One port of 400 Gbit/s for each device (NDR; DGX H100 datasheet, NVIDIA, 2022).
_NDR = Network(node_bandwidth=8 * 50 * GB)
NETWORKS: dict[str, Network] = {
    "a100-40gb": Network(host_bytes=2**40),  # DGX A100 320GB: system memory 1 TB
    "h100-80gb": _NDR,
    "h200-141gb": _NDR,
}
"""By the device they come with, where it is not ``Network``'s default."""


def read_cluster(name: str) -> Cluster:
    """The cluster of a device's ``name`` in ``DEVICES``, or in a TOML or JSON file of this name.

    The file gives a table ``network`` with fields of ``Network``, and ``devices``, a list: each
    entry names a device of ``DEVICES`` as ``base``, or gives all fields, and may change any;
    ``matmul_flops`` is a table by dtype. What ``network`` does not say is as the devices come with
    it; of unequal ones, the least bandwidth and the smallest host. It may be left out:

        devices = [{base = "a100-80gb"}, {base = "a100-40gb", matmul_share = 0.6}]
        [network]
        gpus_per_node = 4
        node_bandwidth = 25e9

    Raises:
        ValueError: the name is unknown; the file cannot be read or has a field that is unknown,
            missing or not a positive number.
    """
    if name in DEVICES:
        return Cluster((DEVICES[name],), NETWORKS.get(name, Network()))
    file = Path(name)
    if not file.is_file():
        known = ", ".join(DEVICES)
        raise ValueError(f"unknown device {name!r}: give one of {known}, or a TOML or JSON file")
    try:
        text = file.read_text()
        found = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except OSError as e:
        raise ValueError(f"{file} cannot be read: {e.strerror}; give another file") from e
    except (ValueError, RecursionError) as e:
        kind = "JSON" if file.suffix == ".json" else "TOML"
        raise ValueError(f"{file} is not {kind}: {e}; give a description of a cluster") from e
    if not isinstance(found, dict) or set(found) - {"devices", "network"}:
        raise ValueError(f"{file}: give 'devices' and 'network', and nothing else")
    given = found.get("devices")
    if not isinstance(given, list) or not given or not all(isinstance(d, dict) for d in given):
        raise ValueError(f"{file}: 'devices' must be a list of at least one table")
    devices = tuple(_device(d, str(file)) for d in given)
    base, changed = _slowest_network(given), found.get("network", {})
    if not isinstance(changed, dict):
        raise ValueError(f"{file}: 'network' must be a table, not {changed!r}")
    return Cluster(devices, _fill(Network, vars(base), changed, str(file)))


LINKS = ("nvlink", "ib")
"""Of a device, inside a node and between nodes, as ``flops_per_byte`` names them."""


def flops_per_byte(name: str) -> float:
    """Operations of a device, in bfloat16 at its peak, for each byte that it sends in that time:
    what decides whether messages or work take longer.

    Args:
        name: a device, or its generation, and one of ``LINKS``: ``a100-nvlink``, ``h100-80gb-ib``.
    Raises:
        ValueError: the name is unknown.
    """
    asked, _, link = name.lower().rpartition("-")
    device = next((d for d in DEVICES.values() if asked in (d.name, d.name.split("-")[0])), None)
    if device is None or link not in LINKS:
        known = dict.fromkeys(d.split("-")[0] for d in DEVICES)
        names = ", ".join(f"{d}-{link}" for d in known for link in LINKS)
        raise ValueError(f"unknown device and link {name!r:.40}: give one of {names}")
    network = NETWORKS.get(device.name, Network())
    between = network.node_bandwidth / network.gpus_per_node
    bandwidth = device.link_bandwidth if link == LINKS[0] else between
    return device.matmul_flops[torch.bfloat16] / bandwidth


def _slowest_network(devices: Sequence[Mapping[str, Any]]) -> Network:
    """The network that a file's ``devices``, or their bases, come with: of unequal ones the least
    bandwidth and the smallest host."""
    networks = [NETWORKS.get(d.get("base", d.get("name", "")), Network()) for d in devices]
    return replace(
        networks[0],
        node_bandwidth=min(n.node_bandwidth for n in networks),
        host_bytes=min(n.host_bytes for n in networks),
    )


def _device(given: Mapping[str, Any], file: str) -> Device:
    changed = dict(given)
    base = changed.pop("base", None)
    if base is not None and base not in list(DEVICES):
        raise ValueError(f"{file}: unknown base {base!r}; known: {', '.join(DEVICES)}")
    flops = changed.get("matmul_flops")
    if isinstance(flops, dict):
        changed["matmul_flops"] = {_dtype(k, file): _rate(k, v, file) for k, v in flops.items()}
    return _fill(Device, vars(DEVICES[base]) if base else {}, changed, file)


def _fill(kind: Any, base: Mapping[str, Any], changed: Mapping[str, Any], file: str) -> Any:
    legal = [f.name for f in fields(kind)]
    unknown = sorted(set(changed) - set(legal))
    if unknown:
        raise ValueError(f"{file}: unknown {unknown[0]!r}; legal: {', '.join(legal)}")
    for key, value in changed.items():
        if key == "matmul_flops":
            if not isinstance(value, dict) or not value:
                raise ValueError(f"{file}: matmul_flops = {value!r}; give a table, dtype to rate")
        elif key == "name":
            if not isinstance(value, str):
                raise ValueError(f"{file}: name = {value!r}; give a text")
        else:
            _rate(key, value, file)
    given = {**base, **changed}
    needed = [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]
    lacking = [name for name in needed if name not in given]
    if lacking:
        raise ValueError(
            f"{file}: {given.get('name', 'a device')} lacks {', '.join(lacking)}: give them, or a "
            'device to begin with, such as base = "a100-80gb"'
        )
    return kind(**given)


def _dtype(name: str, file: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{file}: matmul_flops: {name!r} is no dtype; give 'bfloat16' or the like")
    return found


_WHOLE = ("capacity_bytes", "gpus_per_node", "host_bytes")
"""Fields that have no fractions."""


def _rate(key: str, value: Any, file: str) -> float:
    """``value`` of ``key``, once it is known to be one that a machine may have."""
    kind = int if key in _WHOLE else int | float
    most = 1.0 if key.endswith("_share") else MOST
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value <= most:
        what = "a whole number" if key in _WHOLE else "a number"
        raise ValueError(f"{file}: {key} = {short(value)}; give {what} above 0, at most {most:g}")
    return value


def machine_of(cluster: Cluster, num_gpus: int, dtype: torch.dtype = torch.bfloat16) -> Machine:
    """Rates of one of ``num_gpus`` ranks of ``cluster`` that form one sequence axis.

    Ranks fill nodes one after the other. All run one program on equal shares of the tokens, so
    among unequal devices the slowest rate and the smallest memory hold for every rank.

    Args:
        dtype: of the matmuls; rates are looked up for it.
    Raises:
        ValueError: a device has no rate for ``dtype``.
    """
    for d in cluster.devices:
        if dtype not in d.matmul_flops:
            known = ", ".join(str(k) for k in d.matmul_flops)
            raise ValueError(
                f"device {d.name} has no rate for {dtype}; give one, or one of its dtypes: {known}"
            )
    devices, network = cluster.devices, cluster.network
    link = min(d.link_bandwidth for d in devices)
    links = _links(network, link, num_gpus)
    names = "; ".join(dict.fromkeys(d.name for d in devices))
    slowest = " (slowest rate and smallest memory of each)" if len(devices) > 1 else ""
    nodes, on_node = -(-num_gpus // network.gpus_per_node), min(num_gpus, network.gpus_per_node)
    return Machine(
        matmul_flops=min(d.matmul_flops[dtype] * d.matmul_share for d in devices),
        memory_bandwidth=min(d.memory_bandwidth * d.memory_share for d in devices),
        latency_s=max(x.latency_s for x in links.values()),
        bandwidth_bytes=min(x.bandwidth_bytes for x in links.values()),
        attention_flops=min(d.matmul_flops[dtype] * d.attention_share for d in devices),
        op_overhead_s=max(d.op_overhead_s for d in devices),
        overlap=OVERLAP,
        links=links,
        capacity_bytes=int(min(d.capacity_bytes for d in devices) * (1 - RESERVE)),
        communicator_bytes=NCCL_COMMUNICATOR_BYTES if num_gpus > 1 else 0,
        host_bandwidth=min(d.host_bandwidth * d.host_share for d in devices),
        host_capacity_bytes=int(network.host_bytes * (1 - RESERVE)) // on_node,
        source=f"on paper: {num_gpus} x {names}{slowest}, {nodes} node{'s' * (nodes > 1)}",
    )


def _links(n: Network, link_bandwidth: float, p: int) -> dict[str, Link]:
    """Each collective over p ranks, as ``Link``: latency, and bandwidth per byte a rank sends.

    Rings (all-gather, reduce-scatter): p - 1 steps, one of each node's through the network. All
    bytes that a rank passes on go through the ring's slowest link: the device's own inside a node,
    the whole node's between nodes, as NCCL builds one ring for each port and they cross the node's
    border once each (nccl-tests, doc/PERFORMANCE.md: the bus bandwidth is that link's).
    All-reduce is the two rings, or for its latency a tree of depth log2 of the nodes.

    A ring exchange is one step, and waits for the ranks at the borders of nodes: one device of a
    node sends through the network at a time, and has the ports of all of them to itself only if
    the library spreads one message over ports; it has its own share of them otherwise, which is
    what is taken here.

    All-to-all: of the bytes that a rank sends, (p - g) / (p - 1) leave the node of g ranks, over
    its share 1/g of the node's ports, while the others go over its own link; both at once.
    """
    g = min(n.gpus_per_node, p)
    nodes = -(-p // n.gpus_per_node)
    inside = link_bandwidth * n.link_share
    border = n.node_bandwidth * n.link_share
    ring_bandwidth = inside if nodes == 1 else min(inside, border)
    ring_s = n.base_s + (p - nodes) * n.intra_s + (nodes - 1) * n.inter_s
    tree_s = n.base_s + 2 * ((g - 1) * n.intra_s + math.log2(nodes) * n.inter_s)
    both_s = 2 * ring_s - n.base_s
    hop_s = n.inter_s if nodes > 1 else n.intra_s
    hop_bandwidth = inside if nodes == 1 else min(inside, border / g)
    away = (p - g) / (p - 1) if p > 1 else 0.0
    slower = max((1 - away) / inside, away / (border / g)) if p > 1 else 1 / inside
    return {
        "all_gather": Link(ring_s, ring_bandwidth),
        "reduce_scatter": Link(ring_s, ring_bandwidth),
        "all_reduce": Link(min(both_s, tree_s), ring_bandwidth),
        "all_to_all": Link(n.base_s + (g - 1) * n.intra_s + (p - g) * n.inter_s, 1 / slower),
        "ring_exchange": Link(n.base_s + hop_s, hop_bandwidth),
    }


def describe_cluster(cluster: Cluster) -> Sequence[tuple[str, str]]:
    """The parts of ``cluster`` and their rates, for people: name and value."""
    rows = []
    for d in cluster.devices:
        peak = d.matmul_flops.get(torch.bfloat16, max(d.matmul_flops.values())) / 1e12
        rates = (
            f"{peak:.0f} TFLOP/s x {d.matmul_share:g} (attention x {d.attention_share:g}), "
            f"{d.memory_bandwidth / GB:.0f} GB/s x {d.memory_share:g}, "
            f"{d.capacity_bytes / 2**30:.1f} GiB, link {d.link_bandwidth / GB:.0f} GB/s, "
            f"host {d.host_bandwidth / GB:.0f} GB/s x {d.host_share:g}"
        )
        rows.append((d.name, rates))
    n, ports = cluster.network, cluster.network.node_bandwidth / GB
    links = f"{ports:.0f} GB/s from node to node, links x {n.link_share:g}"
    host = f"{n.host_bytes / 2**30:.0f} GiB on its host"
    rows.append(("network", f"{n.gpus_per_node} a node, {host}, {links}"))
    if len(cluster.devices) > 1:
        rows.append(("unequal", "the slowest rate and the smallest memory hold for every rank"))
    return rows
