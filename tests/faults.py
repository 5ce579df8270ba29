"""Ranks lost in the middle of things: the others fail in bounded time, and say where.

    python tests/faults.py                          # all points, at 2 and at 4 ranks
    python tests/faults.py --only save --ranks 2    # points whose name begins with "save"

At every point of ``fault_points.py`` one rank is killed (SIGKILL), or stopped (SIGSTOP), in a run
of its own: real processes in one gloo group, forked from this one, which has done the imports. The
collective time-out is a few seconds. Fails where a survivor does not end soon after it, is ended
by a signal, or does not name rank, message and block in its error.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from fault_points import POINTS, Loop, Place
from harness import PATIENCE
from scripts import Report, options_of

from paradyse.distributed.collectives import TIMEOUT_VARIABLE

LOSSES = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
TIMEOUT_S = 4.0 * PATIENCE
"""Of a collective."""
BOUND_S = TIMEOUT_S + 8.0 * PATIENCE
"""Survivors have ended so long after a rank was lost: one time-out, and the interpreter's end."""
START_S = 60.0 * PATIENCE
"""How long it may take until a rank is lost."""
POLL_S = 0.02
LAST_ERROR = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception): .*)$", re.MULTILINE)
NAMED = re.compile(r"CollectiveError: rank \d of \d: ")


@dataclass
class Outcome:
    """How the survivors of one case ended."""

    seconds: float = 0.0
    """From the loss of the rank to the end of the last survivor."""
    told: list[str] = field(default_factory=list)
    """What they raised; equal words once."""
    wrong: list[str] = field(default_factory=list)
    """What should not be."""


class Case:
    """One rank of ``size`` is lost at ``point`` as ``how`` says, the rank ``victim``."""

    def __init__(self, point: str, how: str, size: int, victim: int) -> None:
        self.point, self.how, self.size, self.victim = point, how, size, victim
        self.folder = Path(tempfile.mkdtemp(prefix="paradyse-fault-"))
        self.port = free_port()
        """Of the store that ranks meet at, which goes with rank 0."""
        self.pids: list[int] = []
        self.status: dict[int, int] = {}
        """Rank -> as ``os.waitpid`` gives it, of those that have ended or, the victim, stopped."""

    def run(self) -> Outcome:
        """Start the ranks, and wait for the survivors."""
        try:
            self.pids = [self._start(rank) for rank in range(self.size)]
            lost_after = self._wait({self.victim}, START_S)
            seconds = self._wait(set(range(self.size)), BOUND_S)
            return self._judge(lost_after is not None, seconds)
        finally:
            self._end()

    def _start(self, rank: int) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port))
            loss = LOSSES[self.how] if rank == self.victim else None
            become_rank(Place(rank, self.size, self.folder, loss), self.point)
        return pid

    def _wait(self, ranks: set[int], limit_s: float) -> float | None:
        """Seconds until all of ``ranks`` have ended or stopped; None if they do not in time."""
        start = time.monotonic()
        while time.monotonic() < start + limit_s:
            for rank in set(range(self.size)) - self.status.keys():
                pid, status = os.waitpid(self.pids[rank], os.WNOHANG | os.WUNTRACED)
                if pid:
                    self.status[rank] = status
            if ranks <= self.status.keys():
                return time.monotonic() - start
            time.sleep(POLL_S)
        return None

    def _judge(self, lost: bool, seconds: float | None) -> Outcome:
        out = Outcome(seconds if seconds is not None else BOUND_S)
        status = self.status.get(self.victim)
        if not lost or status is None or not (os.WIFSIGNALED(status) or os.WIFSTOPPED(status)):
            out.wrong.append("no rank was lost")
        said = set()
        for rank in set(range(self.size)) - {self.victim}:
            errors = LAST_ERROR.findall(self._log(rank))
            last = errors[-1] if errors else "nothing"
            said.add(shortened(last))
            out.wrong += [f"rank {rank} {what}" for what in self._faults(rank, last)]
        out.told = sorted(said)
        return out

    def _faults(self, rank: int, error: str) -> list[str]:
        status = self.status.get(rank)
        if status is None:
            return [f"hangs:\n{self._stack(rank)}"]
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            return [f"was ended by {name}:\n{self._log(rank)[-2000:]}"]
        says = POINTS[self.point].says
        if not NAMED.search(error) or not re.search(says, error):
            return [f"does not name what was lost ({says}):\n{self._log(rank)[-2000:]}"]
        return []

    def _stack(self, rank: int) -> str:
        size = len(self._log(rank))
        os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.5)
        return self._log(rank)[size:]

    def _log(self, rank: int) -> str:
        path = self.folder / f"{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _end(self) -> None:
        for rank, pid in enumerate(self.pids):
            status = self.status.get(rank)
            if status is None or os.WIFSTOPPED(status):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        shutil.rmtree(self.folder)


def become_rank(place: Place, point: str) -> None:
    """Be a rank, in a forked process, until its end: that of a program that raised."""
    log = os.open(place.folder / f"{place.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
    code = 0
    try:
        dist.init_process_group("gloo", rank=place.rank, world_size=place.size)
        POINTS[point].run(place)
    except BaseException:
        traceback.print_exc()
        code = 1
    # The interpreter's own way out, on which process groups are destroyed; the frames below this
    # one are the parent's.
    ctypes.pythonapi.Py_Exit(code)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def shortened(error: str) -> str:
    """``error`` without the words that all of them share, and addresses."""
    found = re.match(r"(\w+: )rank \d of (\d): (.*?) did not complete", error)
    return f"{found[1]}{found[3]}" if found else re.sub(r"\[[\d.]+\]:\d+", "[..]", error)[:160]


def warm_up() -> None:
    """Have what the ranks need imported: they are forked. Only without backward, as autograd's
    threads do not outlive a fork."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ[TIMEOUT_VARIABLE] = str(TIMEOUT_S)
    torch.set_num_threads(1)
    Loop(steps=0).forward()
    torch._dynamo.reset()
    gc.freeze()  # ranks need not search it at their end


def run(points: Sequence[str], sizes: Sequence[int], report: Report) -> int:
    """The number of cases in which something was wrong."""
    rows, wrong = [], []
    for (i, point), size in ((p, n) for p in enumerate(points) for n in sizes):
        for how in LOSSES:
            victim = (i + size - 1) % size
            outcome = Case(point, how, size, victim).run()
            what = "; ".join(outcome.told).replace("|", "/")
            rows.append([point, how, f"{victim} of {size}", f"{outcome.seconds:.1f}", what])
            verdict = "WRONG" if outcome.wrong else "ok"
            print(verdict, *rows[-1], *outcome.wrong, sep=" | ", file=sys.stderr, flush=True)
            wrong += [f"{point}, {how}, {size} ranks"] * bool(outcome.wrong)
    report.add(f"Survivors of a lost rank. Time-out of a collective: {TIMEOUT_S:g} s.")
    report.table(["point", "rank is", "rank", "seconds to the end", "others raise"], rows)
    report.at_most(f"cases of {len(rows)} that hang, abort or name nothing", len(wrong), 0)
    return len(wrong)


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="points whose name begins so")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="default: 2 4")
    args = parser.parse_args()
    points = [p for p in POINTS if args.only is None or p.startswith(tuple(args.only))]
    if not points:
        parser.error(f"--only {args.only}: the points are {', '.join(POINTS)}")
    warm_up()
    report = Report("faults")
    wrong = run(points, args.ranks, report)
    gc.unfreeze()
    report.write(args.out, f"{' or '.join(map(str, args.ranks))} processes of one thread")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
