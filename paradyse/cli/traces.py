"""The lengths that ``paradyse bench`` replays: given, from a file, a distribution, or a folder.

Distributions are the two published ones, scaled to what a machine can run. Shares per range are
those that ParaDySe (arXiv 2511.13198) gives for its two data sets. Inside a range lengths spread
evenly on a logarithmic scale, which is an assumption: nothing finer is published, nor the shortest
lengths.
"""

from __future__ import annotations

import argparse
import math
import random
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paradyse.cli.corpus import CAP, MIN_TOKENS, STEPS, draw_files, draw_lengths
from paradyse.cli.models import token_counter


@dataclass(frozen=True)
class LengthDistribution:
    """Shares of sequences by length, in tokens of the data set itself."""

    edges: tuple[int, ...]
    """Of the ranges, ascending: range i is from edge i to edge i + 1, the last is the longest."""
    shares: tuple[float, ...]
    """Of the sequences in each range; what they miss of 1 is spread over all."""

    def draw(self, share: float, longest: int) -> int:
        """The length below which ``share`` of the sequences are, the longest being ``longest``."""
        ends = np.cumsum((0.0, *self.shares))
        # A range that scales to less than the shortest sequence is that one alone.
        edges = np.maximum(MIN_TOKENS, np.array(self.edges) * (longest / self.edges[-1]))
        return round(math.exp(np.interp(share * ends[-1], ends, np.log(edges))))


LENGTH = re.compile("0*[1-9][0-9]{0,8}")
"""A number of tokens, at least 1."""

K = 1024
EDGES = (MIN_TOKENS, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K)
DISTRIBUTIONS = {
    "GitHubCode": LengthDistribution(  # source code in GPT-2 tokens
        (*EDGES, 309 * K),
        (0.657, 0.145, 0.098, 0.051, 0.027, 0.011, 0.011),
    ),
    "GRCh38": LengthDistribution(  # a human genome in 3-mers
        (*EDGES, 624 * K),
        (0.035, 0.264, 0.287, 0.212, 0.119, 0.055, 0.019),
    ),
}
"""By name."""


def find_distribution(name: str) -> str:
    """``name`` as ``DISTRIBUTIONS`` has it, whatever its case.

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
        longest: tokens that the data set's longest sequence becomes, at least ``MIN_TOKENS``.
        seed: of the draw.
    Raises:
        ValueError: an unknown name.
    """
    distribution = DISTRIBUTIONS[find_distribution(name)]
    rng = random.Random(seed)
    lengths = [distribution.draw((i + rng.random()) / count, longest) for i in range(count)]
    rng.shuffle(lengths)
    return lengths


def trace_of(args: argparse.Namespace) -> tuple[list[int], str]:
    """The lengths that ``args`` ask for, in tokens, and where they are from, in words.

    Raises:
        ValueError: a file or folder that is not there or has no lengths; an unknown distribution;
            flags that have no effect on lengths that are given.
    """
    if args.tokenizer and (args.lengths or args.distribution):
        raise ValueError("--tokenizer counts the tokens of text: give it with --text, or alone")
    if args.lengths:
        for flag, value in (("--steps", args.steps), ("--cap", args.cap)):
            if value is not None:
                raise ValueError(
                    f"{flag} {value} is of lengths that are drawn, and --lengths gives them: leave "
                    "out one of the two"
                )
        return args.lengths, "as given"
    steps, cap = args.steps or STEPS, args.cap or CAP
    if args.distribution:
        name = find_distribution(args.distribution)
        lengths = sample_lengths(name, steps, cap, args.seed)
        return lengths, f"drawn from {name}, its longest as {cap}, seed {args.seed}"
    drawn = (steps, cap, args.seed, args.text)
    if args.tokenizer:
        lengths, unit = draw_lengths(token_counter(args.tokenizer), *drawn), args.tokenizer
    else:
        lengths, unit = [f.num_tokens for f in draw_files(*drawn)], "bytes"
    return lengths, f"of files of {args.text or 'the standard library'}, tokens by {unit}"


def read_lengths(path: str) -> list[int]:
    """The whole numbers of at least 1 in the file ``path``, apart by commas, blanks or lines; ``#``
    begins a comment.

    Raises:
        ValueError: no such file, something else in it, or nothing.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no file {path}; give one with a length on each line")
    lengths = []
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
        for word in re.split(r"[\s,;]+", line.partition("#")[0].strip()):
            if word and not LENGTH.fullmatch(word):
                raise ValueError(
                    f"{path}, line {number}: {word!r:.40} is no length; give whole numbers of at "
                    "least 1 token"
                )
            lengths += [int(word)] if word else []
    if not lengths:
        raise ValueError(f"{path} has no lengths in it; give one on each line")
    return lengths
