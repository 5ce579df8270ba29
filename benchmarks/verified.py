"""Every strategy against one device, eager: two ranks, which share a GPU where there is one.

    python benchmarks/verified.py                   # 5 min: a Llama of two layers, both dtypes
    python benchmarks/verified.py --quick           # tiny

What `paradyse verify` says of loss and gradients, in float32 and bfloat16. Two ranks on one GPU
talk over gloo, which takes tensors of a GPU through the host: NCCL has one rank a device. So this
is right or wrong, and no measure of time.
"""

from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from contenders import llama
from runner import Benchmark, benchmark

from paradyse.cli import rank_jobs
from paradyse.cli.launch import Rank, RanksFailed
from paradyse.verification import VerifyReport

OPTIONS: dict[str, Any] = {"ranks": 2, "inner": "inductor", "tokens": 1021, "batch": 2}
OPTIONS |= {"layers": 2, "hidden": 512, "dtypes": ("float32", "bfloat16")}
QUICK = {"tokens": 61, "hidden": 64, "inner": "eager"}


def measure(rank: Rank, args: Namespace) -> dict[str, VerifyReport]:
    """By dtype."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank.rank % torch.cuda.device_count())
        rank = replace(rank, device="cuda")
    found = {}
    for name in args.dtypes:
        make = partial(_model, args, getattr(torch, name))
        given = args.batch, args.tokens, {"inner": args.inner}
        found[name] = rank_jobs.verify(rank, make, *given)
        rank.report(f"{name}: {'all right' if found[name].ok else 'WRONG'}")
    return found


def _model(args: Namespace, dtype: torch.dtype) -> torch.nn.Module:
    model: torch.nn.Module = llama(args.layers, args.hidden).to(dtype)
    return model


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> None:
    bench.dtype = ", ".join(args.dtypes)
    bench.add(
        f"Llama of hidden {args.hidden}, {args.layers} layers, batch {args.batch}, {args.tokens} "
        f"tokens, {bench.ranks}: relative errors against one device, eager."
    )
    header = ["plan", "loss", "worst gradient", "of, or why not"]
    for name in list(args.dtypes):
        args.dtypes = (name,)
        try:
            report = bench.on_ranks(measure)[name]
        except SystemExit as e:  # the other dtype is still of use
            if not isinstance(e.__context__, RanksFailed):
                raise
            bench.add(f"## {name}", "", f"Ended: {e}", "")
            bench.at_most(f"{name}: runs that ended before all plans were tried", 1, 0)
            continue
        rows = [
            [
                r.plan,
                "not feasible" if r.infeasible else f"{r.loss_error:.1e}",
                "" if r.infeasible else f"{r.gradient_error:.1e}",
                r.infeasible or r.worst_gradient,
            ]
            for r in report.rows
        ]
        bench.draft(args.out, header, rows, f"## {name}")
        bench.table(header, rows, f"## {name}")
        bench.at_most(f"{name}: plans that are wrong", sum(not r.ok for r in report.rows), 0)
