"""Runs a function on several local ranks: processes that share a group, and report back.

``run_ranks("package.module:function", 2, {...})`` starts one process a rank, joins them (gloo on
CPUs, NCCL on GPUs), and calls ``function(rank, **arguments)`` on each. What the ranks report comes
to the caller as it is sent. The first rank to fail ends the others, by their process ids, and so
does a time-out; if the caller itself is killed, its ranks see their pipe close and leave.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import multiprocessing.connection
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paradyse.cli import links

DEVICES = ("auto", "cpu", "cuda")
"""What ``choose_device`` may be asked for."""
RANKS, TIMEOUT_S = 2, 1800.0
"""Where ``--ranks`` and ``--timeout`` are not given."""
RANKS_PER_CORE = 4
"""CPU ranks beyond this many a core only wait for each other."""
GRACE_S = 3.0
"""How long the other ranks may take to finish after one has failed."""
LOG_TAIL = 4_000
"""Characters of a rank's own output that a failure quotes."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""What torch reads settings of its CUDA allocator from, its present name first."""
EXPANDABLE = "expandable_segments:True"
"""Blocks that grow in place: where lengths vary, a cache of blocks of fixed sizes leaves gaps that
no later length fits into."""


class RanksFailed(RuntimeError):
    """A rank raised, died, or nothing was heard in time. The text has the rank's traceback."""


@dataclass(frozen=True)
class Rank:
    """What a rank's function is given first: its place, and how to report."""

    rank: int
    size: int
    device: str
    """``cpu`` or ``cuda``; on CUDA the rank's device is already the current one."""
    send: Callable[[Any], None]
    """Hands the caller a value that pickles. It does not wait for it to be read."""

    def report(self, value: Any) -> None:
        """Sends ``value`` from rank 0; the other ranks have the same to tell."""
        if self.rank == 0:
            self.send(value)


@dataclass
class _Process:
    """One rank as its parent sees it."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    log: Path
    ended: str = ""
    """``result``, ``refusal``, ``failure`` or ``death``; empty while it runs."""
    value: Any = None
    """What it returned, or how it failed."""


@dataclass(frozen=True)
class Setting:
    """How ranks run: what is common to all of them."""

    device: str = "cpu"
    timeout_s: float = TIMEOUT_S
    """For the whole call."""
    silence_s: float = 600.0
    """For any rank to report anything."""
    verbose: bool = False
    """Rank 0 writes to this process's standard error, for logs; else to a file."""
    env: Mapping[str, str] = field(default_factory=dict)
    rate: float | None = None
    """Bits per second that each rank may send, by ``links``; None: what the machine does."""


def num_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_device(asked: str, num_ranks: int) -> str:
    """``cpu`` or ``cuda`` for ``num_ranks`` ranks.

    Args:
        asked: ``auto`` takes GPUs where there is one for every rank.
    Raises:
        ValueError: not enough GPUs, or far more ranks than cores.
    """
    if asked != "cpu":
        import torch

        gpus = torch.cuda.device_count()
        if gpus >= num_ranks:
            return "cuda"
        if asked == "cuda":
            raise ValueError(
                f"--device cuda: {num_ranks} ranks need as many GPUs, and there are {gpus}; "
                f"use --ranks {gpus} or --device cpu"
                if gpus
                else "--device cuda: torch sees no GPU; use --device cpu"
            )
    limit = RANKS_PER_CORE * num_cores()
    if num_ranks > limit:
        raise ValueError(
            f"--ranks {num_ranks}: at most {limit} CPU ranks are started on the {num_cores()} "
            f"cores here ({RANKS_PER_CORE} a core); use fewer"
        )
    return "cpu"


