"""Two ranks: what ``auto`` loses against a choice made in hindsight, over traces of lengths.

    python benchmarks/regret.py --profile profile.jsonl   # 7 minutes on two cores
    python benchmarks/regret.py                           # 2 minutes more: it is made first

Three traces: the two published distributions of lengths, scaled so that the longest sequence has
--longest tokens, and the files of the demo's corpus, up to as many. Lengths are rounded up to a
grid. At each length of the grid every static strategy, a few mixed plans and ``auto``, which has
the profile, take turns; a trace takes the sum over its sequences of the medians at their lengths.

The oracle takes the best measured plan at each length. A minimum over noisy medians is too low, so
the same is done fairly: the plan that is best by every other run, timed by the remaining ones, and
the other way round. How far that is above the oracle is noise, which no choice can avoid.
"""

import math
import sys
import tempfile
import time
from argparse import Namespace
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import AUTO, Contender, make_profile, model_of, ours, plans_of
from runner import Benchmark, median, milliseconds, take_turns

from paradyse.cli.corpus import draw_files
from paradyse.cli.launch import Rank
from paradyse.cli.models import whole_graphs
from paradyse.cli.traces import DISTRIBUTIONS, sample_lengths
from paradyse.types import ATTENTION_STRATEGIES

OPTIONS: dict[str, Any] = {"layers": 2, "hidden": 256, "ranks": 2, "inner": "inductor"}
OPTIONS["profile"] = {"help": "file of `paradyse profile`, on as many ranks, of --model"}
OPTIONS["model"] = {"help": "config.json; default: a Llama of --hidden"}
OPTIONS["longest"] = {"type": int, "default": 4096, "help": "tokens"}
OPTIONS["count"] = {"type": int, "default": 500, "help": "sequences of a trace"}
OPTIONS["seconds"] = {"type": float, "default": 300, "help": "of measuring"}
QUICK = {"layers": 1, "hidden": 64, "longest": 128, "seconds": 1, "inner": "eager"}

MIXED = ("megatron_ts/megatron_cz", "megatron_cz/megatron_ts", "ulysses_z/megatron_ts")
"""Attention/MLP: plans that are no static strategy and that two ranks may want."""

STEPS_PER_DOUBLING = 2
"""Of the grid of lengths."""

LEAST_RUNS = 4
"""At each length, whatever they take: two for each half."""

LEAST_S, MOST_OFTEN = 0.2, 8
"""A run has so many steps of each contender at a length that they take about LEAST_S."""


def grid(shortest: int, longest: int) -> list[int]:
    """Lengths from ``shortest`` to ``longest``, each a fixed factor more than the one before."""
    steps = math.ceil(STEPS_PER_DOUBLING * math.log2(longest / shortest))
    return sorted({round(longest * 2 ** (-i / STEPS_PER_DOUBLING)) for i in range(steps + 1)})


def draw_traces(count: int, lengths: Sequence[int]) -> dict[str, Counter[int]]:
    """Per trace, how many of its ``count`` sequences have each length of the grid ``lengths``."""
    longest = lengths[-1]
    drawn = {name: sample_lengths(name, count, longest) for name in DISTRIBUTIONS}
    drawn["demo's text"] = [f.num_tokens for f in draw_files(count, longest)]
    return {n: Counter(lengths[bisect_left(lengths, s)] for s in of) for n, of in drawn.items()}


