"""Two ranks: what ``auto`` loses against a choice made in hindsight, over traces of lengths.

    python benchmarks/regret.py --profile profile.jsonl   # 7 minutes on two cores
    python benchmarks/regret.py                           # 2 minutes more: it is made first
    python benchmarks/regret.py --quick                   # tiny sizes, to see that it runs

Three traces: the two published distributions of lengths, scaled so that the longest sequence has
--longest tokens, and the files of the demo's corpus, up to as many. Lengths are rounded up to a
grid. At each length of the grid every static strategy, a few mixed plans and ``auto``, which has
the profile, take turns; a trace takes the sum over its sequences of the medians at their lengths.

The oracle takes the best measured plan at each length. A minimum over noisy medians is too low, so
the same is done fairly: the plan that is best by every other run, timed by the remaining ones, and
the other way round. How far that is above the oracle is noise, which no choice can avoid.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Goal, Report, check_equal, llama, median, milliseconds, parser, table
from contenders import Ours, many_models, plans_of, time_step
from ranks import on_two_ranks

from paradyse.cli.corpus import draw_files
from paradyse.cli.launch import Rank
from paradyse.cli.length_distributions import DISTRIBUTIONS, sample_lengths
from paradyse.cli.models import make_model, read_config, vocabulary_of, whole_graphs
from paradyse.types import ATTENTION_STRATEGIES

AUTO = "auto"
CORPUS = "demo's text"

MIXED = ("megatron_ts/megatron_cz", "megatron_cz/megatron_ts", "ulysses_z/megatron_ts")
"""Attention/MLP: plans that are no static strategy and that two ranks may want."""

STEPS_PER_DOUBLING = 2
"""Of the grid of lengths."""

LEAST_RUNS = 4
"""At each length, whatever they take: two for each half."""

LEAST_S, MOST_OFTEN = 0.2, 8
"""A run has so many steps of each contender at a length that they take about LEAST_S."""

TOLERANCE = 1e-4
"""Relative, float32, of losses and of each gradient (by norm), against one-process eager."""


def grid(shortest: int, longest: int) -> list[int]:
    """Lengths from ``shortest`` to ``longest``, each a fixed factor more than the one before."""
    steps = math.ceil(STEPS_PER_DOUBLING * math.log2(longest / shortest))
    return sorted({round(longest * 2 ** (-i / STEPS_PER_DOUBLING)) for i in range(steps + 1)})


def draw_traces(count: int, lengths: Sequence[int]) -> dict[str, Counter[int]]:
    """Per trace, how many of its ``count`` sequences have each length of the grid ``lengths``."""
    longest = lengths[-1]
    drawn = {name: sample_lengths(name, count, longest) for name in DISTRIBUTIONS}
    drawn[CORPUS] = [f.num_tokens for f in draw_files(count, longest)]
    return {n: Counter(lengths[bisect_left(lengths, s)] for s in of) for n, of in drawn.items()}


@many_models
def measure(
    rank: Rank,
    config: Mapping[str, Any] | None,
    layers: int,
    hidden: int,
    profile: str,
    lengths: Sequence[int],
    seconds: float,
    inner: str,
) -> dict[str, Any]:
    """What one rank does; rank 0's seconds are those of the slowest."""
    import paradyse

    def model() -> Any:
        return make_model(dict(config), layers) if config else llama(layers, hidden)

    def tell(text: str) -> None:
        rank.send(f"{time.perf_counter() - start:4.0f} s  {text}")

    start = time.perf_counter()
    with whole_graphs():
        if not Path(profile).exists():
            dist.barrier()  # all have seen that it is not there
            points = sorted({lengths[i * (len(lengths) - 1) // 5] for i in range(6)})
            paradyse.profile(
                model(),
                profile,
                points,
                repeats=3,
                options={"inner": inner},
                progress=lambda p: tell(f"profile: {p.done} of {p.total}  {p.text}"),
            )
        plans: dict[str, Any] = {s: s for s in ATTENTION_STRATEGIES}
        for text in MIXED:
            plans[text] = dict(zip(("attention", "mlp"), text.split("/"), strict=True))
        made = {name: Ours(model(), plan, inner) for name, plan in plans.items()}
        made[AUTO] = Ours(model(), AUTO, inner, cost_model=profile)
        reference, left_out = model(), {}
        for name in list(made):
            try:
                for seq_len in (lengths[0], lengths[len(lengths) // 2]):
                    check(name, made[name], reference, seq_len)
                tell(f"{name} agrees with eager")
            except ValueError as e:  # on every rank alike: it cannot compute some block
                left_out[name] = str(e)
                del made[name]
        found = {n: {s: list[float]() for s in lengths} for n in made}
        names, often = list(made), dict[int, int]()
        began, num_runs = 0.0, -1
        while num_runs < LEAST_RUNS or go_on(time.perf_counter() - began < seconds):
            for seq_len in lengths:
                ids = tokens(reference, seq_len)
                if num_runs < 0:  # the first run warms up
                    taken_s = min(time_step(contender, ids) for contender in made.values())
                    often[seq_len] = max(1, min(MOST_OFTEN, round(LEAST_S / taken_s)))
                    continue
                for i in range(often[seq_len]):
                    # Another one goes first each time: what follows a neighbour is slower.
                    first = (num_runs + i) % len(made)
                    for name in (*names[first:], *names[:first]):
                        found[name][seq_len].append(time_step(made[name], ids))
            num_runs += 1
            began = began or time.perf_counter()
            tell(f"run {num_runs}" if num_runs else "warmed up")
    chosen = plans_of(made[AUTO].run)
    assert set(chosen) >= set(lengths), "auto was not planned at every length"
    return {"seconds": found, "plans": chosen, "left_out": left_out, "runs": num_runs}


def go_on(mine: bool) -> bool:
    """Whether rank 0 wants to."""
    told = torch.tensor(mine)
    dist.broadcast(told, 0)
    return bool(told)


def tokens(model: Any, seq_len: int) -> torch.Tensor:
    """[1, seq_len] int64, equal on all ranks."""
    generator = torch.Generator().manual_seed(seq_len)
    return torch.randint(vocabulary_of(model), (1, seq_len), generator=generator)


def check(name: str, contender: Ours, reference: Any, seq_len: int) -> None:
    """Loss and every gradient at this length."""
    ids = tokens(reference, seq_len)
    reference.zero_grad()
    expected = reference(input_ids=ids, labels=ids, use_cache=False).loss
    expected.backward()
    contender.model.zero_grad()
    at = f"{name} at {seq_len} tokens"
    check_equal({"eager": float(expected.detach()), at: float(contender.step(ids))}, TOLERANCE)
    grads = contender.gradients()
    whole = math.hypot(*(float(p.grad.norm()) for p in reference.parameters()))
    for weight, p in reference.named_parameters():
        # A gradient that is zero but for rounding is held against all of them.
        norm = max(float(p.grad.norm()), TOLERANCE * whole)
        error = float((grads[weight] - p.grad).norm()) / norm
        if not error <= TOLERANCE:
            sys.exit(f"not timed: {at} has the gradient of {weight} off by {error:.1e}")


Seconds = Mapping[str, Mapping[int, Sequence[float]]]
"""Contender -> length -> of each run."""


@dataclass(frozen=True)
class Figures:
    """Medians, and what follows from them."""

    seconds: Seconds

    @property
    def plans(self) -> list[str]:
        """All that an oracle may take."""
        return [n for n in self.seconds if n != AUTO]

    @property
    def statics(self) -> list[str]:
        return [n for n in self.plans if n in ATTENTION_STRATEGIES]

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


def report_trace(report: Report, figures: Figures, name: str, trace: Counter[int]) -> None:
    """Totals over one trace, and its goals."""
    f = figures
    totals = {n: f.total(trace, lambda s, n=n: f.step_s(n, s)) for n in f.seconds}
    oracle, again = f.total(trace, f.oracle_s), f.total(trace, f.again_s)
    rows = [("oracle", f"{oracle:.2f}", "")]
    rows += [("oracle, timed again", f"{again:.2f}", percent(again / oracle - 1))]
    for n in sorted(totals, key=totals.__getitem__):
        rows.append((n, f"{totals[n]:.2f}", percent(totals[n] / oracle - 1)))
    report.add("", f"## {name}: {trace.total()} sequences", "")
    report.add(*table(["plan", "seconds", "above the oracle"], rows), "")
    noise, regret = again / oracle - 1, totals[AUTO] / oracle - 1
    report.goals.append(Goal(f"{name}: regret of `auto`, %", 100 * regret, 5, at_least=False))
    static = min(f.statics, key=totals.__getitem__)
    by_length = f.total(trace, lambda s: f.step_s(f.best(f.statics, s), s))
    winners = Counter(f.best(f.statics, s) for s in trace)
    gain = totals[static] / by_length - 1
    text = ", ".join(f"{w} at {n} lengths" for w, n in winners.most_common())
    report.add(
        f"Regret of `auto` {percent(regret)}, noise {percent(noise)}. Best static: {text}; "
        f"one for all lengths takes {percent(gain)} more than the best of each."
    )
    if len(winners) > 1 and gain > noise:
        what = f"{name}: time of the best static strategy ({static}) over `auto`'s"
        report.goals.append(Goal(what, totals[static] / totals[AUTO], 1.0, at_least=True))
    else:
        report.add("That is no more than noise: nothing to be gained by choosing.")


def report_lengths(
    report: Report, figures: Figures, result: Mapping[str, Any], traces: Mapping[str, Counter[int]]
) -> None:
    """The plan and the times at every length."""
    f, rows = figures, []
    for s in sorted(next(iter(f.seconds.values()))):
        auto, oracle = f.step_s(AUTO, s), f.oracle_s(s)
        counts = [str(t[s]) for t in traces.values()]
        best = f.best(f.plans, s)
        cells = [result["plans"].get(s, ""), milliseconds(auto), best, milliseconds(oracle)]
        rows.append([str(s), *cells, percent(auto / oracle - 1), *counts])
    header = ["tokens", "auto's last plan", "ms", "best measured", "ms", "above"]
    report.add("", "## By length", "", *table([*header, *traces], rows), "")
    names = list(f.seconds)
    rows = []
    for s in sorted(f.seconds[AUTO]):
        rows.append([str(s), *(milliseconds(f.step_s(n, s)) for n in names)])
    report.add("Milliseconds a step, medians:", "", *table(["tokens", *names], rows))


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--profile", help="file of `paradyse profile`, on two ranks, of --model")
    arguments.add_argument("--model", help="config.json; default: a Llama of hidden 256")
    arguments.add_argument("--layers", type=int, default=2)
    arguments.add_argument("--longest", type=int, default=4096, help="tokens")
    arguments.add_argument("--count", type=int, default=500, help="sequences of a trace")
    arguments.add_argument("--seconds", type=float, default=300, help="of measuring")
    arguments.add_argument("--inner", default="inductor")
    args = arguments.parse_args()
    hidden = 256
    if args.quick:
        args.longest, args.layers, args.seconds, args.inner, hidden = 128, 1, 1, "eager", 64
    lengths = grid(32, args.longest)
    traces = draw_traces(args.count, lengths)
    lengths = [s for s in lengths if any(t[s] for t in traces.values())]
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "config": read_config(args.model) if args.model else None,
            "layers": args.layers,
            "hidden": hidden,
            "profile": str(Path(args.profile).resolve())
            if args.profile
            else str(Path(folder) / "profile.jsonl"),
            "lengths": lengths,
            "seconds": args.seconds,
            "inner": args.inner,
        }
        if args.profile and not Path(args.profile).exists():
            sys.exit(f"no profile {args.profile}; leave --profile out to have one made")
        result = on_two_ranks("regret:measure", given)
    return write_report(args, result, traces, hidden)


def write_report(
    args: argparse.Namespace,
    result: Mapping[str, Any],
    traces: Mapping[str, Counter[int]],
    hidden: int,
) -> int:
    figures = Figures(result["seconds"])
    report = Report("regret", args)
    what = f"{args.model}, {args.layers} layers" if args.model else f"Llama, {args.layers} layers"
    report.add(
        f"{what}{'' if args.model else f', hidden {hidden}'}, two ranks, gloo, inner={args.inner}; "
        f"medians of {result['runs']} interleaved runs, of several steps where short, the slower "
        "rank.",
        f"`auto` has {'a profile made before' if args.profile else 'a profile made at the start'}. "
        f"Lengths rounded up to a grid of {STEPS_PER_DOUBLING} steps a doubling.",
        "attention/mlp are mixed plans. The oracle takes the best of all plans at each length; "
        "timed again: chosen by half of the runs, timed by the other half.",
    )
    for name, why in result["left_out"].items():
        report.add(f"Left out: {name}: {why}")
    for name, trace in traces.items():
        report_trace(report, figures, name, trace)
    report_lengths(report, figures, result, traces)
    return report.finish("two processes of one thread")


if __name__ == "__main__":
    sys.exit(main())
