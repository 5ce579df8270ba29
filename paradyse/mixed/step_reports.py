"""What a step of mixed lengths did: its groups, their sequences, and the seconds they took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paradyse.distributed.device_events import event_on
from paradyse.mixed.ways import StepPlan
from paradyse.planning.tables import Shown, text_table
from paradyse.planning.units import format_seconds

SHOWN = 6
"""Sequences of a group that a table names."""


@dataclass(frozen=True)
class GroupReport:
    """One group of one micro-batch, as a ``MixedReport`` has it.

    Times are in seconds, lengths in tokens; reading it never raises.

    Example:

        report = batches.explain(step)
        slowest = max(report.groups, key=lambda group: group.taken_s or group.predicted_s)
        print(slowest.ranks, slowest.lengths, slowest.predicted_s, slowest.taken_s)
    """

    micro_batch: int
    """From 0 on."""
    ranks: range
    """Of the axis."""
    way: str
    """The plan in words, as of ``Way.name``."""
    sequences: tuple[int, ...]
    """Indices into the dataset."""
    lengths: tuple[int, ...]
    """Tokens of each of ``sequences``."""
    predicted_s: float
    """Seconds of forward and backward, by the plan of the step."""
    taken_s: float | None = None
    """Seconds that they took on the slowest rank of the group; None: it had nothing to compute."""

    @property
    def degree(self) -> int:
        """Ranks of the group."""
        return len(self.ranks)


@dataclass(frozen=True)
class MixedReport(Shown):
    """One step of mixed lengths, equal on all ranks, as ``MixedBatches.explain`` gives it.

    Times are in seconds, lengths in tokens. ``str()`` is a table of the groups; reading it never
    raises.

    Example:

        report = batches.explain(step)
        print(report)
        print(report.num_tokens, "tokens:", report.predicted_s, "seconds, alone", report.static_s)
    """

    groups: tuple[GroupReport, ...]
    """In order of micro-batches, and of ranks within each."""
    predicted_s: float
    """Seconds of all micro-batches, by the plan: of each that of its slowest group."""
    taken_s: float | None = None
    """Seconds of the micro-batches of the rank whose took longest, with what the loop does besides
    backward, and without the sum of gradients over all ranks; None: it is not over."""
    static_s: Mapping[int, float] = field(default_factory=dict)
    """Degree -> seconds that groups of that degree alone were predicted to take; by
    ``MixedBatches.explain``."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(sum(g.lengths) for g in self.groups)

    def table(self) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
        """Title, header and rows, one for each group."""
        rows: list[tuple[str, ...]] = [
            (
                str(g.micro_batch + 1),
                in_words(g.ranks),
                str(g.degree),
                _named(g.sequences),
                _named(g.lengths),
                format_seconds(g.predicted_s),
                "-" if g.taken_s is None else format_seconds(g.taken_s),
            )
            for g in self.groups
        ]
        header = ("micro-batch", "ranks", "degree", "sequences", "tokens", "predicted", "taken")
        title = (
            f"{self.num_tokens:,} tokens in groups: predicted {format_seconds(self.predicted_s)}"
        )
        if self.taken_s is not None:
            title += f", taken {format_seconds(self.taken_s)}"
        return title, header, rows

    def __str__(self) -> str:
        title, header, rows = self.table()
        lines = [f"{title}\n{text_table(header, rows)}"]
        if self.static_s:
            best = min(self.static_s, key=lambda d: self.static_s[d])
            of = ", ".join(f"{d}: {format_seconds(s)}" for d, s in self.static_s.items())
            lines.append(f"one degree for all, predicted: {of}; the best is {best}")
        return "\n".join(lines)


def reports_of(
    plan: StepPlan, indices: Sequence[int] = (), lengths: Sequence[int] = ()
) -> Iterator[GroupReport]:
    """The groups of ``plan`` before they are computed.

    Args:
        indices: into the dataset, of the batch's sequences; by default 0, 1, ..
        lengths: of each in tokens.
    """
    for m, micro in enumerate(plan.micro_batches):
        for g in sorted(micro.groups, key=lambda g: g.first_rank):
            named = tuple(indices[i] if indices else i for i in g.sequences)
            tokens = tuple(lengths[i] for i in g.sequences)
            yield GroupReport(m, g.ranks, g.way.name, named, tokens, g.time_s)


def with_times(
    plan: StepPlan,
    indices: Sequence[int],
    lengths: Sequence[int],
    told: Sequence[Sequence[tuple[int, float]]],
) -> MixedReport:
    """The report of a step that is over.

    Args:
        plan, indices, lengths: as of ``reports_of``.
        told: by each rank, of its micro-batches: number of the group among those of ``plan`` in
            their order there, and seconds.
    """
    taken = dict[int, float]()
    for number, seconds in (of for rank in told for of in rank):
        taken[number] = max(taken.get(number, 0.0), seconds)
    groups = [g for micro in plan.micro_batches for g in micro.groups]
    at = {(g.ranks, g.sequences): taken.get(n) for n, g in enumerate(groups)}
    reports = reports_of(plan, range(len(indices)), lengths)
    found = tuple(
        replace(
            g, taken_s=at[g.ranks, g.sequences], sequences=tuple(indices[i] for i in g.sequences)
        )
        for g in reports
    )
    return MixedReport(found, plan.time_s, max(sum(s for _, s in of) for of in told))


def in_words(ranks: range) -> str:
    """``3`` or ``0 to 3``.

    Args:
        ranks: without gaps, at least one.
    """
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


def _named(numbers: Sequence[int]) -> str:
    """The first of ``numbers``, and how many there are beside."""
    shown = ", ".join(f"{n:,}" for n in numbers[:SHOWN])
    return shown if len(numbers) <= SHOWN else f"{shown}, .. ({len(numbers)} in all)"


class Stopwatch:
    """Seconds of this rank's micro-batches; on CUDA by events, for which nothing waits until they
    are read.

    Args:
        device: that computes them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_cuda = device, device.type == "cuda"
        self._points: list[tuple[Any, Any]] = []
        self._begun: Any = None

    def begin(self) -> None:
        """A micro-batch begins."""
        self._begun = self._now()

    def end(self) -> None:
        """The one that began last is over."""
        self._points.append((self._begun, self._now()))

    def read(self) -> list[float]:
        """Seconds of each."""
        if not self._on_cuda:
            return [end - begin for begin, end in self._points]
        if self._points:
            self._points[-1][1].synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in self._points]

    def _now(self) -> Any:
        return event_on(self._device, timed=True) if self._on_cuda else time.perf_counter()
