"""The cost of a switch: the step after one, against the same step without one.

    python benchmarks/switch_cost.py            # four minutes on two cores, half of it compilation

A Llama of two layers on two ranks, compiled once, everything warm. For every ordered pair of
strategies (a, b) and in each round two steps under b are measured: one right after a step under a,
one right after a step under b; which comes first is drawn. The length and the tokens are the same.
Both kinds of step have to send the same bytes: a switch moves nothing.

Noise, of time: what the median of the paired differences would stray by if a switch changed
nothing (``runner.noise_of``), for all rows of the table together in 95 of 100 repetitions of the
benchmark. Of memory: the range of the peaks of steps that no switch came before.
"""

import random
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from contenders import Switched, llama
from runner import Benchmark, T, benchmark, is_noise, median, milliseconds, noise_of, take_turns

import paradyse
from paradyse.cli.launch import Rank
from paradyse.types import ALONG_SEQUENCE

OPTIONS = {"layers": 2, "hidden": 256, "lengths": (128, 512), "rounds": 9, "ranks": 2}
QUICK = {"hidden": 64, "lengths": (64,), "rounds": 3, "inner": "eager"}
LEVEL = 0.95
"""Of all comparisons of a table together."""
MOST_NOISE = 2.0
"""% of a step: with more, that nothing is beyond the noise would say little."""


@dataclass(frozen=True)
class Samples:
    """Of steps under one strategy at one length: pairs of a step after a switch, of the rank that
    is slower or holds more, and of one without."""

    seconds: Sequence[tuple[float, float]]
    peak_bytes: Sequence[tuple[int, int]]

    def shares(self) -> list[float]:
        """How much longer the step after a switch took, of the step without one."""
        return [a / b - 1 for a, b in self.seconds]


Key = tuple[int, str]
"""Length, and the strategy of the measured step."""


def measure(rank: Rank, args: Namespace) -> dict[Key, Samples]:
    """All samples."""
    switched = Switched(llama(args.layers, args.hidden), args.inner)
    switched.check_plans(rank, ALONG_SEQUENCE, *args.lengths)
    rng = random.Random(0)  # the same on all ranks

    def pairs(n: int, after: str, take: Callable[[Switched, int], T]) -> list[tuple[T, T]]:
        """Of steps after a switch from each other strategy, and of steps without one."""
        found = []
        for before in ALONG_SEQUENCE:
            if before != after:
                taken = {}
                for first in rng.sample((before, after), 2):
                    switched.under(first).loss(n)
                    taken[first] = take(switched.under(after), n)
                found.append((taken[before], taken[after]))
        return found

    peaks: dict[Key, list[tuple[int, int]]] = {}
    for n, after in product(args.lengths, ALONG_SEQUENCE):
        held = pairs(n, after, peak_and_messages)
        peaks[n, after] = [(more, same) for (more, _), (same, _) in held]
        for (_, sent), (_, expected) in held:
            if sent != expected:
                sys.exit(
                    f"not timed: {after} at {n} tokens sends {sent} after a switch, else {expected}"
                )
    rank.report("memory done")
    turns = {s: lambda n, s=s: pairs(n, s, Switched.time_s) for s in ALONG_SEQUENCE}
    taken = take_turns(turns, args.lengths, range(-1, args.rounds), rank.report)
    return {(n, s): Samples(sum(taken[s][n], []), held) for (n, s), held in peaks.items()}


def peak_and_messages(model: Switched, n: int) -> tuple[int, list[Counter[str]]]:
    """Bytes held at most in a step; bytes, then messages, of each collective."""
    before, peak, after = paradyse.stats(model.run), model.peak_bytes(n), paradyse.stats(model.run)
    names = "bytes_per_collective", "calls_per_collective"
    return peak, [Counter(getattr(after, k)) - Counter(getattr(before, k)) for k in names]


def rows_of(found: Mapping[Key, Samples]) -> tuple[list[list[str]], int]:
    """A row for each length and strategy; how many are beyond the noise, in time or in memory."""
    level = 1 - (1 - LEVEL) / len(found)  # of each, so that LEVEL is that of all (Bonferroni)
    rows, beyond = [], 0
    for (n, strategy), s in found.items():
        shares, (switched, same) = s.shares(), zip(*s.peak_bytes, strict=True)
        in_time = is_noise(shares, level)
        extra, spread = median(switched) - median(same), max(same) - min(same)
        in_memory = abs(extra) <= spread
        beyond += not (in_time and in_memory)
        times = (milliseconds(median(of)) for of in zip(*s.seconds, strict=True))
        row = [f"{strategy}, {n} tokens", *times, f"{median(shares):+.2%}"]
        row += [f"{noise_of(shares, level):.2%}", "yes" if in_time else "**no**"]
        row += [f"{median(same) / 2**20:.2f}", f"{extra / 2**10:+.1f}"]
        row += [f"{spread / 2**10:.1f}", "yes" if in_memory else "**no**"]
        rows.append(row)
    return rows, beyond


@benchmark(QUICK, **OPTIONS, inner="inductor")
def main(bench: Benchmark, args: Namespace) -> None:
    found = bench.on_ranks(measure)
    pairs = len(ALONG_SEQUENCE) - 1
    bench.add(
        f"Llama of {args.layers} layers, hidden {args.hidden}, {bench.ranks}; {args.rounds} "
        f"interleaved rounds of {pairs} other strategies before each; medians of pairs, the slower "
        "rank. Both kinds of step send equal bytes.",
    )
    rows, beyond = rows_of(found)
    header = ["step", "after a switch, ms", "without, ms", "longer by", "noise", "within"]
    header += ["peak without, MiB", "more after, KiB", "noise, KiB", "within"]
    bench.table(header, rows)
    shares = [share for s in found.values() for share in s.shares()]
    bench.add(
        "",
        f"All {len(shares)} pairs together: a step after a switch takes {median(shares):+.2%}, "
        f"noise {noise_of(shares):.2%}: {'within' if is_noise(shares) else 'beyond'} it.",
    )
    bench.at_most("rows beyond the noise, of time or memory", beyond, 0)
    bench.at_most("noise of all pairs together, % of a step", 100 * noise_of(shares), MOST_NOISE)
