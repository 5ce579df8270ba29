"""Two ranks: what ``auto`` loses against a choice made in hindsight, over traces of lengths.

    python benchmarks/regret.py --profile profile.jsonl   # 7 minutes on two cores
    python benchmarks/regret.py                           # 2 minutes more: it is made first
    python benchmarks/regret.py --learn 200 --sharded --like a100-nvlink   # no profile; slow links
    python benchmarks/regret.py --profile-seconds 60 --sharded --like a100-nvlink   # a short one

Three traces: the two published distributions of lengths, scaled so that the longest sequence has
--longest tokens, and the files of the demo's corpus, up to as many. Lengths are rounded up to a
grid. At each length of the grid every static strategy, a few mixed plans and ``auto``, which has
the profile, or has run --learn steps without one, take turns; a trace takes the sum over its
sequences of the medians at their lengths.

The oracle takes the best measured plan at each length. A minimum over noisy medians is too low, so
the same is done fairly: the plan that is best by every other run, timed by the remaining ones, and
the other way round. How far that is above the oracle is noise, which no choice can avoid.
"""

import math
import os
import random
import sys
import tempfile
import time
from argparse import Namespace
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import AUTO, Contender, at_rest, make_profile, model_of, ours, plans_of
from runner import Benchmark, benchmark, median, milliseconds, take_turns

from paradyse.cli.corpus import draw_files
from paradyse.cli.launch import Rank
from paradyse.cli.traces import DISTRIBUTIONS, sample_lengths
from paradyse.types import ALONG_SEQUENCE

OPTIONS: dict[str, Any] = {"layers": 2, "hidden": 256, "ranks": 2, "inner": "inductor"}
OPTIONS["profile"] = {"help": "file of `paradyse profile`, on as many ranks, of --model"}
OPTIONS["model"] = {"help": "config.json; default: a Llama of --hidden"}
OPTIONS["profile_seconds"] = {"type": int, "help": "of the profile; default: all is measured"}
OPTIONS["longest"] = {"type": int, "default": 4096, "help": "tokens"}
OPTIONS["count"] = {"type": int, "default": 500, "help": "sequences of a trace"}
OPTIONS["seconds"] = {"type": float, "default": 300, "help": "of measuring"}
OPTIONS["sharded"] = {"action": "store_true", "help": "weights 1/p on each rank"}
OPTIONS["learn"] = {"type": int, "default": 0, "help": "no profile, but so many steps before"}
QUICK = {"layers": 1, "hidden": 64, "longest": 128, "seconds": 1, "inner": "eager"}

MIXED = ("megatron_ts/megatron_cz", "megatron_cz/megatron_ts", "ulysses_z/megatron_ts")
"""Attention/MLP: plans that are no static strategy and that two ranks may want."""

SHORTEST, STEPS_PER_DOUBLING = 32, 2
"""Of the grid of lengths."""

LEAST_RUNS = 4
"""At each length, whatever they take: two for each half."""

LEAST_S, MOST_OFTEN = 0.6, 24
"""A run has so many steps of each contender at a length that they take about LEAST_S."""


def draw_traces(count: int, longest: int) -> dict[str, Counter[int]]:
    """Per trace, how many of its ``count`` sequences have each length of the grid."""
    steps = math.ceil(STEPS_PER_DOUBLING * math.log2(longest / SHORTEST))
    factors = (2 ** (-i / STEPS_PER_DOUBLING) for i in range(steps + 1))
    lengths = sorted({round(longest * factor) for factor in factors})
    drawn = {name: sample_lengths(name, count, longest) for name in DISTRIBUTIONS}
    drawn["demo's text"] = [f.num_tokens for f in draw_files(count, longest)]
    return {n: Counter(lengths[bisect_left(lengths, s)] for s in of) for n, of in drawn.items()}


