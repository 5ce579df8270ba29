"""What it costs to feed measured times and memory back to the planner: steps with and without.

    python benchmarks/feedback.py            # three minutes on two cores

Llama of 4 layers, hidden 256, on two ranks. One compiled model runs rounds of 16 steps with
feedback (four of them watched, and one message by which ranks agree) and rounds without. `auto` may
use one strategy alone, so that no plan changes. Memory is watched once for a variant and a scale of
lengths: the last column has such a step, against the others of the table.
"""

from argparse import Namespace
from functools import partial

from contenders import AUTO, llama, ours
from runner import Benchmark, benchmark, median, milliseconds, take_turns

from paradyse.cli.launch import Rank
from paradyse.planning.corrections import SAVED
from paradyse.profiling.online import REFRESH_EVERY, WARM_UP
from paradyse.runtime.registry import captures_of

STRATEGY = "ulysses_z"
OPTIONS = {"layers": 4, "hidden": 256, "lengths": (128, 384, 1024), "runs": 7, "ranks": 2}
QUICK = {"layers": 2, "hidden": 64, "lengths": (33, 64), "runs": 3, "inner": "eager"}


def measure(rank: Rank, args: Namespace) -> dict[str, dict[int, list[float]]]:
    """Seconds of a step at each length: without and with feedback, and with memory watched."""
    model = llama(args.layers, args.hidden)
    contender = ours(model, AUTO, args.inner, dynamic=True, strategies=[STRATEGY])
    for seq_len in args.lengths:
        contender.loss(seq_len)
    (graph,) = [g for c in captures_of(contender.run) for g in c.graphs.values()]
    feedback = graph.choice.feedback
    assert feedback is not None

    def step_s(seq_len: int, fed: bool = True, count: int = REFRESH_EVERY) -> float:
        graph.choice.feedback = feedback if fed else None
        if count == 1:
            feedback._known.clear()  # as if the length were new
        return contender.time_s(seq_len, count)

    turns = {"without": partial(step_s, fed=False), "with": step_s}
    turns["memory"] = partial(step_s, count=1)
    found = take_turns(turns, args.lengths, range(-1, args.runs), rank.report)
    watched = any(quantity == SAVED for quantity, _ in feedback.measured)
    assert watched and min(feedback._runs.values()) > WARM_UP, "memory was not watched"
    return found


@benchmark(QUICK, **OPTIONS, inner="inductor")
def main(bench: Benchmark, args: Namespace) -> None:
    taken = bench.on_ranks(measure)
    bench.add(
        f"Llama of {args.layers} layers, hidden {args.hidden}, {STRATEGY}, {bench.ranks}; "
        f"milliseconds a step, medians of {args.runs} interleaved rounds."
    )
    rows, shares = [], []
    for n in args.lengths:
        without, fed, memory = (milliseconds(median(of[n])) for of in taken.values())
        # Rounds that follow each other: a slow minute hits both.
        pairs = zip(taken["with"][n], taken["without"][n], strict=True)
        shares.append(median([a / b - 1 for a, b in pairs]))
        rows.append([str(n), without, fed, f"{shares[-1]:.2%}", memory])
    bench.table(["tokens", "without", "with feedback", "share of time", "memory watched"], rows)
    what = "share of time that feedback costs, median of the lengths, %"
    bench.at_most(what, 100 * median(shares), 1.0)