def run_ranks(
    target: str,
    num_ranks: int,
    arguments: Mapping[str, Any],
    setting: Setting,
    on_report: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """``target(rank, **arguments)`` on ``num_ranks`` ranks; the results in their order.

    Args:
        target: ``package.module:function``; imported by the ranks.
        arguments: anything that pickles; equal on all ranks.
        on_report: called here with (rank, value) for everything that a rank sends.
    Raises:
        RanksFailed: a rank raised or died, or the time-outs of ``setting`` passed.
        ValueError: a rank was given what this package refuses, in its words; links of the rate of
            ``setting`` cannot be made.
    """
    with (
        links.linked(num_ranks, setting.rate) as network,
        tempfile.TemporaryDirectory(prefix="paradyse-ranks-") as folder,
    ):
        ranks: list[_Process] = []
        try:
            for r in range(num_ranks):
                ranks.append(_start(r, num_ranks, Path(folder), setting, network))
            for rank in ranks:
                with contextlib.suppress(OSError):  # it has died: reading says so
                    rank.pipe.send((target, dict(arguments)))
            _collect(ranks, setting, on_report or (lambda rank, value: None))
        finally:
            _end(ranks)
    return [rank.value for rank in ranks]


def run_as_asked(
    args: argparse.Namespace,
    target: str,
    arguments: Mapping[str, Any],
    on_report: Callable[[Any], None] | None = None,
    num_ranks: int | None = None,
    rate: float | None = None,
) -> list[Any]:
    """``run_ranks`` of ``target`` and ``arguments`` as the command line asks; it raises what that,
    ``choose_device`` and ``collectives.timeout`` raise.

    Args:
        args: with ``ranks``, ``device``, ``timeout`` (s) and ``verbose``. Ranks may be silent that
            long: between two reports may lie all that they compile, or all they do.
        on_report: called with everything that a rank sends.
        num_ranks: other than ``args.ranks``.
        rate: of ``Setting``.
    """
    from paradyse.distributed import collectives

    collectives.timeout()
    device = choose_device(args.device, args.ranks)
    setting = Setting(device, args.timeout, args.timeout, args.verbose, rate=rate)
    hear = on_report or (lambda value: None)
    return run_ranks(
        target, num_ranks or args.ranks, arguments, setting, lambda rank, value: hear(value)
    )


def choose_links(args: argparse.Namespace, device: str) -> tuple[float | None, str]:
    """Bits per second that each rank may send, None for no limit, and a line that tells of it.

    Args:
        args: with ``ranks``; ``link`` in bits per second, ``like`` as ``flops_per_byte`` takes it,
            None where not given; ``usual``, a default for ``like`` where links can be limited.
        device: of the ranks.
    Raises:
        ValueError: links cannot be limited, yet are to be; an unknown name.
    """
    from paradyse.offline.devices import flops_per_byte

    if args.ranks == 1:
        for flag in ("link", "like"):
            if getattr(args, flag):
                raise ValueError(f"--{flag} is of links between ranks: give --ranks 2 or more")
        return None, "no links"
    why = links.why_not() if device == "cpu" else "these are GPUs"
    like = args.like or ("" if args.link or why else args.usual)
    if why and (args.link or args.like):
        flag = f"--like {like}" if like else f"--link {links.format_rate(args.link)}"
        raise ValueError(f"{flag}: links cannot be limited here: {why}; leave it out")
    if args.link:
        return args.link, f"links: {links.format_rate(args.link)} each"
    if not like:
        cheap = "; where they are slow, plans differ more" if device == "cpu" else ""
        return None, f"links: as they are{f' ({why}{cheap})' if args.usual and why else ''}"
    ratio = flops_per_byte(like)
    at_once = min(args.ranks, num_cores())  # more would take turns, and each see a time of its own
    (flops, *_) = run_ranks("paradyse.cli.rank_jobs:matmul_flops", at_once, {}, Setting(device))
    flops *= at_once / args.ranks
    rate = 8 * flops / ratio
    return rate, (
        f"links: {links.format_rate(rate)} each, so that ranks of {flops / 1e9:.0f} Gflop/s have "
        f"the {ratio:,.0f} operations per byte sent of {like}"
    )


def environment(rank: int, size: int, setting: Setting) -> dict[str, str]:
    """Variables that the process of ``rank`` of ``size`` starts with; the user's own stay, but for
    those of ``setting``."""
    env = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    if not any(name in env for name in ALLOCATOR_VARIABLES):
        env[ALLOCATOR_VARIABLES[0]] = EXPANDABLE
    share = str(max(1, num_cores() // size))
    env.setdefault("OMP_NUM_THREADS", share)
    env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", share)
    if setting.rate is not None and size > 1:
        env["GLOO_SOCKET_IFNAME"] = links.INTERFACE
    elif sys.platform == "linux":  # ranks are local: the host's name need not resolve
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env.setdefault("PYTHONHASHSEED", "0")  # what goes through a set does so alike on all ranks
    env.update(setting.env)
    # Whatever lies in the current folder is not this program's to import, nor its children's.
    env["PYTHONSAFEPATH"] = "1"
    return env


def _start(
    rank: int, size: int, folder: Path, setting: Setting, network: links.Network | None
) -> _Process:
    mine, theirs = multiprocessing.connection.Pipe()
    log = folder / f"{rank}.log"
    command = [sys.executable, "-m", "paradyse.cli.launch", str(theirs.fileno()), setting.device]
    command.append(str(folder / "store"))
    if network is not None:
        command = network.command(links.host_of(rank), *command)
    with open(log, "wb") as file:
        visible = setting.verbose and rank == 0
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2 if visible else file,  # what machines read is ours alone
            stderr=None if visible else subprocess.STDOUT,
            env=environment(rank, size, setting),
            start_new_session=True,  # Ctrl-C is ours to handle, and a rank's helpers end with it
        )
    theirs.close()
    return _Process(process, mine, log)


def _collect(
    ranks: list[_Process], setting: Setting, on_report: Callable[[int, Any], None]
) -> None:
    """Reads until all ranks are done, or raises for the first failure."""
    start = heard = time.monotonic()
    failed: list[int] = []
    deadline = start + setting.timeout_s
    while waiting := [r for r in ranks if not r.ended]:
        until = min(deadline, heard + setting.silence_s)
        ready = multiprocessing.connection.wait(
            [r.pipe for r in waiting], max(0.0, until - time.monotonic())
        )
        if not ready:
            break
        heard = time.monotonic()
        for i, rank in enumerate(ranks):
            if rank.pipe not in ready:
                continue
            kind, value = _receive(rank)
            if kind == "report":
                on_report(i, value)
                continue
            rank.ended, rank.value = kind, value
            if kind != "result":
                failed.append(i)
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failed:
        # A rank tells before it goes, so the first is the cause; but one that died told nothing,
        # and the others may have noticed before its end was seen here.
        i = min(failed, key=lambda r: ranks[r].ended != "death")
        if ranks[i].ended == "refusal":
            raise ValueError(ranks[i].value)
        raise RanksFailed(f"rank {i} of {len(ranks)} {ranks[i].value}{_output(ranks[i])}")
    if waiting:
        after = time.monotonic() - start
        why = (
            f"not finished in {setting.timeout_s:.0f} s"
            if after >= setting.timeout_s
            else f"no sign of life for {setting.silence_s:.0f} s"
        )
        raise RanksFailed("\n".join([f"{why}; the ranks were at", *_stacks(ranks)]))


def _receive(rank: _Process) -> tuple[str, Any]:
    try:
        return rank.pipe.recv()
    except (EOFError, OSError):
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(GRACE_S)
        code = rank.process.returncode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = "; out of memory is the usual reason" if name == "SIGKILL" else ""
            return "death", f"was ended by signal {name}{hint}"
        return "death", f"ended early, exit code {code}"


def _output(rank: _Process) -> str:
    text = rank.log.read_text(errors="replace").strip()
    return f"\nits output:\n{text[-LOG_TAIL:]}" if text else ""


def _stacks(ranks: list[_Process]) -> list[str]:
    """The Python stacks of the ranks that have not returned, by faulthandler's signal."""
    parts = []
    for i, rank in enumerate(ranks):
        if rank.ended == "result":
            continue
        size = rank.log.stat().st_size
        if rank.process.poll() is None:
            rank.process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
        parts.append(f"rank {i}:\n{rank.log.read_text(errors='replace')[size:].rstrip()}")
    return parts


def _end(ranks: list[_Process]) -> None:
    """Ends what still runs; each rank leads a process group of its own helpers."""
    for rank in ranks:
        if rank.ended == "result":
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(GRACE_S)
        if rank.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
        rank.pipe.close()


def _main(fd: int, device: str, store: str) -> int:
    """A rank's life: join the group, call the function, send what it returns."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    pipe = Connection(fd)
    lock = threading.Lock()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def send(kind: str, value: Any) -> None:
        with lock:
            pipe.send((kind, value))

    try:
        target, arguments = pipe.recv()
        threading.Thread(target=_leave_with_the_parent, args=(pipe,), daemon=True).start()
        place = Rank(rank, size, device, lambda value: send("report", value))
        _join(rank, size, device, store)
        send("result", pkgutil.resolve_name(target)(place, **arguments))
    except BaseException as e:
        told = getattr(e, "inner_exception", e)  # Dynamo's own is around an error of the backend
        with contextlib.suppress(OSError):
            if _is_refusal(told):
                send("refusal", str(told))
            else:
                send("failure", f"failed:\n{traceback.format_exc().rstrip()}")
        return 1
    return 0


def _is_refusal(error: BaseException) -> bool:
    """Whether this package raised ``error`` itself, for people to read."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("paradyse.")
    return ours and isinstance(error, ValueError | NotImplementedError)


def _leave_with_the_parent(pipe: Connection) -> None:
    """The parent sends nothing more: the end of the pipe is the end of the parent."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    os._exit(1)


def _join(rank: int, size: int, device: str, store: str) -> None:
    import torch
    import torch.distributed as dist

    from paradyse.distributed import collectives

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if device == "cuda":
        torch.cuda.set_device(rank)
    if size > 1:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=collectives.timeout(),
            device_id=torch.device("cuda", rank) if device == "cuda" else None,
        )


if __name__ == "__main__":
    code = _main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's own way out: a failed rank's group would wait for the others there.
    os._exit(code)