def measure(rank: Rank, args: Namespace) -> dict[str, Any]:
    """Seconds of every step, the plans of auto, and who was left out."""

    def model() -> Any:
        return at_rest(model_of(args), args.sharded)

    if not args.profile and not args.learn:
        points = sorted({args.lengths[i * (len(args.lengths) - 1) // 5] for i in range(6)})
        make_profile(rank, model(), args, points, repeats=3, seconds=args.profile_seconds)
    options = {} if args.learn else {"cost_model": args.profile_path}
    plans: dict[str, Any] = {s: s for s in ALONG_SEQUENCE}
    plans |= {t: dict(zip(("attention", "mlp"), t.split("/"), strict=True)) for t in MIXED}
    made = {name: ours(model(), plan, args.inner) for name, plan in plans.items()}
    made[AUTO] = ours(model(), AUTO, args.inner, **options)
    reference, left_out, lengths = Contender(model_of(args)), {}, args.lengths
    for name in list(made):
        try:
            made[name].check(name, reference, lengths[0], lengths[len(lengths) // 2])
            rank.report(f"{name} agrees with eager")
        except ValueError as e:  # on every rank alike: it cannot compute some block
            left_out[name] = str(e)
            del made[name]
    for n in args.learned:
        made[AUTO].step(made[AUTO].tokens(n))
    often = []
    for n in lengths:  # all are warmed up
        step_s = min([contender.time_s(n) for contender in made.values()])
        often += [n] * max(1, min(MOST_OFTEN, round(LEAST_S / step_s)))
    steps = {name: c.time_s for name, c in made.items()}
    runs: list[int] = []
    found = take_turns(steps, often, while_time(args.seconds, runs), rank.report)
    chosen = plans_of(made[AUTO].run)
    assert set(chosen) >= set(lengths), "auto was not planned at every length"
    return {"seconds": found, "plans": chosen, "left_out": left_out, "runs": len(runs)}


def while_time(seconds: float, runs: list[int]) -> Iterator[int]:
    """Numbers of runs, noted in ``runs``, until rank 0 has spent so many seconds."""
    start = time.perf_counter()
    more = torch.tensor(True)
    while more:
        runs.append(len(runs))
        yield runs[-1]
        more.fill_(len(runs) < LEAST_RUNS or time.perf_counter() - start < seconds)
        dist.broadcast(more, 0)


ORACLE, AGAIN, STATIC = "oracle", "oracle, timed again", "the best static strategy of each length"

Steps = Mapping[int, Mapping[str, float]]
"""Length -> median seconds of a step, of every contender and of the three above."""


def fastest(names: Iterable[str], seconds: Mapping[str, float]) -> str:
    return min(names, key=seconds.__getitem__)


def steps_of(runs: Mapping[str, Mapping[int, Sequence[float]]]) -> Steps:
    """Medians of ``runs``, which has contender -> length -> seconds of each run."""
    plans = [n for n in runs if n != AUTO]
    steps = {}
    for s in sorted(runs[AUTO]):
        of = {n: median(by_length[s]) for n, by_length in runs.items()}
        one, other = ({n: median(runs[n][s][i::2]) for n in plans} for i in range(2))
        again_s = (other[fastest(plans, one)] + one[fastest(plans, other)]) / 2
        static_s = min(of[n] for n in plans if n in ALONG_SEQUENCE)
        steps[s] = of | {ORACLE: min(of[n] for n in plans), AGAIN: again_s, STATIC: static_s}
    return steps


def percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def report_trace(
    bench: Benchmark, steps: Steps, plans: Sequence[str], name: str, trace: Counter[int]
) -> None:
    """Totals over one trace, and its goals."""
    totals = {
        n: sum(count * steps[s][n] for s, count in trace.items())
        for n in (*plans, AUTO, ORACLE, AGAIN, STATIC)
    }
    above = {n: total / totals[ORACLE] - 1 for n, total in totals.items()}
    rows = [[ORACLE, f"{totals[ORACLE]:.2f}", ""]]
    for n in (AGAIN, *sorted((*plans, AUTO), key=totals.__getitem__)):
        rows.append([n, f"{totals[n]:.2f}", percent(above[n])])
    bench.table(
        ["plan", "seconds", "above the oracle"], rows, f"## {name}: {trace.total()} sequences"
    )
    bench.at_most(f"{name}: regret of `auto`, %", 100 * above[AUTO], 5)
    statics = [n for n in plans if n in ALONG_SEQUENCE]
    static = fastest(statics, totals)
    winners = Counter(fastest(statics, steps[s]) for s in trace)
    gain = totals[static] / totals[STATIC] - 1
    text = ", ".join(f"{w} at {n} lengths" for w, n in winners.most_common())
    bench.add(
        "",
        f"Regret of `auto` {percent(above[AUTO])}, noise {percent(above[AGAIN])}. Best static: "
        f"{text}; one for all lengths takes {percent(gain)} more than the best of each.",
    )
    if len(winners) > 1 and gain > above[AGAIN]:
        what = f"{name}: time of the best static strategy ({static}) over `auto`'s"
        bench.at_least(what, totals[static] / totals[AUTO], 1.0)
    else:
        bench.add("That is no more than noise: nothing to be gained by choosing.")


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> None:
    if args.profile and not Path(args.profile).exists():
        sys.exit(f"no profile {args.profile}; leave --profile out to have one made")
    traces = draw_traces(args.count, args.longest)
    args.lengths = sorted({s for trace in traces.values() for s in trace})
    args.learned = [*traces["demo's text"].elements()]
    random.Random(0).shuffle(args.learned)
    del args.learned[args.learn :]
    with tempfile.TemporaryDirectory() as folder:
        args.profile_path = os.path.abspath(args.profile or f"{folder}/profile.jsonl")
        result = bench.on_ranks(measure)
    knows = f"a profile made {'before' if args.profile else 'at the start'}"
    if args.profile_seconds and not args.profile:
        knows += f", in {args.profile_seconds} seconds of measuring"
    if args.learn:
        knows = f"no profile and ran {args.learn} steps of the demo's text before"
    what = f"{args.model}, " if args.model else f"Llama of hidden {args.hidden}, "
    bench.add(
        f"{what}{args.layers} layers, {bench.ranks}; medians of {result['runs']} interleaved runs, "
        "of several steps where short, the slower rank.",
        f"`auto` has {knows}. Weights {'sharded' if args.sharded else 'whole on every rank'}. "
        f"Lengths rounded up to a grid of {STEPS_PER_DOUBLING} steps a doubling.",
        "attention/mlp are mixed plans. The oracle takes the best of all plans at each length; "
        "timed again: chosen by half of the runs, timed by the other half.",
        *(f"Left out: {name}: {why}" for name, why in result["left_out"].items()),
    )
    contenders = list(result["seconds"])
    plans = [n for n in contenders if n != AUTO]
    steps = steps_of(result["seconds"])
    for name, trace in traces.items():
        report_trace(bench, steps, plans, name, trace)
    choices, times = [], []
    for s, of in steps.items():
        row = [str(s), result["plans"][s], milliseconds(of[AUTO]), fastest(plans, of)]
        row += [milliseconds(of[ORACLE]), percent(of[AUTO] / of[ORACLE] - 1)]
        choices.append([*row, *(str(t[s]) for t in traces.values())])
        times.append([str(s), *(milliseconds(of[n]) for n in contenders)])
    header = ["tokens", "auto's last plan", "ms", "best measured", "ms", "above", *traces]
    bench.table(header, choices, "## By length")
    bench.table(["tokens", *contenders], times, "Milliseconds a step, medians:")
