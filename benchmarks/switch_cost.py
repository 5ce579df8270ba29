"""The cost of a switch: the step after one, against the same step without one.

    python benchmarks/switch_cost.py            # four minutes on two cores, half of it compilation
    python benchmarks/switch_cost.py --quick    # tiny sizes, to see that it runs

A Llama of two layers on two ranks, compiled once, everything warm. For every ordered pair of
strategies (a, b) and in each round two steps under b are measured: one right after a step under a,
one right after a step under b; which comes first is drawn. The length and the tokens are the same.
A step is zero_grad, forward, backward, and the slower rank counts. Before anything is timed, loss
and gradients are compared with one-process eager, and both kinds of step have to send the same
bytes: a switch moves nothing.

Noise, of time: what the median of the paired differences would stray by if a switch changed nothing
(``noise.py``), for all rows of the table together in 95 of 100 repetitions of the benchmark. Of
memory: the range of the peaks of steps that no switch came before.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common import Goal, Report, median, milliseconds, parser, random_tokens, table
from noise import is_noise, noise_of
from ranks import on_two_ranks
from switched import Switched

from paradyse.cli.launch import Rank
from paradyse.types import ATTENTION_STRATEGIES

LENGTHS = (128, 512)
LEVEL = 0.95
"""Of all comparisons of a table together."""
MOST_NOISE = 2.0
"""% of a step: with more, that nothing is beyond the noise would say little."""


@dataclass(frozen=True)
class Samples:
    """Of steps under one strategy at one length: after a switch, and without one, in pairs."""

    switched_s: list[float]
    same_s: list[float]
    switched_bytes: list[int]
    same_bytes: list[int]

    def shares(self) -> list[float]:
        """How much longer the step after a switch took, of the step without one."""
        return [a / b - 1 for a, b in zip(self.switched_s, self.same_s, strict=True)]


Key = tuple[int, str]
"""Length, and the strategy of the measured step."""


def measure(
    rank: Rank, layers: int, hidden: int, lengths: tuple[int, ...], rounds: int, inner: str
) -> dict[Key, Samples]:
    """All samples; rank 0's are those of the slower rank, and of the one that held more."""
    model = Switched(layers, hidden, inner)
    for strategy in ATTENTION_STRATEGIES:
        for n in lengths:
            model.check(strategy, n)
        rank.send(f"{strategy} agrees with eager")
    rng = random.Random(0)  # the same on all ranks
    samples: dict[Key, Samples] = {}
    for n in lengths:
        for after in ATTENTION_STRATEGIES:
            samples[n, after] = Samples([], [], [], [])
            _watch_memory(model, n, after, samples[n, after])
    rank.send("memory done")
    for r in range(rounds + 1):
        for n in lengths:
            ids = random_tokens(n)
            for before, after in _pairs():
                taken = {}
                for first in rng.sample((before, after), 2):
                    model.step(first, ids)
                    taken[first] = model.time_s(after, ids)
                if r:  # the first round warms up
                    samples[n, after].switched_s.append(taken[before])
                    samples[n, after].same_s.append(taken[after])
        rank.send(f"round {r} of {rounds}" if r else "warmed up")
    return samples


def _pairs() -> list[tuple[str, str]]:
    names = ATTENTION_STRATEGIES
    return [(before, after) for after in names for before in names if before != after]


def _watch_memory(model: Switched, n: int, after: str, samples: Samples) -> None:
    """Peaks, after every other strategy and as often without a switch; and the bytes sent.

    Raises:
        SystemExit: a step sends more after a switch.
    """
    ids = random_tokens(n)
    sent = {}
    for before in ATTENTION_STRATEGIES:
        if before == after:
            continue
        for first, peaks in ((before, samples.switched_bytes), (after, samples.same_bytes)):
            model.step(first, ids)
            start = _sent(model)
            peaks.append(model.peak_bytes(after, ids))
            sent[first] = _sent(model) - start
        if sent[before] != sent[after]:
            sys.exit(
                f"not timed: {after} at {n} tokens sends {dict(sent[before])} after {before}, "
                f"{dict(sent[after])} after itself"
            )


def _sent(model: Switched) -> Counter[str]:
    """Bytes and messages so far, of each collective."""
    import paradyse

    stats = paradyse.stats(model.compiled)
    calls = {f"messages of {k}": n for k, n in stats.calls_per_collective.items()}
    return Counter({**stats.bytes_per_collective, **calls})


def spread(values: Sequence[int]) -> int:
    return max(values) - min(values)


def rows_of(found: Mapping[Key, Samples]) -> tuple[list[list[str]], int]:
    """A row for each length and strategy; how many are beyond the noise, in time or in memory."""
    level = 1 - (1 - LEVEL) / len(found)  # of each, so that LEVEL is that of all (Bonferroni)
    rows, beyond = [], 0
    for (n, strategy), s in found.items():
        shares = s.shares()
        in_time = is_noise(shares, level)
        extra = median(s.switched_bytes) - median(s.same_bytes)
        in_memory = abs(extra) <= spread(s.same_bytes)
        beyond += not (in_time and in_memory)
        row = [f"{strategy}, {n} tokens", milliseconds(median(s.switched_s))]
        row += [milliseconds(median(s.same_s)), f"{median(shares):+.2%}"]
        row += [f"{noise_of(shares, level):.2%}", "yes" if in_time else "**no**"]
        row += [f"{median(s.same_bytes) / 2**20:.2f}", f"{extra / 2**10:+.1f}"]
        row += [f"{spread(s.same_bytes) / 2**10:.1f}", "yes" if in_memory else "**no**"]
        rows.append(row)
    return rows, beyond


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    arguments.add_argument("--inner", default="inductor")
    args = arguments.parse_args()
    given: dict[str, Any] = {"layers": 2, "hidden": 64 if args.quick else 256}
    given["lengths"] = (64,) if args.quick else tuple(args.lengths)
    given |= {"rounds": 3 if args.quick else args.rounds, "inner": args.inner}
    found: dict[Key, Samples] = on_two_ranks("switch_cost:measure", given)
    report = Report("switch_cost", args)
    pairs = len(ATTENTION_STRATEGIES) - 1
    report.add(
        f"Llama of {given['layers']} layers, hidden {given['hidden']}, two ranks, gloo, "
        f"inner={args.inner}; {given['rounds']} interleaved rounds of {pairs} other strategies "
        "before each; medians of pairs, the slower rank. Both kinds of step send equal bytes.",
        "",
    )
    rows, beyond = rows_of(found)
    header = ["step", "after a switch, ms", "without, ms", "longer by", "noise", "within"]
    header += ["peak without, MiB", "more after, KiB", "noise, KiB", "within"]
    report.add(*table(header, rows))
    shares = [share for s in found.values() for share in s.shares()]
    verdict = "within" if is_noise(shares) else "beyond"
    report.add(
        "",
        f"All {len(shares)} pairs together: a step after a switch takes {median(shares):+.2%}, "
        f"noise {noise_of(shares):.2%}: {verdict} it.",
    )
    report.goals += [
        Goal("rows beyond the noise, of time or memory", beyond, 0, False),
        Goal("noise of all pairs together, % of a step", 100 * noise_of(shares), MOST_NOISE, False),
    ]
    return report.finish("two processes of one thread")


if __name__ == "__main__":
    sys.exit(main())
