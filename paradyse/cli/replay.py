"""What the ranks of ``demo`` and ``bench`` replay: a trace of lengths under every choice, in turns.

Rank 0 reports: first what ``auto`` means at each length, then memory, then the time of every run.
Throughout, ``rank`` is this one, ``options`` are those of the backend, and ``strategies`` what is
run beside ``auto``, ``rounds`` times each.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paradyse.cli import models as integrations
from paradyse.cli.launch import Rank
from paradyse.cli.models import LlamaSize
from paradyse.config import AUTO, BLOCK_KINDS
from paradyse.distributed.failures import is_out_of_memory
from paradyse.planning.explain import count_names
from paradyse.profiling.steps import peak_beyond, static_bytes
from paradyse.strategies import canonical_strategy
from paradyse.types import HEAD, LEVERS, Plan, Point, Workload

GIVEN = "the function given as option 'plan': "
"""How errors about a plan begin here; the function is ours, so it tells people nothing."""


@dataclass(frozen=True)
class Replayed:
    """One forward and backward of a file under a choice, everything compiled before."""

    choice: str
    index: int
    """Of the file in the trace."""
    num_tokens: int
    plan: str
    time_s: float


@dataclass(frozen=True)
class Held:
    """Memory of one forward and backward under a choice, gradients in place from the one before."""

    choice: str
    num_tokens: int
    peak_bytes: int
    """Weights and gradients included; of the rank that held most."""


@dataclass(frozen=True)
class Planned:
    """What ``auto`` means at a length."""

    num_tokens: int
    shares: dict[str, dict[str, float]]
    """Kind of block -> strategy -> share of those blocks."""


@dataclass(frozen=True)
class Phase:
    """What the ranks are at, for people."""

    text: str
    steps: int = 0
    """Reports that will follow; 0: unknown."""


@dataclass(frozen=True)
class Infeasible:
    """A strategy that cannot be the plan of this model, or for which memory is too short."""

    choice: str
    why: str


def batch_of(ids: Tensor, device: str) -> dict[str, Tensor]:
    """The arguments of a causal LM for the tokens ``ids`` [B, S], its labels too, on ``device``."""
    ids = ids.to(device)
    return {"input_ids": ids, "labels": ids}


def wait_for_all(rank: Rank) -> None:
    """Returns when all ranks, and the device of ``rank``, have come here."""
    if rank.device == "cuda":
        torch.cuda.synchronize()
    if rank.size > 1:
        dist.barrier()


def describe_plan(key: str, kinds: Sequence[str]) -> str:
    """A plan's key in words: one name where all blocks run alike, else attention and MLP apart.

    Args:
        key: as of ``Plan.key``.
        kinds: of the blocks, in the order of the key's names.
    """
    plan = Plan.of_key(key)
    pairs = list(zip(kinds, plan.strategies))
    of = {kind: [name for k, name in pairs if k == kind] for kind in BLOCK_KINDS}
    if len(set(of["attention"])) == 1:
        # A variant of other blocks has several names: say the one that their neighbours have.
        near = of["attention"][0]
        for kind in BLOCK_KINDS[1:]:
            same = canonical_strategy(kind, near)
            of[kind] = [near if canonical_strategy(kind, n) == same else n for n in of[kind]]
    texts = {kind: count_names(names) for kind, names in of.items() if names}
    words = ", ".join(f"{kind} {text}" for kind, text in texts.items())
    if len(set(texts.values())) == 1:
        words = next(iter(texts.values()))
    if plan.alone:
        return f"{words} on every rank"
    return f"{words}, head {plan.head}" if plan.head else words


def plan_shares(key: str, kinds: Sequence[str]) -> dict[str, dict[str, float]]:
    """Kind -> strategy -> its share, for a plan's ``key`` and the ``kinds`` of its blocks."""
    names: dict[str, list[str]] = {}
    for kind, point in zip(kinds, Plan.of_key(key).strategies):
        names.setdefault(kind, []).append(Point.parse(point).strategy)
    return {k: {n: of.count(n) / len(of) for n in of} for k, of in names.items()}


