"""What the command line's ranks do: train, replay under each strategy, plan, verify, measure.

Every function here runs on all ranks, started by ``paradyse.cli.launch``; rank 0 reports. Each is
given its ``rank`` first; ``options`` are those of the backend, ``seed`` fixes the weights of a
model of ``size``, and ``make`` makes one, with equal weights on every rank.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paradyse.cli import models as integrations
from paradyse.cli.corpus import TextFile
from paradyse.cli.launch import Rank
from paradyse.cli.models import LlamaSize
from paradyse.cli.replay import Phase, batch_of, block_kinds, describe_plan, replay, wait_for_all
from paradyse.distributed.axis import resolve_axis
from paradyse.planning.explain import PlanReport
from paradyse.planning.machine import measure_machine
from paradyse.planning.nothing_fits import NothingFitsError
from paradyse.planning.profile_file import Profile
from paradyse.verification import VerifyReport

REPLAY_S = 60.0
"""No further round of the demo's replay begins after this long; the first is always whole."""
ALONE_S = 60.0
"""The one-process training that losses are checked against ends here, at the latest."""
LEARNING_RATE, MOMENTUM = 0.03, 0.9
"""Plain SGD: its steps are linear in the gradient, so rounding errors stay rounding errors, where
Adam's division raises those of near-zero gradients to full steps. At this rate a difference of 1e-7
in the weights stays 1e-7 in the losses of 300 steps; at 0.1 it grows to 1e-2."""


@dataclass(frozen=True)
class StepDone:
    """One training step."""

    step: int
    name: str
    """Of the file."""
    num_tokens: int
    plan: str
    """In words."""
    loss: float
    time_s: float
    peak_bytes: int
    """Of the process, or of the device's memory on CUDA, during this step."""


def _reset_peak(device: str) -> None:
    """Begin anew what ``peak_bytes`` tells."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    # Not Linux, or not allowed: the peak is then that of the whole run.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: str) -> int:
    """Peak memory of ``device`` ("cuda"), or of the process's resident set ("cpu")."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _batch(file: TextFile, device: str) -> dict[str, Tensor]:
    return batch_of(torch.tensor([file.tokens()]), device)


class _Training:
    """A Llama and its optimizer.

    Args:
        options: of the backend; None: the model runs eagerly.
        sharded: weights at rest 1/p on each rank.
    """

    def __init__(
        self,
        rank: Rank,
        size: LlamaSize,
        seed: int,
        options: Mapping[str, Any] | None,
        sharded: bool = False,
    ) -> None:
        self.rank, self.model = rank, integrations.make_llama(size, seed).to(rank.device)
        if sharded and rank.size > 1:
            import paradyse

            paradyse.shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), LEARNING_RATE, MOMENTUM)
        self.run: torch.nn.Module = self.model
        if options is not None:
            self.run = torch.compile(self.model, backend="paradyse", options=dict(options))

    def step(self, file: TextFile) -> tuple[float, float]:
        """The loss, and seconds until all ranks are done."""
        batch = _batch(file, self.rank.device)
        start = time.perf_counter()
        loss = self.run(**batch).loss
        loss.backward()
        # A plain recipe that keeps a small model on a steady course.
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        value = float(loss.detach())
        wait_for_all(self.rank)
        return value, time.perf_counter() - start


