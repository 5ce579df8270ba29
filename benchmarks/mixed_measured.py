"""Measured: groups of different degree side by side, against one degree for all groups.

    python benchmarks/mixed_measured.py --like a100-nvlink            # ten minutes
    python benchmarks/mixed_measured.py --like a100-nvlink --quick    # two minutes

A Llama on four ranks whose links are limited, weights whole on every rank. Batches have lengths of
a long-tailed distribution, divided so that the longest is ``--longest``. What groups of each degree
can do is measured first (``paradyse.measure_ways``), then batches are planned: by those ways with
groups of one degree alone, sequences dealt out so that all groups take equally long, and with
groups of different degree. All run the same sequences through the same model and kernels, in turns.
A rank has room for ``--room`` tokens, so a degree that has none for the longest is left out: by
default four ranks just have it, as where one fixes a degree for the longest sequence. Ranks share
this machine's cores, so that groups save messages and waits, and no arithmetic.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from contenders import llama
from runner import (
    Benchmark,
    benchmark,
    check_equal,
    log,
    median,
    milliseconds,
    seconds_of,
    take_turns,
)

import paradyse
from paradyse.cli.launch import Rank
from paradyse.cli.traces import DISTRIBUTIONS, find_distribution, sample_lengths
from paradyse.distributed.axis import resolve_axis
from paradyse.distributed.together import Together
from paradyse.mixed.batches import MixedStep
from paradyse.mixed.step_plan import plan_step, static_steps

GROUPS = "groups"

GAIN = 1.3
"""Goal: how many times as fast groups are as the best degree for all, over all batches."""

OPTIONS: dict[str, Any] = {"layers": 4, "hidden": 256, "trace": "GitHubCode", "longest": 4096}
OPTIONS |= {"room": 1024, "sequences": 48, "batches": 4, "runs": 3, "repeats": 3, "limit": 5.0}
OPTIONS |= {"ranks": 4, "inner": "inductor"}
QUICK = {"layers": 1, "hidden": 64, "longest": 256, "room": 128, "sequences": 8, "batches": 1}
QUICK |= {"runs": 1, "repeats": 1, "limit": 1.0, "inner": "eager"}


def draw(args: Namespace) -> list[list[int]]:
    """Lengths of the sequences of each batch: those of the trace, divided; at least 16 tokens."""
    name = find_distribution(args.trace)
    most, count = DISTRIBUTIONS[name].edges[-1], args.sequences * args.batches
    lengths = sample_lengths(name, count, most, seed=0)
    lengths = [max(16, min(args.longest, n * args.longest // most)) for n in lengths]
    lengths[0] = args.longest  # so that each run has it, however few there are
    return [lengths[k * args.sequences : (k + 1) * args.sequences] for k in range(args.batches)]


class Steps:
    """Batches as each contender has them, and the model that trains them."""

    def __init__(self, rank: Rank, args: Namespace) -> None:
        self.model = llama(args.layers, args.hidden)
        self.mixed = paradyse.MixedModel(self.model, {"inner": args.inner})
        lengths, generator = draw(args), torch.Generator().manual_seed(0)
        sequences = [
            {"input_ids": torch.randint(256, (n,), generator=generator)}
            for of in lengths
            for n in of
        ]
        self.ways = paradyse.measure_ways(
            self.mixed, sequences, tokens_per_rank=args.room, repeats=args.repeats
        )
        rank.report("measured what groups can do")
        batches = paradyse.MixedBatches(sequences, tokens_per_step=10**9, ways=self.ways)
        together = Together(resolve_axis(), "planning")
        self.steps: list[dict[str, MixedStep]] = []
        for k, of in enumerate(lengths):
            plans = together.first(lambda of=of: self._plans(of, rank.size, args.limit))  # type: ignore[misc]
            indices = range(k * args.sequences, (k + 1) * args.sequences)
            self.steps.append({n: batches.arranged(p, indices, of) for n, p in plans.items()})

    def _plans(self, lengths: Sequence[int], size: int, limit_s: float) -> dict[str, Any]:
        static = static_steps(lengths, self.ways, size)
        plans = {f"degree {d}": plan for d, plan in static.items()}
        return {GROUPS: plan_step(lengths, self.ways, size, limit_s), **plans}

    def train(self, batch: int, name: str) -> None:
        """One step of ``batch``, as ``name`` has it."""
        self.model.zero_grad()
        for loss in self.mixed.losses(self.steps[batch][name]):
            loss.backward()


def measure(rank: Rank, args: Namespace) -> dict[str, Any]:
    """By contender and batch: seconds measured and predicted, losses, and what ways were found."""
    steps = Steps(rank, args)
    names = [n for n in steps.steps[0] if all(n in of for of in steps.steps)]

    def time_of(name: str) -> Any:
        return lambda batch: seconds_of(lambda: steps.train(batch, name))

    turns = {name: time_of(name) for name in names}
    seconds = take_turns(turns, range(len(steps.steps)), range(-1, args.runs), rank.report)
    of_each = [{n: of[n] for n in names} for of in steps.steps]
    return {
        "seconds": seconds,
        "predicted": [{n: s.plan.time_s for n, s in of.items()} for of in of_each],
        "losses": [
            {n: float(s.loss) for n, s in of.items() if s.loss is not None} for of in of_each
        ],
        "words": [of[GROUPS].plan.in_words() for of in of_each],
        "tokens": [of[GROUPS].num_tokens for of in of_each],
        "explained": str(of_each[0][GROUPS].report),
        "ways": [
            (w.degree, w.max_tokens, w.fixed_s, w.group_s([w.lengths[-1]])) for w in steps.ways
        ],
    }


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> None:
    found = bench.on_ranks(measure)
    for losses in found["losses"]:
        check_equal(losses)
    log("all contenders have the same losses")
    names, batches = list(found["seconds"]), range(len(found["words"]))
    bench.add(
        f"Llama of {args.layers} layers, hidden {args.hidden}, {bench.ranks}, weights whole.",
        f"{args.batches} batches of {args.sequences} sequences, {args.trace} divided so that the "
        f"longest has {args.longest:,} tokens; room for {args.room:,} tokens a rank.",
        f"Milliseconds a step, medians of {args.runs} runs in turns, the slowest rank.",
    )
    ways = [
        (str(d), f"{most:,}", milliseconds(fixed), milliseconds(s))
        for d, most, fixed, s in found["ways"]
    ]
    bench.table(["degree", "most tokens", "fixed", "the most in one"], ways, "## Ways, measured")
    times = {n: {b: median(found["seconds"][n][b]) for b in batches} for n in names}
    rows = [
        [f"{b + 1}, {found['tokens'][b]:,} tokens", *(milliseconds(times[n][b]) for n in names)]
        for b in batches
    ]
    total = {n: sum(of.values()) for n, of in times.items()}
    said = {n: sum(found["predicted"][b][n] for b in batches) for n in names}
    rows.append(["all", *(milliseconds(total[n]) for n in names)])
    rows.append(["all, predicted", *(milliseconds(said[n]) for n in names)])
    bench.table(["batch", *names], rows, "## Steps")
    statics = [n for n in names if n != GROUPS]
    best = min(statics, key=total.__getitem__)
    each = sum(min(times[n][b] for n in statics) for b in batches)
    bench.add(
        "",
        f"Groups against the best degree for all ({best}): {total[best] / total[GROUPS]:.2f} times "
        f"as fast; against the best of each batch, {each / total[GROUPS]:.2f}; predicted "
        f"{said[best] / said[GROUPS]:.2f}.",
        "",
        *(f"- batch {b + 1}: {found['words'][b]}" for b in batches),
        "",
        "```",
        *found["explained"].splitlines(),
        "```",
    )
    if not args.quick:
        what = "the best degree for all over groups of different degree, time of all batches"
        bench.at_least(what, total[best] / total[GROUPS], GAIN)