def lever_shares(key: str, kinds: Sequence[str]) -> dict[str, dict[str, float]]:
    """The same of levers: ``key`` and ``kinds`` as there; also of the head."""
    plan = Plan.of_key(key)
    used: dict[str, list[tuple[str, ...]]] = {HEAD: [tuple(plan.head.split("+"))]}
    for kind, point in zip(kinds, plan.strategies):
        used.setdefault(kind, []).append(Point.parse(point).levers)
    return {
        kind: {v: share for v in LEVERS if (share := sum(v in x for x in of) / len(of))}
        for kind, of in used.items()
    }


def block_kinds(compiled: torch.nn.Module, num_tokens: int) -> list[str]:
    """The kinds of the blocks of a ``compiled`` model that has run with ``num_tokens``."""
    import paradyse

    report = paradyse.explain(compiled, 1, num_tokens)
    return [b.kind for b in report.blocks if b.kind != HEAD]


Trace = Sequence[tuple[int, dict[str, Tensor], str]]
"""Index of the file, its batch, and the key of the plan that ``auto`` means for it ("": ask)."""


def _largest(rank: Rank, value: float) -> float:
    """Of all ranks."""
    answer = torch.tensor(value, dtype=torch.float64, device=rank.device)
    if rank.size > 1:
        dist.all_reduce(answer, dist.ReduceOp.MAX)
    return float(answer)


class _Choices:
    """One compiled model for all choices: its plan option is a function that says the current one.

    In every method ``known`` is the key of the plan that ``auto`` means, or "".
    """

    def __init__(self, rank: Rank, model: torch.nn.Module, options: Mapping[str, Any]) -> None:
        self.rank, self.model = rank, model
        self._current: Any = AUTO

        def plan(workload: Workload) -> Any:
            return self._current

        self.compiled: torch.nn.Module = torch.compile(
            model, backend="paradyse", options={**options, "plan": plan}
        )

    def _step(self, choice: str, batch: dict[str, Tensor], known: str) -> None:
        self._current = Plan.of_key(known) if choice == AUTO and known else choice
        self.compiled(**batch).loss.backward()

    def time_s(self, choice: str, batch: dict[str, Tensor], known: str) -> float:
        """Seconds of forward and backward, until all ranks are done."""
        wait_for_all(self.rank)
        start = time.perf_counter()
        self._step(choice, batch, known)
        wait_for_all(self.rank)
        time_s = time.perf_counter() - start
        self.model.zero_grad()
        return time_s

    def steady_s(self, choice: str, batch: dict[str, Tensor], known: str) -> float:
        """``time_s`` of a step in which no rank compiled anything: blocks that run together are
        compiled once their plan is used often."""
        import paradyse

        while True:
            before = paradyse.stats(self.compiled).pieces_compiled
            time_s = self.time_s(choice, batch, known)
            more = paradyse.stats(self.compiled).pieces_compiled - before
            if not _largest(self.rank, more):
                return time_s

    def peak_bytes(self, choice: str, batch: dict[str, Tensor], known: str) -> int:
        """The most that a rank holds in forward and backward, gradients in place."""
        step = partial(self._step, choice, batch, known)
        step()
        peak = static_bytes(self.model, training=True)
        peak += peak_beyond(batch["input_ids"].device, step)
        self.model.zero_grad()
        return int(_largest(self.rank, peak))


def _why_infeasible(error: Exception, num_tokens: int) -> str | None:
    """Why a strategy cannot be the plan of ``num_tokens``, by an ``error`` that all ranks raise;
    None: it says something else."""
    if isinstance(error, ValueError | NotImplementedError):
        return str(error).removeprefix(GIVEN)
    if is_out_of_memory(error):
        return f"a rank runs out of memory at {num_tokens} tokens"
    return None


