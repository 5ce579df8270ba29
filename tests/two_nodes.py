"""Training on two nodes, started by torchrun on each as README says; one of them may die.

    python tests/two_nodes.py                         # three minutes on two cores; needs root
    python tests/two_nodes.py --only restart          # scenarios whose name begins so

The nodes are two network namespaces of this machine, joined by a bridge in a third, with host names
of their own; each runs two ranks, and they meet by a c10d rendezvous. Exits with 77 where
namespaces may not be made, with the reason. What is asked:

- training over meshes (2, 2) and (1, 4) has the losses of one process;
- a node whose processes are killed, or whose network is cut off, ends the other in bounded time,
  also if it is the one that keeps the rendezvous;
- with --max-restarts the ranks start again, with a new node in place of the dead one or
  (--nnodes 1:2) without it, and go on from the newest checkpoint with the losses of one process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from harness import LOG_TAIL, PATIENCE
from node_training import EVERY, Loss, Training, losses_of, model_and_optimizer
from scripts import TESTS, Report, options_of

from paradyse.cli.links import Network, ip
from paradyse.distributed.collectives import TIMEOUT_VARIABLE

NOT_ALLOWED = 77
"""Exit status where namespaces may not be made, as of automake's skipped tests."""
HOSTS = FIRST, SECOND = "first-node", "second-node"
PORT = 29400
STEPS, DIES_AFTER = 40, 2 * EVERY + 1
TOLERANCE = 1e-4
"""Of a loss, relative."""
TIMEOUT_S = 20.0 * PATIENCE
"""Of a collective: longer than ranks on busy cores differ in what they compile."""
TRAINING_S = 150.0 * PATIENCE
"""Limit for a training, its start included."""
BOUND_S = TIMEOUT_S + 40.0 * PATIENCE
"""Within this a node ends after the other died: its ranks after a time-out, then torchrun, which
gives ranks 30 s."""
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=5"
"""A dead node is noticed after 5 s, and so long is a second one waited for; torchrun's own are 15
and 30."""

NEW_NODES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""For torchrun: else, in torch 2.13, a node that joins a later round of a rendezvous waits in vain
for the first one's address, which is told in the first round alone."""


class Wrong(AssertionError):
    """What a scenario found that should not be."""


class Hosts(Network):
    """Two hosts with names of their own."""

    def __init__(self) -> None:
        super().__init__(HOSTS)

    def make(self) -> None:
        """Make them, each with a file of hosts."""
        super().make()
        for space in self.spaces.values():
            self._files(space).mkdir(parents=True)
        self.write_hosts(self.addresses)

    def write_hosts(self, own: Mapping[str, str]) -> None:
        """Have every host know itself by its address in ``own``, and the other by its address in
        the network."""
        for host, space in self.spaces.items():
            known = {"localhost": "127.0.0.1", **self.addresses, host: own[host]}
            lines = [f"{address} {name}\n" for name, address in known.items()]
            # what lies there is mounted over /etc by ip netns exec
            (self._files(space) / "hosts").write_text("".join(lines))

    def close(self) -> None:
        """Remove them."""
        super().close()
        for space in (*self.spaces.values(), self.switch):
            shutil.rmtree(self._files(space), ignore_errors=True)
        with contextlib.suppress(OSError):  # others keep files there
            self._files("").rmdir()

    @staticmethod
    def _files(space: str) -> Path:
        return Path("/etc/netns") / space

    def command(self, host: str, *command: str) -> list[str]:
        """``command`` as run on ``host``, under its name."""
        named = f'hostname {host} && exec "$@"'
        return super().command(host, "unshare", "--uts", "sh", "-c", named, "sh", *command)

    def kill(self, host: str) -> None:
        """All processes of ``host`` are gone at once."""
        self.end(self.spaces[host])

    def cut_off(self, host: str) -> None:
        """Nothing reaches ``host`` any more, and nothing comes from it."""
        ip("-n", self.switch, "link", "set", self.ports[host], "down")


