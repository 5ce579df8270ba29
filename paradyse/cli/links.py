"""Links between local ranks that are as slow, beside the ranks' arithmetic, as those of a cluster.

Ranks of one machine share its memory, so their messages cost little. Here each has a network
namespace of its own (iproute2; it takes root), a bridge joins them, and a token bucket (tc-tbf)
limits what each sends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

SUBNET = "10.213.0"
"""Of the addresses inside, which nothing outside sees."""
MOST_HOSTS = 254
INTERFACE = "eth0"
"""The device inside a namespace that leads to the others."""
BURST_S, LEAST_BURST, QUEUE_S = 2e-3, 1 << 17, 0.4
"""A link may fall so far behind its rate and catch up, but by no less than the largest segment that
Linux hands it whole; and so long a message waits before it is dropped."""
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
"""Of a rate, in bits per second, as tc has them."""


def parse_rate(text: str) -> float:
    """Bits per second of ``text``, such as ``800mbit``.

    Raises:
        ValueError: it is no such rate.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
    if not found or not 1e5 <= (rate := float(found[1]) * UNITS[found[2]]) <= 1e12:
        raise ValueError(f"{text!r:.40} is no rate; give one from 100kbit to 1000gbit")
    return rate


def format_rate(rate: float) -> str:
    """``rate``, in bits per second, as ``parse_rate`` reads it."""
    unit = next((u for u in ("gbit", "mbit") if rate >= UNITS[u]), "kbit")
    return f"{rate / UNITS[unit]:.4g}{unit}"


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def ip(*words: str) -> None:
    """Run iproute2's ``ip`` with ``words``.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    _run("ip", *words)


@functools.cache
def why_not() -> str:
    """Why no links can be limited here; "" where they can."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"there is no program {program} (iproute2)"
    try:
        with Network(["try"], 1e9) as network:
            _run(*network.command("try", "true"))
        return ""
    except subprocess.CalledProcessError as e:
        words = (e.stderr or str(e)).strip().splitlines()
        return f"network namespaces cannot be made: {words[-1] if words else e}"


class Network:
    """Hosts in network namespaces, joined by a bridge in a further one; all gone at the end.

    Args:
        hosts: their names.
        rate: bits per second that each may send; None: as fast as the machine does.
    Raises:
        subprocess.CalledProcessError: on entering, where namespaces may not be made.
        ValueError: more hosts than addresses.
    """

    def __init__(self, hosts: Sequence[str], rate: float | None = None) -> None:
        if len(hosts) > MOST_HOSTS:
            raise ValueError(f"{len(hosts)} ranks: at most {MOST_HOSTS} get a namespace each")
        self.switch, self.rate = f"paradyse-{os.getpid()}", rate
        self.spaces = {host: f"{self.switch}-{host}" for host in hosts}
        self.addresses = {host: f"{SUBNET}.{i}" for i, host in enumerate(hosts, 1)}
        self.ports = {host: f"port{i}" for i, host in enumerate(hosts, 1)}

    def __enter__(self) -> Self:
        try:
            self.make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def make(self) -> None:
        """Make the namespaces and what joins them."""
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for host, space in self.spaces.items():
            port = self.ports[host]
            ip("netns", "add", space)
            ends = (INTERFACE, "netns", space, "type", "veth", "peer", "name", port)
            ip("link", "add", *ends, "netns", self.switch)
            ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", space, "addr", "add", f"{self.addresses[host]}/24", "dev", INTERFACE)
            for link in ("lo", INTERFACE):
                ip("-n", space, "link", "set", link, "up")
            if self.rate is not None:
                burst = max(LEAST_BURST, int(self.rate / 8 * BURST_S))
                bucket = f"rate {int(self.rate)}bit burst {burst}b latency {QUEUE_S * 1e3:.0f}ms"
                place = f"-n {space} qdisc add dev {INTERFACE} root tbf"
                _run("tc", *place.split(), *bucket.split())

    def close(self) -> None:
        """End what runs in the namespaces, and remove them."""
        for space in (*self.spaces.values(), self.switch):
            self.end(space)
            subprocess.run(["ip", "netns", "del", space], capture_output=True)

    @staticmethod
    def pids(space: str) -> list[int]:
        """The processes in the namespace ``space``."""
        found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
        return [int(line) for line in found.stdout.split()]

    def end(self, space: str) -> None:
        """Kill all processes in the namespace ``space``."""
        for pid in self.pids(space):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def command(self, host: str, *command: str) -> list[str]:
        """``command`` as run on ``host``."""
        return ["ip", "netns", "exec", self.spaces[host], *command]


def remove_leftovers() -> None:
    """Remove namespaces of processes that were killed before they could."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for space in (line.split()[0] for line in listed.splitlines()):
        made_by = re.match(r"paradyse-(\d+)(-|$)", space)
        if made_by and not Path(f"/proc/{made_by[1]}").exists():
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


@contextlib.contextmanager
def linked(num_ranks: int, rate: float | None) -> Iterator[Network | None]:
    """Inside there is a ``Network`` with a host (``host_of``) for each of ``num_ranks`` ranks,
    whose links have ``rate`` bits per second; None, and nothing is made, where that is None.

    Raises:
        ValueError: such links cannot be made here.
    """
    if rate is None or num_ranks < 2:
        yield None
        return
    if why := why_not():
        raise ValueError(f"links of {format_rate(rate)}: {why}; leave the links as they are")
    remove_leftovers()
    with Network([host_of(r) for r in range(num_ranks)], rate) as network:
        yield network


def host_of(rank: int) -> str:
    """The host of ``rank`` in ``linked``."""
    return f"rank{rank}"
