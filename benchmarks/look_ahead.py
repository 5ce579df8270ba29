"""Sharded weights on two ranks: fetching the next block's weights ahead, against waiting for them.

    python benchmarks/look_ahead.py            # five minutes, most of it compilation
    python benchmarks/look_ahead.py --quick    # tiny sizes, to see that it runs

Llama of 4 layers, hidden 256, weights spread over two ranks; a step is forward and backward. Both
ways take turns within one process, and the slower rank counts. An exposed wait is a gather of
weights that was not there yet when it was asked for: a wait of over 0.1 ms. On two cores the
messages need the processors that compute, so little can hide; on GPUs they do not.
"""

from __future__ import annotations

import sys
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from common import Report, check_equal, llama, median, milliseconds, parser, random_tokens, table
from ranks import on_two_ranks

from paradyse.cli.launch import Rank

PLANS = ("megatron_cz", "ulysses_z", "megatron_ts", "metp")
WAIT_S = 1e-4


def measure(
    rank: Rank, layers: int, hidden: int, lengths: tuple[int, ...], runs: int, inner: str
) -> dict[str, Any]:
    """(plan, length, ahead) -> seconds of each run, exposed waits and seconds waited a step."""
    import paradyse
    from paradyse.distributed import collectives
    from paradyse.weights import unshard

    waits: list[float] = []
    wait = collectives.Pending.wait

    def timed(pending: collectives.Pending) -> Any:
        start = time.perf_counter()
        out = wait(pending)
        if pending._context[0] in ("all_gather", "broadcast"):
            waits.append(time.perf_counter() - start)
        return out

    patch.object(collectives.Pending, "wait", timed).start()
    current = [PLANS[0]]
    model = paradyse.shard(llama(layers, hidden))
    options = {"plan": lambda workload: current[0], "inner": inner}
    run = torch.compile(model, backend="paradyse", options=options)

    def step(ids: torch.Tensor) -> tuple[float, float]:
        model.zero_grad()
        waits.clear()
        dist.barrier()
        start = time.perf_counter()
        loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken), float(loss.detach())

    results: dict[str, Any] = {}
    for plan in PLANS:
        current[0] = plan
        for seq_len in lengths:
            ids = random_tokens(seq_len)
            seconds: dict[bool, list[float]] = {True: [], False: []}
            exposed: dict[bool, list[tuple[int, float]]] = {True: [], False: []}
            for i in range(runs + 2):
                losses = {}
                for ahead in (True, False):
                    unshard.LOOK_AHEAD = ahead
                    taken, losses[f"look-ahead {ahead}"] = step(ids)
                    if i > 1:
                        seconds[ahead].append(taken)
                        exposed[ahead].append((sum(w > WAIT_S for w in waits), sum(waits)))
                check_equal(losses)
            for ahead in (True, False):
                count, waited = zip(*exposed[ahead], strict=True)
                results[f"{plan} {seq_len} {ahead}"] = (
                    median(seconds[ahead]),
                    median(count),
                    median(waited),
                )
        rank.send(f"{plan} done")
    return results


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=7)
    arguments.add_argument("--inner", default="inductor")
    args = arguments.parse_args()
    layers, hidden, lengths = (2, 64, (64,)) if args.quick else (4, 256, (256, 2048))
    given = {"layers": layers, "hidden": hidden, "lengths": lengths}
    given |= {"runs": 3 if args.quick else args.runs, "inner": args.inner}

    results = on_two_ranks("look_ahead:measure", given)
    report = Report("look_ahead", args)
    report.add(
        f"Llama of {layers} layers, hidden {hidden}, sharded over two ranks, gloo, "
        f"inner={args.inner}; medians of {given['runs']} interleaved runs.",
        "",
    )
    rows = []
    for plan in PLANS:
        for seq_len in lengths:
            ahead, without = (results[f"{plan} {seq_len} {a}"] for a in (True, False))
            row = [f"{plan}, {seq_len} tokens", milliseconds(ahead[0]), milliseconds(without[0])]
            row += [f"{ahead[0] / without[0]:.2f}", f"{ahead[1]:.0f}", f"{without[1]:.0f}"]
            rows.append([*row, milliseconds(ahead[2]), milliseconds(without[2])])
    header = ["plan", "step ahead, ms", "without, ms", "ratio"]
    header += ["exposed waits ahead", "without", "waited ahead, ms", "without, ms"]
    report.add(*table(header, rows))
    return report.finish("two processes of one thread")


if __name__ == "__main__":
    sys.exit(main())
