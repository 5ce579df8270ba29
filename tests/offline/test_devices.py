"""Machines on paper: rates, links of two levels, unequal devices, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paradyse.offline.devices import (
    DEVICES,
    Cluster,
    Network,
    flops_per_byte,
    machine_of,
    read_cluster,
)
from paradyse.planning.costs import COLLECTIVES

A100 = DEVICES["a100-80gb"]
ONE_NODE = Network()


@pytest.mark.parametrize("name", DEVICES)
def test_no_rate_exceeds_the_vendors(name: str) -> None:
    device, machine = DEVICES[name], machine_of(read_cluster(name), 8)
    assert machine.matmul_flops < device.matmul_flops[torch.bfloat16]
    assert machine.memory_bandwidth < device.memory_bandwidth
    assert machine.capacity_bytes is not None and machine.capacity_bytes < device.capacity_bytes
    assert machine.host_bandwidth is not None and machine.host_bandwidth < device.host_bandwidth
    assert set(machine.links) == set(COLLECTIVES)
    assert all(x.bandwidth_bytes < device.link_bandwidth for x in machine.links.values())


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_second_level_is_slower(collective: str) -> None:
    one = machine_of(Cluster((A100,), Network(gpus_per_node=64)), 64).link(collective)
    two = machine_of(Cluster((A100,), Network(gpus_per_node=8)), 64).link(collective)
    assert two.bandwidth_bytes < one.bandwidth_bytes
    if collective != "all_reduce":  # a tree over nodes has fewer steps than one over devices
        assert two.latency_s > one.latency_s


def test_the_border_of_a_node_bounds_a_ring_and_is_shared_by_exchanges() -> None:
    network = Network(gpus_per_node=8, node_bandwidth=80e9, link_share=1.0)
    links = machine_of(Cluster((A100,), network), 64).links
    assert links["all_gather"].bandwidth_bytes == 80e9
    assert links["ring_exchange"].bandwidth_bytes == 10e9
    # 56 of a rank's 63 messages leave the node, at an eighth of its ports
    assert links["all_to_all"].bandwidth_bytes == pytest.approx(10e9 * 63 / 56)


def test_among_unequal_devices_the_slowest_and_the_smallest_hold() -> None:
    slow, small = replace(A100, name="slow", matmul_share=0.4), DEVICES["a100-40gb"]
    both = machine_of(Cluster((A100, slow, small), ONE_NODE), 8)
    assert both.matmul_flops == machine_of(Cluster((slow,), ONE_NODE), 8).matmul_flops
    assert both.capacity_bytes == machine_of(Cluster((small,), ONE_NODE), 8).capacity_bytes
    assert "slowest" in both.source


def test_ranks_of_a_node_share_its_host() -> None:
    cluster = Cluster((A100,), Network(gpus_per_node=4, host_bytes=2**40))
    shares = [machine_of(cluster, n).host_capacity_bytes for n in (1, 2, 4, 8)]
    assert shares[0] is not None and 0.8 * 2**40 < shares[0] < 2**40
    assert shares[1:] == [shares[0] // 2, shares[0] // 4, shares[0] // 4]


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_cluster_is_read_from_a_file(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"cluster{suffix}"
    if suffix == ".toml":
        file.write_text(
            'devices = [{base = "a100-80gb"}, {base = "a100-40gb", matmul_share = 0.5}]\n'
            "[network]\ngpus_per_node = 4\n"
        )
    else:
        devices = [{"base": "a100-80gb"}, {"base": "a100-40gb", "matmul_share": 0.5}]
        file.write_text(json.dumps({"devices": devices, "network": {"gpus_per_node": 4}}))
    cluster = read_cluster(str(file))
    assert cluster.devices[0] == A100 and cluster.devices[1].matmul_share == 0.5
    assert cluster.network == Network(gpus_per_node=4, host_bytes=2**40)  # the smaller host


@pytest.mark.parametrize(
    ("devices", "like"),
    [
        ([{"base": "h100-80gb"}, {"base": "a100-80gb"}], "a100-80gb"),
        ([{"base": "a100-80gb"}, {"base": "h100-80gb"}], "a100-80gb"),
        ([{"base": "a100-80gb"}, {"base": "a100-40gb"}], "a100-40gb"),
        ([{"base": "h100-80gb", "name": "lab"}], "h100-80gb"),
    ],
)
def test_a_network_is_the_slowest_that_the_devices_come_with(
    devices: list[dict[str, str]], like: str, tmp_path: Path
) -> None:
    """Whatever their order, and whatever they are called."""
    (file := tmp_path / "cluster.json").write_text(json.dumps({"devices": devices}))
    assert read_cluster(str(file)).network == read_cluster(like).network


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("a100-nvlink", 312e12 / 300e9),
        ("A100-80gb-ib", 312e12 / 25e9),
        ("h100-ib", 989e12 / 50e9),
        ("h200-141gb-nvlink", 989e12 / 450e9),
    ],
)
def test_operations_per_byte_sent(name: str, ratio: float) -> None:
    assert flops_per_byte(name) == pytest.approx(ratio)


@pytest.mark.parametrize("name", ["", "a100", "nvlink", "a100-pcie", "b200-nvlink"])
def test_unknown_links_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="give one of a100-nvlink, a100-ib, h100-nvlink"):
        flops_per_byte(name)


def test_a_device_without_its_rates_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('devices = [{name = "mine", link_bandwidth = 1e9}]')
    lacks = "mine lacks matmul_flops, memory_bandwidth, capacity_bytes: .* base = "
    with pytest.raises(ValueError, match=lacks):
        read_cluster(str(file))


def test_unknown_names_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="a100-80gb"):
        read_cluster("a100")
    with pytest.raises(ValueError, match="no rate for torch.int8"):
        machine_of(Cluster((A100,), ONE_NODE), 8, torch.int8)
