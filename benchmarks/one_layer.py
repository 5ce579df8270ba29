"""One layer, switched over lengths: the time of every strategy, and where they cross.

    python benchmarks/one_layer.py            # four minutes on two cores, half of it compilation
    python benchmarks/one_layer.py --quick    # tiny sizes, to see that it runs

A Llama of one layer on two ranks, compiled once; its strategy is switched before every step. A step
is zero_grad, forward, backward, with the gradients of replicated weights whole on every rank at its
end; the embedding and the head of 256 bytes are in it. In each round all strategies take turns at
all lengths, and the slower rank counts. Loss and gradients of every strategy are compared with
one-process eager first.

Two strategies cross between two lengths where one is faster at the shorter and the other at the
longer, each by more than the noise of the rounds (``noise.py``); where exactly is interpolated on
logarithmic scales. Writes ``results/one_layer.md`` and ``results/one_layer.png``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch.distributed as dist
from common import RESULTS, Report, median, milliseconds, parser, random_tokens, table
from noise import is_noise
from ranks import on_two_ranks
from switched import Switched

from paradyse.cli.charts import Chart, Line, Page, write_png
from paradyse.cli.launch import Rank
from paradyse.types import ATTENTION_STRATEGIES

LENGTHS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
AUTO = "auto"

Times = Mapping[str, Mapping[int, Sequence[float]]]
"""Choice -> length -> seconds of each round."""


def measure(
    rank: Rank, hidden: int, lengths: tuple[int, ...], rounds: int, inner: str
) -> tuple[Times, dict[int, str]]:
    """Seconds of every step, and the key of the plan that auto takes at each length."""
    import paradyse

    layer = Switched(1, hidden, inner)
    choices = (*ATTENTION_STRATEGIES, AUTO)
    for choice in choices:
        for n in (lengths[0], lengths[len(lengths) // 2], lengths[-1]):
            layer.check(choice, n)
        rank.send(f"{choice} agrees with eager")
    plans = {}
    for n in lengths:
        layer.step(AUTO, random_tokens(n))
        plans[n] = paradyse.stats(layer.compiled).plan_per_length[n]
    seconds: dict[str, dict[int, list[float]]] = {c: {n: [] for n in lengths} for c in choices}
    for r in range(rounds + 1):
        for n in lengths:
            ids = random_tokens(n)
            # Another one goes first each time: what follows a neighbour's garbage is slower.
            first = r % len(choices)
            for choice in (*choices[first:], *choices[:first]):
                taken = layer.time_s(choice, ids)
                if r:  # the first round warms up
                    seconds[choice][n].append(taken)
        rank.send(f"round {r} of {rounds}" if r else "warmed up")
    dist.barrier()
    return seconds, plans


@dataclass(frozen=True)
class Crossing:
    """From ``at`` tokens on ``after`` is faster than ``before``."""

    before: str
    after: str
    at: float
    time_s: float
    """Of both, there."""


def crossings_of(one: str, other: str, times: Times) -> list[Crossing]:
    """Where one of the two overtakes the other, from the shortest length on."""
    lengths = sorted(times[one])
    logs = {n: math.log(median(times[one][n]) / median(times[other][n])) for n in lengths}
    clear = [
        n
        for n in lengths
        if not is_noise([math.log(a / b) for a, b in zip(times[one][n], times[other][n])])
    ]
    found = []
    for low, high in zip(clear, clear[1:]):
        if logs[low] * logs[high] >= 0:
            continue
        # Between them lie only lengths at which nobody can tell; the medians change sign there.
        inside = [n for n in lengths if low <= n <= high]
        a, b = next(
            (a, b) for a, b in zip(inside, inside[1:]) if logs[a] * logs[b] <= 0 and logs[a]
        )
        share = logs[a] / (logs[a] - logs[b])

        def between(x: float, y: float, share: float = share) -> float:
            return math.exp(math.log(x) + share * math.log(y / x))

        time_s = between(median(times[one][a]), median(times[one][b]))
        before, after = (one, other) if logs[low] < 0 else (other, one)
        found.append(Crossing(before, after, between(a, b), time_s))
    return found


def fastest(times: Times, n: int) -> str:
    return min(ATTENTION_STRATEGIES, key=lambda s: median(times[s][n]))


def is_at_the_front(crossing: Crossing, times: Times) -> bool:
    """Whether no other strategy is faster where these two cross."""
    lengths = sorted(times[crossing.before])
    near = min(lengths, key=lambda n: abs(math.log(n / crossing.at)))
    return fastest(times, near) in (crossing.before, crossing.after)


def page_of(title: str, times: Times, crossings: Sequence[Crossing]) -> Page:
    """The picture; crossings of the fastest strategies are marked."""
    lines = [
        Line(c, tuple((n, median(t), True) for n, t in sorted(of.items())))
        for c, of in times.items()
    ]
    marks = tuple((c.at, c.time_s, f"{c.at:,.0f}") for c in crossings if is_at_the_front(c, times))
    return Page(title, [Chart("Time of a step", "s", tuple(lines), marks=marks)])


def short_plan(key: str) -> str:
    """Attention and MLP of the one layer."""
    return " + ".join(key.split(","))


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=11)
    arguments.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    arguments.add_argument("--hidden", type=int, default=256)
    arguments.add_argument("--inner", default="inductor")
    args = arguments.parse_args()
    hidden, lengths = (64, (32, 64, 128)) if args.quick else (args.hidden, sorted(args.lengths))
    given: dict[str, Any] = {"hidden": hidden, "lengths": tuple(lengths), "inner": args.inner}
    given["rounds"] = 3 if args.quick else args.rounds
    times, plans = on_two_ranks("one_layer:measure", given)
    report = Report("one_layer", args)
    title = f"Llama of one layer, hidden {hidden}, two ranks, gloo, inner={args.inner}"
    report.add(
        f"{title}. Milliseconds a step, medians of {given['rounds']} interleaved rounds, the "
        "slower rank; the strategy is switched before every step.",
        "",
    )
    names = list(times)
    rows = []
    for n in lengths:
        best = fastest(times, n)
        cells = [milliseconds(median(times[c][n])) + "*" * (c == best) for c in names]
        rows.append([str(n), *cells, short_plan(plans[n])])
    report.add(*table(["tokens", *names, "plan of auto"], rows), "", "`*` fastest strategy")
    pairs = combinations(ATTENTION_STRATEGIES, 2)
    crossings = sorted((c for p in pairs for c in crossings_of(*p, times)), key=lambda c: c.at)
    report.add("", "## Crossings", "")
    if crossings:
        rows = [
            [
                f"{c.at:,.0f} tokens",
                c.before,
                c.after,
                milliseconds(c.time_s),
                "yes" if is_at_the_front(c, times) else "",
            ]
            for c in crossings
        ]
        header = ["at", "faster before", "faster after", "time there, ms", "of the fastest"]
        report.add(*table(header, rows))
    else:
        report.add("None: no strategy overtakes another by more than the noise.")
    if not args.quick:
        RESULTS.mkdir(exist_ok=True)
        drawn = write_png(RESULTS / "one_layer.png", page_of(title, times, crossings))
        report.add("", "![times](one_layer.png)" if drawn else "No picture without matplotlib.")
    return report.finish("two processes of one thread")


if __name__ == "__main__":
    sys.exit(main())