@dataclass
class Nodes:
    """One training on both nodes."""

    network: Hosts
    training: Training
    nnodes: str = "2"
    max_restarts: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    """Beside what this process has."""

    def __post_init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def folder(self) -> Path:
        return Path(self.training.folder)

    def start(self, host: str) -> None:
        """Start torchrun on ``host``, as a user would."""
        torchrun = (
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", self.nnodes, "--nproc-per-node", "2", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"{FIRST}:{PORT}", "--rdzv-conf", RENDEZVOUS),
            *("--max-restarts", str(self.max_restarts), str(TESTS / "node_training.py")),
            json.dumps(vars(self.training)),
        )
        env = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
        env |= {"OMP_NUM_THREADS": "1", TIMEOUT_VARIABLE: str(TIMEOUT_S), **self.env}
        with open(self.folder / f"{host}.log", "ab") as log:
            self.processes[host] = subprocess.Popen(
                self.network.command(host, *torchrun),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=env,
            )

    def ended(self, host: str, limit_s: float) -> int:
        """The exit status of torchrun on ``host``, once it has ended."""
        try:
            return self.processes[host].wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Wrong(f"{host} has not ended in {limit_s:g} s\n{self.logs()}") from None

    def logs(self) -> str:
        """What torchrun and the ranks wrote on both nodes."""
        texts = ((h, (self.folder / f"{h}.log").read_text()) for h in self.processes)
        return "\n".join(f"output of {host}:\n{text[-LOG_TAIL:]}" for host, text in texts)

    def losses(self) -> list[Loss]:
        """What all ranks have written so far."""
        lines = [s for f in self.folder.glob("losses-*") for s in f.read_text().splitlines(True)]
        return [Loss(**json.loads(line)) for line in lines if line.endswith("\n")]

    def wait_for_step(self, step: int) -> None:
        """Return once a rank has done ``step``."""
        until = time.monotonic() + TRAINING_S
        while not any(x.step >= step for x in self.losses()):
            early = [h for h, p in self.processes.items() if p.poll() is not None]
            if early or time.monotonic() > until:
                raise Wrong(f"step {step} was not done (ended: {early})\n{self.logs()}")
            time.sleep(0.02)

    def check_losses(self, num_rows: int) -> float:
        """The largest relative difference from one process.

        Args:
            num_rows: losses that are there if nothing is missing.
        """
        expected, found = one_process(), self.losses()
        differences = [abs(x.loss - expected[x.step]) / expected[x.step] for x in found]
        if len(found) < num_rows or max(differences) > TOLERANCE:
            what = f"{len(found)} losses of {num_rows}, off by {max(differences)}"
            raise Wrong(f"{what}\n{self.logs()}")
        return max(differences)


@cache
def one_process() -> dict[int, float]:
    """Step -> its loss in one process, without the backend."""
    model, optimizer = model_and_optimizer()
    return dict(losses_of(model, optimizer, range(1, STEPS + 1)))


def equal_losses(make: Callable[..., Nodes], group: int, by_interface: bool = False) -> str:
    """Both nodes train to the end; ``by_interface``: a host's own name means its loopback, as many
    distributions have it, and the environment names the interface."""
    nodes = make(group=group, env={"GLOO_SOCKET_IFNAME": "eth0"} if by_interface else {})
    if by_interface:
        nodes.network.write_hosts(dict.fromkeys(HOSTS, "127.0.1.1"))
    for host in HOSTS:
        nodes.start(host)
    for host in HOSTS:
        if code := nodes.ended(host, TRAINING_S):
            raise Wrong(f"{host} ended with {code}\n{nodes.logs()}")
    return f"losses off by {nodes.check_losses(4 * STEPS):.1e}"


def death(make: Callable[..., Nodes], dies: str, how: str) -> str:
    """One node dies, and the other ends."""
    nodes = make(group=4)
    for host in HOSTS:
        nodes.start(host)
    nodes.wait_for_step(DIES_AFTER)
    getattr(nodes.network, how)(dies)
    start = time.monotonic()
    (other,) = {*HOSTS} - {dies}
    code = nodes.ended(other, BOUND_S)
    took, says = time.monotonic() - start, "CollectiveError: rank" in nodes.logs()
    # Without the rendezvous torchrun may end its ranks before they notice.
    if code == 0 or not (says or dies == FIRST):
        raise Wrong(f"{other} ended with {code}, and no rank says why\n{nodes.logs()}")
    return f"{other} ended in {took:.0f} s{', its ranks with a CollectiveError' * says}"