def train(
    rank: Rank,
    size: LlamaSize,
    files: Sequence[TextFile],
    seed: int,
    options: Mapping[str, Any],
    replay_at: Sequence[int] = (),
    rounds: int = 0,
    strategies: Sequence[str] = (),
    sharded: bool = False,
) -> dict[str, Any]:
    """Trains on ``files``, one a step, with the plan left to the backend; then replays some.

    Args:
        replay_at: indices of files to run again under each of ``strategies`` and the plans that
            training used, ``rounds`` times, interleaved.
        sharded: weights at rest 1/p on each rank.
    Returns:
        Peak bytes of this rank, and its counters.
    """
    import paradyse

    training = _Training(rank, size, seed, options, sharded)
    compiled = training.run
    highest = 0
    plans: list[str] = []
    kinds: list[str] = []
    rank.report(Phase("training; a plan used for the first time is compiled first", len(files)))
    for i, file in enumerate(files):
        _reset_peak(rank.device)
        loss, time_s = training.step(file)
        plans.append(paradyse.stats(compiled).plan_per_length.get(file.num_tokens, ""))
        kinds = kinds or block_kinds(compiled, file.num_tokens)
        peak = peak_bytes(rank.device)
        highest = max(highest, peak)
        in_words = describe_plan(plans[-1], kinds)
        rank.report(StepDone(i, file.name, file.num_tokens, in_words, loss, time_s, peak))
    counters = paradyse.stats(compiled)
    if replay_at and rounds:
        trace = [(i, _batch(files[i], rank.device), plans[i]) for i in replay_at]
        replay(rank, training.model, trace, strategies, rounds, options, REPLAY_S)
    return {"peak_bytes": highest, "stats": counters}


def train_alone(rank: Rank, size: LlamaSize, files: Sequence[TextFile], seed: int) -> None:
    """The same training in one process and eagerly: what ``train`` has to reproduce.

    ``files`` are as there. No step begins after ``ALONE_S``.
    """
    training = _Training(rank, size, seed, None)
    began = time.monotonic()
    for i, file in enumerate(files):
        if i and time.monotonic() - began > ALONE_S:
            break
        loss, time_s = training.step(file)
        rank.send(StepDone(i, file.name, file.num_tokens, "eager", loss, time_s, 0))


def _random_batch(model: torch.nn.Module, batch: int, seq_len: int, device: str) -> dict[str, Any]:
    return batch_of(torch.randint(integrations.vocabulary_of(model), (batch, seq_len)), device)


def plan(
    rank: Rank,
    make: Callable[[], torch.nn.Module],
    batch: int,
    lengths: Sequence[int],
    sharded: bool,
    options: Mapping[str, Any],
) -> list[PlanReport | str]:
    """A report for ``batch`` sequences of each of ``lengths`` tokens, or why no plan fits; with
    weights ``sharded`` over the ranks or whole.

    One forward of few tokens makes the graph known.
    """
    import paradyse

    model = make().to(rank.device).train()
    if sharded:
        paradyse.shard(model)
    compiled = torch.compile(model, backend="paradyse", options=dict(options))
    compiled(**_random_batch(model, batch, 16, rank.device))

    def report(length: int) -> PlanReport | str:
        try:
            return paradyse.explain(compiled, batch, length)
        except NothingFitsError as e:
            return str(e)

    return [report(n) for n in lengths]


def verify(
    rank: Rank,
    make: Callable[[], torch.nn.Module],
    batch: int,
    seq_len: int,
    options: Mapping[str, Any],
) -> VerifyReport:
    """``paradyse.verify`` on ``batch`` sequences of ``seq_len`` random tokens."""
    import paradyse

    model = make().to(rank.device)
    report: VerifyReport = paradyse.verify(
        model, _random_batch(model, batch, seq_len, rank.device), dict(options)
    )
    return report


def profile(
    rank: Rank,
    make: Callable[[], torch.nn.Module],
    sharded: bool,
    arguments: Mapping[str, Any],
) -> Profile:
    """``paradyse.profile`` of a model with random weights; rank 0 reports how far it is.

    Args:
        sharded: weights at rest 1/p on each rank.
        arguments: of ``paradyse.profile``, other than the model.
    """
    import paradyse

    model = make().to(rank.device)
    if sharded:
        paradyse.shard(model)
    found: Profile = paradyse.profile(model, progress=rank.send, **arguments)
    return found


def matmul_flops(rank: Rank) -> float:
    """Operations per second of a matmul in float32 on the slowest rank, all of them at work;
    ``rank`` is one of them."""
    machine = measure_machine(resolve_axis(), device=torch.device(rank.device))
    return machine.matmul_flops


def sum_of_ranks(rank: Rank) -> float:
    """A collective of the smallest kind, to see whether ``rank`` reaches the others."""
    total = torch.ones(1, device=rank.device) * rank.rank
    if rank.size > 1:
        dist.all_reduce(total)
    return float(total)