def measure(rank: Rank, args: Namespace) -> dict[str, Any]:
    """Seconds of every step, the plans of auto, and who was left out."""
    with whole_graphs():
        if not Path(args.profile_path).exists():
            dist.barrier()  # all have seen that it is not there
            points = sorted({args.lengths[i * (len(args.lengths) - 1) // 5] for i in range(6)})
            make_profile(rank, model_of(args), args, points, repeats=3)
        plans: dict[str, Any] = {s: s for s in ATTENTION_STRATEGIES}
        for text in MIXED:
            plans[text] = dict(zip(("attention", "mlp"), text.split("/"), strict=True))
        made = {name: ours(model_of(args), plan, args.inner) for name, plan in plans.items()}
        made[AUTO] = ours(model_of(args), AUTO, args.inner, cost_model=args.profile_path)
        reference, left_out, lengths = Contender(model_of(args)), {}, args.lengths
        for name in list(made):
            try:
                for seq_len in (lengths[0], lengths[len(lengths) // 2]):
                    made[name].check(name, reference, seq_len)
                rank.send(f"{name} agrees with eager")
            except ValueError as e:  # on every rank alike: it cannot compute some block
                left_out[name] = str(e)
                del made[name]
        often = []
        for n in lengths:  # all are warmed up
            step_s = min([contender.time_s(n) for contender in made.values()])
            often += [n] * max(1, min(MOST_OFTEN, round(LEAST_S / step_s)))
        steps = {name: c.time_s for name, c in made.items()}
        runs: list[int] = []
        found = take_turns(steps, often, while_time(args.seconds, runs), rank.send)
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


Seconds = Mapping[str, Mapping[int, Sequence[float]]]
"""Contender -> length -> of each run."""


@dataclass
class Figures:
    """Medians, and what follows from them."""

    seconds: Seconds

    def __post_init__(self) -> None:
        self.plans = [n for n in self.seconds if n != AUTO]
        self.statics = [n for n in self.plans if n in ATTENTION_STRATEGIES]

    def step_s(self, name: str, seq_len: int) -> float:
        return median(self.seconds[name][seq_len])

    def best(self, names: Sequence[str], seq_len: int) -> str:
        return min(names, key=lambda n: self.step_s(n, seq_len))

    def oracle_s(self, seq_len: int) -> float:
        return self.step_s(self.best(self.plans, seq_len), seq_len)

    def again_s(self, seq_len: int) -> float:
        """The oracle's step, chosen by one half of the runs and timed by the other."""
        halves = [{n: median(self.seconds[n][seq_len][i::2]) for n in self.plans} for i in range(2)]
        picked = [min(h, key=h.__getitem__) for h in halves]
        return (halves[1][picked[0]] + halves[0][picked[1]]) / 2

    def total(self, trace: Counter[int], step_s: Callable[[int], float]) -> float:
        """Seconds of all sequences of a trace."""
        return sum(n * step_s(seq_len) for seq_len, n in trace.items())


def percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def report_trace(bench: Benchmark, f: Figures, name: str, trace: Counter[int]) -> None:
    """Totals over one trace, and its goals."""
    totals = {n: f.total(trace, lambda s, n=n: f.step_s(n, s)) for n in f.seconds}
    oracle, again = f.total(trace, f.oracle_s), f.total(trace, f.again_s)
    noise, regret = again / oracle - 1, totals[AUTO] / oracle - 1
    rows = [
        ["oracle", f"{oracle:.2f}", ""],
        ["oracle, timed again", f"{again:.2f}", percent(noise)],
    ]
    for n in sorted(totals, key=totals.__getitem__):
        rows.append([n, f"{totals[n]:.2f}", percent(totals[n] / oracle - 1)])
    bench.add("", f"## {name}: {trace.total()} sequences", "")
    bench.table(["plan", "seconds", "above the oracle"], rows)
    bench.at_most(f"{name}: regret of `auto`, %", 100 * regret, 5)
    static = min(f.statics, key=totals.__getitem__)
    by_length = f.total(trace, lambda s: f.step_s(f.best(f.statics, s), s))
    winners = Counter(f.best(f.statics, s) for s in trace)
    gain = totals[static] / by_length - 1
    text = ", ".join(f"{w} at {n} lengths" for w, n in winners.most_common())
    bench.add(
        "",
        f"Regret of `auto` {percent(regret)}, noise {percent(noise)}. Best static: {text}; "
        f"one for all lengths takes {percent(gain)} more than the best of each.",
    )
    if len(winners) > 1 and gain > noise:
        what = f"{name}: time of the best static strategy ({static}) over `auto`'s"
        bench.at_least(what, totals[static] / totals[AUTO], 1.0)
    else:
        bench.add("That is no more than noise: nothing to be gained by choosing.")


def report_lengths(
    bench: Benchmark, f: Figures, plans: Mapping[int, str], traces: Mapping[str, Counter[int]]
) -> None:
    """The plan and the times at every length."""
    choices, times = [], []
    for s in sorted(f.seconds[AUTO]):
        auto, oracle = f.step_s(AUTO, s), f.oracle_s(s)
        row = [str(s), plans.get(s, ""), milliseconds(auto), f.best(f.plans, s)]
        row += [milliseconds(oracle), percent(auto / oracle - 1)]
        choices.append([*row, *(str(t[s]) for t in traces.values())])
        times.append([str(s), *(milliseconds(f.step_s(n, s)) for n in f.seconds)])
    header = ["tokens", "auto's last plan", "ms", "best measured", "ms", "above", *traces]
    bench.add("", "## By length", "")
    bench.table(header, choices)
    bench.add("", "Milliseconds a step, medians:", "")
    bench.table(["tokens", *f.seconds], times)


def main() -> int:
    bench = Benchmark("regret", __doc__, QUICK, **OPTIONS)
    args = bench.args
    if args.profile and not Path(args.profile).exists():
        sys.exit(f"no profile {args.profile}; leave --profile out to have one made")
    lengths = grid(32, args.longest)
    traces = draw_traces(args.count, lengths)
    args.lengths = [s for s in lengths if any(t[s] for t in traces.values())]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.profile) if args.profile else Path(folder) / "profile.jsonl"
        args.profile_path = str(path.resolve())
        result = bench.on_ranks(measure)
    what = f"{args.model}, " if args.model else f"Llama of hidden {args.hidden}, "
    bench.add(
        f"{what}{args.layers} layers, {bench.ranks}; medians of {result['runs']} interleaved runs, "
        "of several steps where short, the slower rank.",
        f"`auto` has {'a profile made before' if args.profile else 'a profile made at the start'}. "
        f"Lengths rounded up to a grid of {STEPS_PER_DOUBLING} steps a doubling.",
        "attention/mlp are mixed plans. The oracle takes the best of all plans at each length; "
        "timed again: chosen by half of the runs, timed by the other half.",
        *(f"Left out: {name}: {why}" for name, why in result["left_out"].items()),
    )
    figures = Figures(result["seconds"])
    for name, trace in traces.items():
        report_trace(bench, figures, name, trace)
    report_lengths(bench, figures, result["plans"], traces)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
