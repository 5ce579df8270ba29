"""Time of the first step: backend="paradyse" against torch.compile(inductor), nothing cached.

    python benchmarks/first_step.py            # about 15 minutes

Llama of 24 layers, hidden 256, 512 tokens, float32, one process. Each run is a process of its own
with an empty cache folder (TORCHINDUCTOR_CACHE_DIR). The clock starts before torch.compile and
stops when the first backward is done; then it takes a step of another length, for which both
capture anew, with symbolic sizes, and one of a third length, for which nothing should be compiled.
Then ranks take a first step twice, in new processes that find the cache folder of the first.
"""

import os
import tempfile
import time
from argparse import Namespace

import torch
from contenders import BACKENDS, compiled, llama, ours
from runner import Benchmark, alone, benchmark, check_equal, log, median, seconds_of, take_turns

from paradyse.cli.launch import Rank

OPTIONS = {"layers": 24, "hidden": 256, "runs": 3, "ranks": 2}
LENGTHS = {
    512: "first, 512 tokens",
    640: "second, 640 tokens: symbolic sizes",
    576: "third, 576 tokens: nothing new",
}
CACHE = ("hit", "miss", "bypass")


def first_steps(backend: str, args: Namespace) -> list[tuple[float, float]]:
    """Seconds and loss of a step at each of ``LENGTHS``, the first with torch.compile."""
    model = llama(args.layers, args.hidden)
    found = []
    start = time.perf_counter()
    contender = compiled(model, backend)
    for seq_len in LENGTHS:
        loss = contender.loss(seq_len)
        found.append((time.perf_counter() - start, loss))
        start = time.perf_counter()
    return found


def first_step_of_ranks(rank: Rank, args: Namespace) -> dict[str, float]:
    """Seconds of a first step, and what the inner compiler found in ``args.folder``."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{args.folder}/{rank.rank}"
    contender = ours(llama(args.layers, args.hidden), "megatron_ts", "inductor")
    seconds = seconds_of(lambda: contender.loss(min(LENGTHS)))
    counted = torch._dynamo.utils.counters["inductor"]
    return {"seconds": seconds} | {k: counted[f"fxgraph_cache_{k}"] for k in CACHE}


@benchmark({"layers": 3, "hidden": 64, "runs": 1}, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> str:
    def run(backend: str) -> list[tuple[float, float]]:
        log(f"{backend} compiles in a process of its own ...")
        with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
            found = alone(first_steps, backend, args, TORCHINDUCTOR_CACHE_DIR=folder)
        log(backend, *(f"{s:.1f} s" for s, _ in found))
        return found

    turns = {b: lambda n, b=b: run(b) for b in BACKENDS}
    runs = {b: of[0] for b, of in take_turns(turns, [0], range(args.runs)).items()}
    rows, shares = [], []
    for i, (seq_len, name) in enumerate(LENGTHS.items()):
        check_equal({f"{b} at {seq_len} tokens": runs[b][0][i][1] for b in BACKENDS})
        theirs, mine = (median([r[i][0] for r in runs[b]]) for b in BACKENDS)
        rows.append([name, f"{theirs:.2f}", f"{mine:.2f}"])
        shares.append(mine / theirs)
    bench.add(
        f"Llama of {args.layers} layers, hidden {args.hidden}, one process, empty caches; seconds, "
        f"medians of {args.runs} runs."
    )
    bench.table(["step", *BACKENDS], rows)
    bench.at_most("first step, paradyse's time over inductor's", shares[0], 0.5)
    with tempfile.TemporaryDirectory(prefix="first-step-") as args.folder:
        found = [bench.on_ranks(first_step_of_ranks) for _ in range(2)]
    rows = [
        [name, f"{of['seconds']:.2f}", *(str(of[k]) for k in CACHE)]
        for name, of in zip(("first", "second"), found, strict=True)
    ]
    header = ["processes", "seconds", *(f"cache {k}" for k in CACHE)]
    about = f"{args.ranks} ranks, megatron_ts; the second ones find the first ones' cache."
    bench.table(header, rows, about)
    again = found[1]["seconds"] / found[0]["seconds"]
    bench.at_most("first step on ranks, with the cache over without", again, 0.7)
    return f"one process of {torch.get_num_threads()} threads"
