"""What a group of ranks can do: its time and its memory by the sequences packed into it, and the
groups, micro-batches and steps that plans consist of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Way:
    """How a group of ``degree`` ranks computes the sequences packed into it.

    The time of a group is ``fixed_s`` plus what each sequence adds (FlexSP, arXiv 2412.01523,
    section 4: attention's quadratic part counts for each sequence by itself, all else by tokens),
    and ``least_s`` where that is less.

    Raises:
        ValueError: a number makes no sense.

    Example:

        way = paradyse.Way(2, 0.001, max_tokens=4096, lengths=(512, 4096), times_s=(0.01, 0.12))
        seconds = way.group_s([512, 512])  # 0.001 and twice 0.01
        batches = paradyse.MixedBatches(dataset, tokens_per_step=8192, ways=[way, *ways])
    """

    degree: int
    """Ranks of the group."""
    fixed_s: float
    """Seconds of a micro-batch whatever is in it: launches, messages that nothing hides."""
    max_tokens: int
    """Tokens of all its sequences that the memory of every one of its ranks has room for."""
    lengths: tuple[int, ...]
    """Tokens, ascending; between them times are interpolated, and beyond the last extrapolated."""
    times_s: tuple[float, ...]
    """Seconds that a sequence of each of ``lengths`` adds."""
    name: str = ""
    """The plan in words."""
    least_s: float = 0.0
    """Seconds of messages that are under way while the group computes: those of sharded weights.
    ``fixed_s`` has what is added of them where it computes long enough."""

    def __post_init__(self) -> None:
        if self.degree < 1 or self.max_tokens < 1:
            raise ValueError(
                f"a group of {self.degree} ranks with room for {self.max_tokens} tokens: give at "
                "least 1 of each"
            )
        if not self.lengths or len(self.lengths) != len(self.times_s):
            raise ValueError(
                f"{len(self.times_s)} times for {len(self.lengths)} lengths: give one for each of "
                "at least one length"
            )
        if any(a >= b for a, b in zip((0, *self.lengths), self.lengths)):
            raise ValueError(f"lengths {self.lengths}: give them ascending, from 1 token")
        times = [self.fixed_s, self.least_s, *self.times_s]
        if not np.isfinite(times).all() or min(times) < 0:
            raise ValueError(f"times {times}: give finite numbers, none below 0")

    def sequence_s(self, lengths: Sequence[int]) -> Floats:
        """Seconds that a sequence of each of ``lengths``, in tokens, adds to its group."""
        x, y = np.array((0, *self.lengths)), np.array((0.0, *self.times_s))
        asked = np.asarray(lengths, dtype=np.float64)
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
        beyond = np.maximum(0.0, asked - x[-1]) * slope
        return np.interp(asked, x, y) + beyond

    def group_s(self, lengths: Sequence[int]) -> float:
        """Seconds of a group with sequences of ``lengths`` packed into it."""
        return max(self.least_s, self.fixed_s + float(self.sequence_s(lengths).sum()))

    @property
    def idle_s(self) -> float:
        """Seconds of a group without a sequence."""
        return max(self.least_s, self.fixed_s)


@dataclass(frozen=True)
class Group:
    """Ranks that compute some sequences together, packed into one."""

    way: Way
    sequences: tuple[int, ...]
    """Indices into the batch."""
    first_rank: int
    """Of ``way.degree`` ranks that follow each other."""
    time_s: float

    @property
    def ranks(self) -> range:
        """The ranks of the group, within the axis."""
        return range(self.first_rank, self.first_rank + self.way.degree)


@dataclass(frozen=True)
class MicroBatch:
    """Groups side by side; ranks in none of them have nothing to do."""

    groups: tuple[Group, ...]

    @property
    def time_s(self) -> float:
        """Seconds until the slowest group is done."""
        return max(g.time_s for g in self.groups)


@dataclass(frozen=True)
class StepPlan:
    """A batch as micro-batches, one after the other."""

    micro_batches: tuple[MicroBatch, ...]

    @property
    def time_s(self) -> float:
        """Seconds of all micro-batches."""
        return sum(m.time_s for m in self.micro_batches)

    def in_words(self) -> str:
        """The degrees of the groups: ``1 x 8, 24 x 1; 8 x 4``, a part for each micro-batch."""
        parts = []
        for micro in self.micro_batches:
            degrees = [g.way.degree for g in micro.groups]
            counts = {d: degrees.count(d) for d in sorted(set(degrees), reverse=True)}
            parts.append(", ".join(f"{n} x {d}" for d, n in counts.items()))
        return "; ".join(parts)
