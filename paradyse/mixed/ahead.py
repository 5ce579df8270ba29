"""Plans made one batch ahead, by a process of its own, while the batch before trains.

The process is started from this file by a command, as ``multiprocessing`` would import the script
that trains once more; it needs neither torch nor a device.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any

from paradyse.mixed.step_plan import plan_step
from paradyse.mixed.ways import StepPlan, Way


class Ahead:
    """A process that plans batches; to be closed, or used in a ``with`` statement.

    Args:
        ways: of groups.
        num_ranks: of the axis.
        limit_s: seconds for each plan.
    """

    def __init__(self, ways: Sequence[Way], num_ranks: int, limit_s: float = 5.0):
        command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._asked = 0
        # Read at once: a process that waits until its answers are taken takes no questions.
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._reader = Thread(target=_read, args=(self._process.stdout, self._answers), daemon=True)
        self._reader.start()
        self._send((list(ways), num_ranks, limit_s))

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, lengths: Sequence[int]) -> None:
        """Have a batch planned whose sequences have ``lengths`` tokens. The arguments are checked
        when the plan is taken."""
        self._send([int(n) for n in lengths])
        self._asked += 1

    def use(self, ways: Sequence[Way]) -> None:
        """Plan by ``ways`` what is asked for from now on."""
        self._send(tuple(ways))

    def take(self) -> StepPlan:
        """The plan of the first batch asked for and not taken yet; waits until it is there.

        Raises:
            ValueError: as ``plan_step`` for that batch; or none was asked for.
            RuntimeError: the process is gone.
        """
        if not self._asked:
            raise ValueError("no batch is being planned: ask for one before its plan is taken")
        self._asked -= 1
        answer = self._answers.get()
        if answer is None:
            self._answers.put(None)
            raise RuntimeError(self._gone())
        if isinstance(answer, ValueError):
            raise answer
        assert isinstance(answer, StepPlan)
        return answer

    def close(self) -> None:
        """End the process; plans that were not taken are lost."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):  # it is gone, and what was to be sent with it
            self._process.stdin.close()
        self._process.terminate()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()

    def _send(self, what: object) -> None:
        assert self._process.stdin
        try:
            _write(self._process.stdin, what)
        except BrokenPipeError:
            raise RuntimeError(self._gone()) from None

    def _gone(self) -> str:
        return (
            f"the process that plans batches ended with exit code {self._process.wait()}; what it "
            "printed before says why"
        )


def serve() -> None:
    """Plan the batches that come in, until there are no more; ``Ahead`` is at the other end."""
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    ways, num_ranks, limit_s = pickle.load(asked)
    while True:
        try:
            lengths = pickle.load(asked)
        except EOFError:
            return
        if isinstance(lengths, tuple):
            ways = lengths
            continue
        answer: Any
        try:
            answer = plan_step(lengths, ways, num_ranks, limit_s)
        except ValueError as e:
            answer = e
        _write(answers, answer)


def _read(stream: IO[bytes], answers: SimpleQueue[Any]) -> None:
    """Hand on what comes from ``stream``, None at its end."""
    with contextlib.suppress(EOFError, pickle.UnpicklingError, OSError):
        while True:
            answers.put(pickle.load(stream))
    answers.put(None)


def _write(stream: IO[bytes], what: object) -> None:
    pickle.dump(what, stream)
    stream.flush()
