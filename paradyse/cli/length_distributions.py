"""The two published distributions of sequence lengths, scaled to what a machine can run.

Shares per range are those that ParaDySe (arXiv 2511.13198) gives for its two data sets. Inside a
range lengths spread evenly on a logarithmic scale, which is an assumption: nothing finer is
published, nor the shortest lengths.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

SHORTEST = 16
"""Tokens, after scaling: shorter sequences say nothing."""


@dataclass(frozen=True)
class LengthDistribution:
    """Shares of sequences by length, in tokens of the data set itself."""

    what: str
    edges: tuple[int, ...]
    """Of the ranges, ascending: range i is from edge i to edge i + 1, the last is the longest."""
    shares: tuple[float, ...]
    """Of the sequences in each range; what they miss of 1 is spread over all."""

    def draw(self, share: float, longest: int) -> int:
        """The length below which ``share`` of the sequences are, the longest being ``longest``."""
        ends = [0.0, *accumulate(self.shares)]
        at = min(1.0, max(0.0, share)) * ends[-1]
        i = min(bisect_right(ends, at), len(self.shares)) - 1
        scale = longest / self.edges[-1]
        # A range that scales to less than the shortest sequence is that one alone.
        low, high = (max(float(SHORTEST), scale * e) for e in self.edges[i : i + 2])
        inside = (at - ends[i]) / self.shares[i]
        return round(math.exp(math.log(low) + inside * (math.log(high) - math.log(low))))


K = 1024
EDGES = (SHORTEST, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K)
DISTRIBUTIONS = {
    "GitHubCode": LengthDistribution(
        "source code in GPT-2 tokens",
        (*EDGES, 309 * K),
        (0.657, 0.145, 0.098, 0.051, 0.027, 0.011, 0.011),
    ),
    "GRCh38": LengthDistribution(
        "a human genome in 3-mers",
        (*EDGES, 624 * K),
        (0.035, 0.264, 0.287, 0.212, 0.119, 0.055, 0.019),
    ),
}
"""By name."""


def find_distribution(name: str) -> str:
    """The name as ``DISTRIBUTIONS`` has it, whatever its case.

    Raises:
        ValueError: there is none of that name.
    """
    for known in DISTRIBUTIONS:
        if known.lower() == name.lower():
            return known
    raise ValueError(f"unknown distribution {name!r}: give one of {', '.join(DISTRIBUTIONS)}")


def sample_lengths(name: str, count: int, longest: int, seed: int = 0) -> list[int]:
    """``count`` lengths in tokens, in random order, equal for equal arguments on every machine.

    All lengths of the data set are multiplied by ``longest`` over its own longest. One is drawn
    from each of ``count`` equal parts of the distribution, so that also a short trace has as many
    of each range as its share says, give or take one.

    Args:
        name: of ``DISTRIBUTIONS``, in any case.
        longest: tokens that the data set's longest sequence becomes.
    Raises:
        ValueError: an unknown name, no lengths, or a longest that is below ``SHORTEST``.
    """
    distribution = DISTRIBUTIONS[find_distribution(name)]
    if count < 1:
        raise ValueError(f"{count} lengths: give at least 1")
    if longest < SHORTEST:
        raise ValueError(f"longest length {longest}: give at least {SHORTEST} tokens")
    rng = random.Random(seed)
    lengths = [distribution.draw((i + rng.random()) / count, longest) for i in range(count)]
    rng.shuffle(lengths)
    return lengths