def replay(
    rank: Rank,
    model: torch.nn.Module,
    trace: Trace,
    strategies: Sequence[str],
    rounds: int,
    options: Mapping[str, Any],
    limit_s: float = math.inf,
    watch_memory: bool = False,
) -> None:
    """Forward and backward of ``trace`` under every choice, after all of them are compiled.

    A strategy that turns out not to be feasible, or for which memory is too short, is reported as
    ``Infeasible`` and left out from then on; what was reported of it before does not count.

    Args:
        model: compiled here.
        limit_s: no further round begins after this long.
        watch_memory: also report the memory of each length under every choice, in steps of their
            own.
    """

    import paradyse

    send = rank.report
    under = _Choices(rank, model, options)
    by_length = sorted(trace, key=lambda t: t[1]["input_ids"].shape[1])
    of_training = any(known for *_, known in trace)
    send(Phase("compiling the plans that training used" if of_training else f"compiling {AUTO}"))
    for _, batch, known in by_length:
        under.time_s(AUTO, batch, known)
    kinds = block_kinds(under.compiled, by_length[0][1]["input_ids"].shape[1])
    keys = paradyse.stats(under.compiled).plan_per_length
    plans = {n: describe_plan(key, kinds) for n, key in keys.items()}
    for n, key in keys.items():
        send(Planned(n, plan_shares(key, kinds)))
    choices = [AUTO, *strategies]

    def attempt(work: Callable[..., Any], choice: str, batch: dict[str, Tensor], known: str) -> Any:
        """What ``work`` gives; None where ``choice`` is found not to be feasible, or was before."""
        if choice not in choices:
            return None
        n = batch["input_ids"].shape[1]
        try:
            return work(choice, batch, known)
        except Exception as e:  # on every rank alike
            why = None if choice == AUTO else _why_infeasible(e, n)
            if why is None:
                raise
        choices.remove(choice)
        model.zero_grad()
        send(Infeasible(choice, why))
        return None

    for choice in strategies:
        send(Phase(f"compiling {choice}"))
        # A short and a long one bring the variants and the graph of any length.
        for _, batch, known in (by_length[0], by_length[-1]):
            attempt(under.time_s, choice, batch, known)
    if watch_memory:
        distinct = {batch["input_ids"].shape[1]: (batch, known) for _, batch, known in by_length}
        send(Phase("memory", len(distinct) * len(choices)))
        for n, (batch, known) in distinct.items():
            for choice in [*choices]:
                if (peak := attempt(under.peak_bytes, choice, batch, known)) is not None:
                    send(Held(choice, n, peak))
    send(Phase("timing", rounds * len(trace) * len(choices)))
    gc.collect()
    began = time.monotonic()
    for r in range(rounds):
        # What ranks do next must not hang on their own clocks.
        if r and _largest(rank, time.monotonic() - began) > limit_s:
            break
        for index, batch, known in trace:
            n = batch["input_ids"].shape[1]
            # Another one goes first each time: what follows a neighbour's garbage is slower.
            for choice in choices[r % len(choices) :] + choices[: r % len(choices)]:
                if (time_s := attempt(under.steady_s, choice, batch, known)) is not None:
                    text = plans.get(n, "") if choice == AUTO else choice
                    send(Replayed(choice, index, n, text, time_s))


def bench(
    rank: Rank,
    size: LlamaSize,
    lengths: Sequence[int],
    seed: int,
    options: Mapping[str, Any],
    rounds: int,
    strategies: Sequence[str],
    sharded: bool = False,
) -> None:
    """Replays ``lengths`` with random tokens, and watches memory; nothing is trained. The model is
    of ``size``, its weights fixed by ``seed``, 1/p of them on each rank where they are ``sharded``.
    """
    import paradyse

    model = integrations.make_llama(size, seed).to(rank.device)
    if sharded and rank.size > 1:
        paradyse.shard(model)
    texts = [torch.randint(size.vocabulary, (1, n)) for n in lengths]
    trace = [(i, batch_of(ids, rank.device), "") for i, ids in enumerate(texts)]
    replay(rank, model, trace, strategies, rounds, options, watch_memory=True)
