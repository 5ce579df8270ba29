"""What it costs that ranks compare every call, its end and its backward: steps with and without.

    python benchmarks/agreement.py            # three minutes on two cores

A Llama of 4 layers, hidden 256, on two ranks, its weights whole. Rounds of steps with comparisons
and rounds without take turns.
"""

from argparse import Namespace
from functools import partial
from unittest.mock import patch

from contenders import llama, ours
from runner import Benchmark, benchmark, median, milliseconds, noise_of, take_turns

from paradyse.cli.launch import Rank
from paradyse.runtime import frame
from paradyse.runtime.registry import captures_of

OPTIONS = {"layers": 4, "hidden": 256, "lengths": (64, 512, 2048), "runs": 61, "ranks": 2}
QUICK = {"layers": 2, "hidden": 64, "lengths": (33, 64), "runs": 3, "inner": "eager"}

ROUND_S = 0.2
"""A round has as many steps as fit, by a guess, and one at least: rounds are short, so that those
which follow each other see the same machine."""


def measure(rank: Rank, args: Namespace) -> dict[str, dict[int, list[float]]]:
    """Seconds of a step at each length: without and with comparisons."""
    contender = ours(llama(args.layers, args.hidden), "megatron_cz", args.inner, dynamic=True)
    for seq_len in args.lengths:
        contender.loss(seq_len)
    (capture,) = captures_of(contender.run)
    agreement = capture.agreement

    def step_s(seq_len: int, compared: bool) -> float:
        capture.agreement = agreement if compared else None
        current_call = frame.current_call if compared else lambda axis: None
        with patch.object(frame, "current_call", current_call):
            return contender.time_s(seq_len, max(1, round(ROUND_S / (0.02 + seq_len / 5000))))

    turns = {str(compared): partial(step_s, compared=compared) for compared in (False, True)}
    return take_turns(turns, args.lengths, range(-1, args.runs), rank.report)


@benchmark(QUICK, **OPTIONS, inner="inductor")
def main(bench: Benchmark, args: Namespace) -> None:
    taken = bench.on_ranks(measure)
    bench.add(
        f"Llama of {args.layers} layers, hidden {args.hidden}, megatron_cz, {bench.ranks}; "
        f"milliseconds a step, medians of {args.runs} interleaved rounds."
    )
    rows = []
    for n in args.lengths:
        without, compared = (median(taken[str(c)][n]) for c in (False, True))
        # Rounds that follow each other: a slow minute hits both.
        pairs = zip(taken["True"][n], taken["False"][n], strict=True)
        differences = [a - b for a, b in pairs]
        more_s, noise_s = median(differences), noise_of(differences)
        row = [milliseconds(without), milliseconds(compared), f"{1e3 * more_s:+.2f}"]
        rows.append([str(n), *row, f"{1e3 * noise_s:.2f}", f"{more_s / without:+.2%}"])
        bench.at_most(f"{n} tokens: of a step of 100 ms, %", 1e3 * more_s, 1.0)
    bench.table(["tokens", "without", "compared", "longer by", "noise", "share of the step"], rows)
