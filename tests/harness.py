"""Runs a function on several ranks, each a process of its own in one gloo group.

``run_ranks(fn, 2, *args)`` starts fresh processes; ``RankPool`` (the fixtures ``pool1`` to
``pool4`` and ``ranks``) keeps them for the next call, which makes many small cases cheap. Either
way ``fn`` is a function of a test module, called on every rank with the same arguments; it finds
its place by ``torch.distributed``. A failure on any rank and a hang both fail the call in bounded
time, with the traceback of the rank that raised and the Python stacks of those that did not return.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

WARNING_FILTERS: list[tuple[Any, ...]] = []
"""Arguments of ``warnings.filterwarnings`` that hold on the ranks; conftest copies pytest's own."""

PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed",
    "transformers.models.llama.modeling_llama",
]
"""Imported once, in the process that ranks are forked from."""

START_METHOD = "spawn" if torch.cuda.is_available() else "forkserver"
"""From a server that is forked, a rank starts in milliseconds, and without pytest's threads and
state; but what is imported asks how many GPUs there are, after which a fork cannot use CUDA."""

START_S = 120.0
"""How long imports and joining the group may take; not part of a call's own time."""
GRACE_S = 5.0
"""How long the other ranks may take to finish after one has failed."""
PATIENCE = float(os.environ.get("PATIENCE", "1"))
"""Factor of all time-outs, for a machine that is busy with other work."""
MOST_THREADS = 48
"""Of a rank that stays for the next test. Each of gloo's groups has threads that look for messages
a hundred times a second, for as long as the process lives."""
LOG_TAIL = 8_000
"""Characters of a rank's own output that a failure quotes."""


@dataclass(frozen=True)
class RankError:
    """An exception that a rank raised."""

    type_name: str
    text: str
    traceback: str


class RankFailure(AssertionError):
    """At least one rank raised, died or did not return in time. The text says all there is."""

    def __init__(self, text: str, errors: dict[int, RankError], timed_out: bool) -> None:
        super().__init__(text)
        self.errors = errors
        """Rank -> what it raised. A rank that died or hung is not in it."""
        self.timed_out = timed_out


