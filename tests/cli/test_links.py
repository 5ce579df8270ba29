"""Limited links: rates read and written, ranks that keep to theirs, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from paradyse.cli import launch, links
from paradyse.cli.launch import Rank, Setting, run_ranks
from paradyse.cli.links import Network, format_rate, parse_rate

WHY_NOT = links.why_not()
needs_links = pytest.mark.skipif(bool(WHY_NOT), reason=f"links cannot be limited here: {WHY_NOT}")
NUM_BYTES = 2_000_000
"""Of a message."""


def gather(rank: Rank) -> float:
    """Seconds in which a message of ``NUM_BYTES`` of each rank reaches the others."""
    import torch
    import torch.distributed as dist

    mine = torch.full((NUM_BYTES,), rank.rank, dtype=torch.uint8)
    found = [torch.empty_like(mine) for _ in range(rank.size)]
    dist.barrier()
    start = time.perf_counter()
    dist.all_gather(found, mine)
    taken = time.perf_counter() - start
    assert [int(x.sum()) for x in found] == [r * NUM_BYTES for r in range(rank.size)]
    return taken


@pytest.mark.parametrize(
    ("text", "rate"), [("800mbit", 8e8), ("1.5gbit", 1.5e9), ("100KBIT", 1e5), (" 1000gbit", 1e12)]
)
def test_rates_are_read_as_they_are_written(text: str, rate: float) -> None:
    assert parse_rate(text) == rate
    assert parse_rate(format_rate(rate)) == rate


@pytest.mark.parametrize("text", ["", "800", "800mb", "-1mbit", "99kbit", "1001gbit", "nanmbit"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give one from 100kbit to 1000gbit"):
        parse_rate(text)


@pytest.mark.broad
@needs_links
def test_ranks_send_no_faster_than_their_links_and_leave_nothing() -> None:
    rate = 40e6
    setting = Setting(timeout_s=60, env={"PYTHONPATH": str(Path(__file__).parent)}, rate=rate)
    taken = run_ranks("test_links:gather", 3, {}, setting)
    assert min(taken) > 0.9 * 2 * NUM_BYTES * 8 / rate  # each rank's message to two others
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert f"paradyse-{os.getpid()}" not in spaces


@needs_links
def test_what_a_killed_process_left_is_removed() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    mine, left = Network(["a"]).switch, f"paradyse-{gone.pid}"
    for space in (mine, left, f"{left}-rank0"):
        links.ip("netns", "add", space)
    try:
        links.remove_leftovers()
        spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert mine in spaces and left not in spaces
    finally:
        links.ip("netns", "del", mine)


@needs_links
def test_a_network_that_cannot_be_made_is_removed() -> None:
    network = Network(["a", "b"], rate=0)  # tc refuses
    with pytest.raises(subprocess.CalledProcessError), network:
        pass
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert network.switch not in spaces


def chosen(**given: Any) -> tuple[float | None, str]:
    asked: dict[str, Any] = {"ranks": 2, "link": None, "like": None, "usual": "", **given}
    return launch.choose_links(Namespace(**asked), "cpu")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of 104 Gflop/s, on a machine where links can be limited."""
    monkeypatch.setattr(links, "why_not", lambda: "")
    monkeypatch.setattr(launch, "run_ranks", lambda *_: [104e9, 104e9])


@pytest.mark.usefixtures("measured")
def test_links_are_limited_as_asked() -> None:
    assert chosen(link=8e8) == (8e8, "links: 800mbit each")
    assert chosen() == (None, "links: as they are")
    assert chosen(ranks=1) == (None, "no links")
    with pytest.raises(ValueError, match="--link is of links between ranks: give --ranks 2"):
        chosen(ranks=1, link=8e8)
    rate, words = chosen(like="a100-nvlink")
    assert rate == pytest.approx(8 * 104e9 / 1040)  # 312 Tflop/s over 300 GB/s
    assert "800mbit" in words and "1,040 operations per byte sent of a100-nvlink" in words
    assert chosen(usual="a100-nvlink") == (rate, words)
    assert chosen(usual="a100-nvlink", link=1e6)[0] == 1e6


def test_where_links_cannot_be_limited_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "why_not", lambda: "no root")
    rate, words = chosen(usual="a100-nvlink")
    assert rate is None and "as they are (no root; where they are slow" in words
    for flag in ({"link": 8e8}, {"like": "h100-ib"}):
        with pytest.raises(ValueError, match="cannot be limited here: no root; leave it out"):
            chosen(**flag)


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.shutil, "which", lambda name: None if name == "tc" else name)
    links.why_not.cache_clear()
    try:
        assert links.why_not() == "there is no program tc (iproute2)"
    finally:
        links.why_not.cache_clear()
