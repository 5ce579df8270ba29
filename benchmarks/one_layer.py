"""One layer, switched over lengths: the time of every strategy, and where they cross.

    python benchmarks/one_layer.py            # four minutes on two cores, half of it compilation

A Llama of one layer on two ranks, compiled once; its strategy is switched before every step, in
which are the embedding and the head of 256 bytes too.

Two strategies cross between two lengths where one is faster at the shorter and the other at the
longer, each by more than the noise of the rounds (``runner.noise_of``); where exactly is
interpolated on logarithmic scales. Writes ``one_layer.md`` and ``one_layer.png``.
"""

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from contenders import AUTO, Switched, llama
from runner import Benchmark, benchmark, is_noise, lines_of, median, milliseconds, take_turns

import paradyse
from paradyse.cli.charts import Chart, Page
from paradyse.cli.launch import Rank
from paradyse.types import ALONG_SEQUENCE

LENGTHS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
OPTIONS = {"rounds": 11, "lengths": LENGTHS, "hidden": 256, "ranks": 2, "inner": "inductor"}
QUICK = {"rounds": 3, "lengths": (32, 64, 128), "hidden": 64, "inner": "eager"}

Times = Mapping[str, Mapping[int, Sequence[float]]]
"""Choice -> length -> seconds of each round."""


def measure(rank: Rank, args: Namespace) -> tuple[Times, dict[int, str]]:
    """Seconds of every step, and the key of the plan that auto takes at each length."""
    layer = Switched(llama(1, args.hidden), args.inner)
    lengths, choices = sorted(args.lengths), (*ALONG_SEQUENCE, AUTO)
    layer.check_plans(rank, choices, lengths[0], lengths[len(lengths) // 2], lengths[-1])
    for n in lengths:
        layer.under(AUTO).loss(n)
    plans = dict(paradyse.stats(layer.run).plan_per_length)
    turns = {c: lambda n, c=c: layer.under(c).time_s(n) for c in choices}
    return take_turns(turns, lengths, range(-1, args.rounds), rank.report), plans


@dataclass(frozen=True)
class Crossing:
    """From ``at`` tokens on ``after`` is faster than ``before``."""

    before: str
    after: str
    at: float
    time_s: float
    """Of both, there."""
    front: bool
    """Whether no other strategy is faster there."""


def crossings_of(one: str, other: str, times: Times) -> list[Crossing]:
    """Where one of the two overtakes the other, from the shortest length on."""
    lengths = sorted(times[one])
    logs = {n: math.log(median(times[one][n]) / median(times[other][n])) for n in lengths}
    ratios = {n: np.divide(times[one][n], times[other][n]) for n in lengths}
    clear = [n for n in lengths if not is_noise(np.log(ratios[n]).tolist())]
    found = []
    for low, high in pairwise(clear):
        if logs[low] * logs[high] >= 0:
            continue
        # Between them lie only lengths at which nobody can tell; the medians change sign there.
        inside = [n for n in lengths if low <= n <= high]
        a, b = next((a, b) for a, b in pairwise(inside) if logs[a] * logs[b] <= 0 and logs[a])
        share = logs[a] / (logs[a] - logs[b])
        first, second = median(times[one][a]), median(times[one][b])
        before, after = (one, other) if logs[low] < 0 else (other, one)
        at, time_s = a * (b / a) ** share, first * (second / first) ** share
        near = min(lengths, key=lambda n: abs(math.log(n / at)))
        front = fastest(times, near) in (one, other)
        found.append(Crossing(before, after, at, time_s, front))
    return found


def fastest(times: Times, n: int) -> str:
    return min((c for c in times if c != AUTO), key=lambda c: median(times[c][n]))


def page_of(title: str, times: Times, crossings: Sequence[Crossing]) -> Page:
    """The picture; crossings of the fastest strategies are marked."""
    lines = lines_of({c: {n: median(of[n]) for n in of} for c, of in times.items()})
    marks = tuple((c.at, c.time_s, f"{c.at:,.0f}") for c in crossings if c.front)
    return Page(title, [Chart("Time of a step", "s", lines, marks=marks)])


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> None:
    times, plans = bench.on_ranks(measure)
    title = f"Llama of one layer, hidden {args.hidden}, {bench.ranks}"
    bench.add(
        f"{title}. Milliseconds a step, medians of {args.rounds} interleaved rounds, the slower "
        "rank; the strategy is switched before every step."
    )
    rows = []
    for n in sorted(plans):
        best = fastest(times, n)
        cells = [milliseconds(median(of[n])) + "*" * (c == best) for c, of in times.items()]
        rows.append([str(n), *cells, plans[n].replace(",", " + ")])
    bench.table(["tokens", *times, "plan of auto"], rows)
    bench.add("", "`*` fastest strategy")
    pairs = combinations(ALONG_SEQUENCE, 2)
    crossings = sorted((c for p in pairs for c in crossings_of(*p, times)), key=lambda c: c.at)
    header = ["at", "faster before", "faster after", "time there, ms", "of the fastest"]
    rows = [
        [f"{c.at:,.0f} tokens", c.before, c.after, milliseconds(c.time_s), "yes" * c.front]
        for c in crossings
    ]
    if rows:
        bench.table(header, rows, "## Crossings")
    else:
        bench.add("", "No strategy overtakes another by more than the noise.")
    bench.picture(page_of(title, times, crossings))
