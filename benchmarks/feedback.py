"""What it costs to feed measured times and memory back to the planner: steps with and without.

    python benchmarks/feedback.py            # three minutes on two cores
    python benchmarks/feedback.py --quick    # tiny sizes, to see that it runs

Llama of 4 layers, hidden 256, on two ranks; a step is zero_grad, forward, backward. One compiled
model runs rounds of 16 steps with feedback (four of them watched, and one message by which ranks
agree) and rounds without, in turns; the slower rank counts. `auto` may use one strategy alone, so
that no plan changes. Memory is watched once for a variant and a scale of lengths: the last column
has such a step, against the others of the table.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from common import (
    Goal,
    Report,
    check_equal,
    llama,
    median,
    milliseconds,
    parser,
    random_tokens,
    table,
)
from ranks import on_two_ranks, slower_rank

from paradyse.cli.launch import Rank

STRATEGY = "ulysses_z"


def measure(
    rank: Rank, layers: int, hidden: int, lengths: tuple[int, ...], runs: int, inner: str
) -> dict[str, Any]:
    """Per length, seconds of a step: of every round with and without, and with memory watched."""
    from paradyse.profiling.online import REFRESH_EVERY, WARM_UP
    from paradyse.runtime.registry import captures_of

    model = llama(layers, hidden)
    options = {"plan": "auto", "strategies": [STRATEGY], "inner": inner}
    run = torch.compile(model, backend="paradyse", options=options, dynamic=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def seconds(ids: torch.Tensor, steps: int) -> float:
        """Of one step, on the slower rank."""
        return slower_rank(lambda: [step(ids) for _ in range(steps)]) / steps

    for seq_len in lengths:
        step(random_tokens(seq_len))
    (graph,) = [g for c in captures_of(run) for g in c.graphs.values()]
    feedback = graph.feedback
    assert feedback is not None
    results: dict[str, Any] = {}
    for seq_len in lengths:
        ids = random_tokens(seq_len)
        taken: dict[str, list[float]] = {"with": [], "without": [], "memory": []}
        losses: dict[str, float] = {}
        for i in range(runs + 1):
            for name, watcher in (("without", None), ("with", feedback)):
                graph.feedback = watcher
                part = seconds(ids, REFRESH_EVERY)
                losses[name] = float(step(ids))
                if i:  # the first rounds warm up, and watch memory
                    taken[name].append(part)
            check_equal(losses)
            feedback._known.clear()  # as if the length were new
            part = seconds(ids, 1)
            if i:
                taken["memory"].append(part)
        watched = feedback.measured["saved"]
        assert watched and min(feedback._runs.values()) > WARM_UP, "memory was not watched"
        results[str(seq_len)] = taken
        rank.send(f"{seq_len} tokens done")
    return results


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=7)
    arguments.add_argument("--inner", default="inductor")
    args = arguments.parse_args()
    layers, hidden, lengths = (2, 64, (33, 64)) if args.quick else (4, 256, (128, 384, 1024))
    given = {"layers": layers, "hidden": hidden, "lengths": lengths}
    given |= {"runs": 3 if args.quick else args.runs, "inner": args.inner}

    results = on_two_ranks("feedback:measure", given)
    report = Report("feedback", args)
    report.add(
        f"Llama of {layers} layers, hidden {hidden}, two ranks, gloo, {STRATEGY}, "
        f"inner={args.inner}; milliseconds a step, medians of {given['runs']} interleaved rounds.",
        "",
    )
    rows = []
    shares = []
    for seq_len in lengths:
        taken = results[str(seq_len)]
        without, fed, memory = (median(taken[n]) for n in ("without", "with", "memory"))
        # Rounds that follow each other: a slow minute hits both.
        share = median([a / b - 1 for a, b in zip(taken["with"], taken["without"], strict=True)])
        shares.append(share)
        row = [str(seq_len), milliseconds(without), milliseconds(fed), f"{share:.2%}"]
        rows.append([*row, milliseconds(memory)])
    header = ["tokens", "without", "with feedback", "share of time", "memory watched"]
    report.add(*table(header, rows))
    what = "share of time that feedback costs, median of the lengths, %"
    report.goals.append(Goal(what, 100 * median(shares), 1.0, at_least=False))
    return report.finish("two processes of one thread")


if __name__ == "__main__":
    sys.exit(main())