def restart(make: Callable[..., Nodes], again: bool) -> str:
    """The second node dies; if ``again``, a new one takes its place, else the first is alone."""
    nodes = make(group=2, nnodes="2" if again else "1:2", max_restarts=3, env=NEW_NODES)
    for host in HOSTS:
        nodes.start(host)
    nodes.wait_for_step(DIES_AFTER)
    nodes.network.kill(SECOND)
    nodes.ended(SECOND, TIMEOUT_S)
    if again:
        nodes.start(SECOND)
    for host in HOSTS if again else (FIRST,):
        if code := nodes.ended(host, TRAINING_S):
            raise Wrong(f"{host} ended with {code}\n{nodes.logs()}")
    later = [x for x in nodes.losses() if x.restart]
    begin, size = min(x.step for x in later), {x.size for x in later}
    if (begin - 1) % EVERY or begin < DIES_AFTER - EVERY or size != {4 if again else 2}:
        raise Wrong(f"it went on at step {begin}, on {size} ranks\n{nodes.logs()}")
    off = nodes.check_losses(size.pop() * (STEPS - begin + 1))
    return f"went on at step {begin}, losses off by {off:.1e}"


SCENARIOS: dict[str, Callable[[Callable[..., Nodes]], str]] = {
    "mesh (2, 2)": partial(equal_losses, group=2),
    "mesh (1, 4), interface named": partial(equal_losses, group=4, by_interface=True),
    "second node killed": partial(death, dies=SECOND, how="kill"),
    "first node killed": partial(death, dies=FIRST, how="kill"),
    "second node cut off": partial(death, dies=SECOND, how="cut_off"),
    "restart on two nodes": partial(restart, again=True),
    "restart on one node": partial(restart, again=False),
}


@contextlib.contextmanager
def fresh_nodes() -> Iterator[Callable[..., Nodes]]:
    """Makes ``Nodes`` in a network and a folder of their own, from the fields of ``Training``."""
    with Hosts() as network, tempfile.TemporaryDirectory(prefix="paradyse-nodes-") as folder:
        yield lambda group, **how: Nodes(network, Training(folder, group, STEPS), **how)


def not_allowed() -> str:
    """Why no network can be made here; empty if one can."""
    try:
        with Hosts() as network:
            for host in HOSTS:
                subprocess.run(network.command(host, "true"), check=True, capture_output=True)
    except FileNotFoundError as e:
        return f"{e.filename} is not there: install iproute2 and util-linux"
    except subprocess.CalledProcessError as e:
        return f"{' '.join(e.cmd)}: {e.stderr.strip()}"
    except OSError as e:
        return str(e)
    return ""


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="scenarios whose name begins so")
    args = parser.parse_args()
    chosen = {n: s for n, s in SCENARIOS.items() if not args.only or n.startswith(tuple(args.only))}
    if not chosen:
        parser.error(f"--only {args.only}: the scenarios are {', '.join(SCENARIOS)}")
    if reason := not_allowed():
        print(f"no network namespaces may be made here ({reason}); run it as root", file=sys.stderr)
        return NOT_ALLOWED
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # networks are removed
    report, rows, wrong = Report("two_nodes"), [], 0
    for name, scenario in chosen.items():
        start = time.monotonic()
        try:
            with fresh_nodes() as make:
                found = scenario(make)
        except Wrong as e:
            wrong, found = wrong + 1, "**wrong**"
            print(f"{name}: {e}", file=sys.stderr)
        rows.append([name, f"{time.monotonic() - start:.0f}", found])
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    report.add(f"Two nodes of two ranks. Time-out of a collective: {TIMEOUT_S:g} s.")
    report.table(["scenario", "seconds in all", "found"], rows)
    report.at_most(f"scenarios of {len(rows)} that went wrong", wrong, 0)
    report.write(args.out, "four processes of one thread")
    return int(report.missed)


if __name__ == "__main__":
    sys.exit(main())