class RankPool:
    """Ranks that stay: ``nproc`` processes in one group, torch and transformers imported.

    Every call starts from a fresh Dynamo, ``torch.manual_seed(0)`` and default dtype float32. What
    else a function leaves behind in its process stays there: use ``run_ranks`` where that matters.
    After a failure the processes are replaced.

    Args:
        nproc: number of ranks.
        pg_timeout_s: time-out of the group's own collectives.
        init: False leaves it to the function to make a process group; RANK, WORLD_SIZE, LOCAL_RANK,
            MASTER_ADDR and MASTER_PORT are not set then.
    """

    def __init__(self, nproc: int, *, pg_timeout_s: float = 300.0, init: bool = True) -> None:
        self.nproc = nproc
        self._pg_timeout_s = pg_timeout_s
        self._init = init
        self._processes: list[Any] = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """``fn(*args)`` on every rank; the results in the order of ranks.

        Arguments and results travel by pickle; ``fn`` by module and name.

        Raises:
            RankFailure: a rank raised, died, or did not return within ``timeout_s``.
        """
        try:
            self.start()
            return self._call(fn, args, timeout_s)
        except BaseException:  # an interrupt too leaves ranks in an unknown state
            self.kill()
            raise

    def start(self) -> None:
        """Starts the processes, unless they are there, and waits until all have joined."""
        if not self._processes:
            self._start()
            self._call(_nothing, (), START_S)

    @property
    def processes(self) -> list[Any]:
        """Those of a pool that was started, by rank."""
        return list(self._processes)

    def renew(self) -> None:
        """Ends ranks that have more than ``MOST_THREADS`` (on Linux); the next call starts new
        ones."""
        tasks = [Path(f"/proc/{process.pid}/task") for process in self._processes]
        if any(len(list(t.iterdir())) > MOST_THREADS for t in tasks if t.exists()):
            self.close()

    def close(self) -> None:
        """Lets the ranks leave their group and end; kills those that do not."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
        deadline = time.monotonic() + GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends the processes at once; the next call starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        context = multiprocessing.get_context(START_METHOD)
        if START_METHOD == "forkserver":
            context.set_forkserver_preload(PRELOAD)
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        for rank in range(self.nproc):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.nproc, theirs, str(self._folder), self._pg_timeout_s, self._init),
                name=f"rank{rank}",
            )
            with _no_main():
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        timeout_s *= PATIENCE
        task = (sys.path, WARNING_FILTERS, timeout_s, pickle.dumps((fn, args)))
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has died: reading says so below
                pipe.send(task)
        results: dict[int, Any] = {}
        errors: dict[int, RankError] = {}
        died: dict[int, int | None] = {}
        deadline = time.monotonic() + timeout_s
        timed_out = False
        while waiting := self._waiting(results, errors, died):
            left = deadline - time.monotonic()
            ready = multiprocessing.connection.wait(
                [self._pipes[r] for r in waiting], max(left, 0.0)
            )
            if not ready:
                timed_out = not (errors or died)
                break
            for rank in waiting:
                if self._pipes[rank] not in ready:
                    continue
                try:
                    ok, payload = self._pipes[rank].recv()
                except (EOFError, OSError):
                    self._processes[rank].join(GRACE_S)
                    died[rank] = self._processes[rank].exitcode
                else:
                    if ok:
                        results[rank] = pickle.loads(payload)
                    else:
                        errors[rank] = payload
            if errors or died:  # the others may now wait for ever for the one that failed
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if not (errors or died or timed_out):
            return [results[r] for r in range(self.nproc)]
        waiting = self._waiting(results, errors, died)
        raise RankFailure(
            self._describe(errors, died, waiting, timeout_s if timed_out else None),
            errors,
            timed_out,
        )

    def _waiting(self, *done: dict[int, Any]) -> list[int]:
        return [r for r in range(self.nproc) if not any(r in d for d in done)]

    def _describe(
        self,
        errors: dict[int, RankError],
        died: dict[int, int | None],
        waiting: list[int],
        timeout_s: float | None,
    ) -> str:
        """The report, with the stacks of the ranks that have not returned."""
        marks = {rank: len(self._log(rank)) for rank in waiting}
        for rank in waiting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        if waiting:
            time.sleep(0.5)  # for the signal handlers to write
        parts = []
        if timeout_s is not None:
            parts.append(f"no result from rank {_list(waiting)} of {self.nproc} in {timeout_s:g} s")
        for rank, error in sorted(errors.items()):
            parts.append(f"rank {rank} of {self.nproc} raised\n{error.traceback.rstrip()}")
        for rank, code in sorted(died.items()):
            parts.append(f"rank {rank} of {self.nproc} died, exit code {code}")
        for rank in waiting:
            stacks = self._log(rank)[marks[rank] :]
            parts.append(f"rank {rank} has not returned; it is at\n{stacks.rstrip()}")
        for rank in range(self.nproc):
            log = self._log(rank)[: marks.get(rank)].strip()
            if log:
                parts.append(f"output of rank {rank}\n{log[-LOG_TAIL:]}")
        return "\n\n".join(parts)

    def _log(self, rank: int) -> str:
        assert self._folder is not None
        path = self._folder / f"{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""


def run_ranks(
    fn: Callable[..., Any],
    nproc: int,
    *args: Any,
    timeout_s: float = 60.0,
    pg_timeout_s: float = 300.0,
    init: bool = True,
) -> list[Any]:
    """``fn(*args)`` on ``nproc`` fresh processes; arguments and errors as of ``RankPool``."""
    with RankPool(nproc, pg_timeout_s=pg_timeout_s, init=init) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s)


def _nothing() -> None:
    """The first call of every pool: it returns once all ranks are there."""


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


@contextlib.contextmanager
def _no_main() -> Any:
    """Keeps multiprocessing from importing pytest's main module again in every rank."""
    main = sys.modules["__main__"]
    saved = {k: main.__dict__.pop(k) for k in ("__file__", "__spec__") if k in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(saved)


def _serve(rank: int, size: int, pipe: Any, folder: str, pg_timeout_s: float, init: bool) -> None:
    """One rank: takes functions from ``pipe`` until an empty message or its end."""
    log = open(Path(folder) / f"{rank}.log", "wb", buffering=0)
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)
    imported = 0
    while message := _receive(pipe):
        path, filters, timeout_s, payload = pickle.loads(message)
        # The last resort, should the parent be gone.
        faulthandler.dump_traceback_later(timeout_s + 10 * GRACE_S, exit=True, file=log)
        try:
            if init and not dist.is_initialized():
                _join_group(rank, size, folder, pg_timeout_s)
            sys.path[:] = path
            importlib.invalidate_caches()
            with warnings.catch_warnings():
                for f in filters:
                    warnings.filterwarnings(*f)
                fn, args = pickle.loads(payload)
                _reset()
                if len(sys.modules) > imported:  # those need not be searched before each call
                    gc.freeze()
                    imported = len(sys.modules)
                answer = (True, pickle.dumps(fn(*args)))
        except BaseException as e:  # SystemExit and friends are failures of the case as well
            answer = (False, RankError(type(e).__name__, str(e), traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)
        del answer
    if dist.is_initialized():
        dist.destroy_process_group()


def _receive(pipe: Any) -> bytes:
    try:
        return pipe.recv_bytes()
    except EOFError:
        return b""


def _join_group(rank: int, size: int, folder: str, timeout_s: float) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def _reset() -> None:
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    gc.collect()
