"""An optimizer's step on sharded weights, against FSDP2's and against as many plain rows.

    python benchmarks/optimizer_step.py            # a minute

Each rank steps on its rows of 200 weights of 256 x 256, and clips gradients before that. The rows
are the same whoever holds them; what differs is what each operator costs in Python, and messages.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from runner import Benchmark, benchmark, check_equal, median, milliseconds, seconds_of, take_turns
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

import paradyse
from paradyse.cli.launch import Rank

SHARDED, FSDP, PLAIN = "paradyse", "FSDP2", "plain rows"
WAYS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW, foreach": {"foreach": True},
    "AdamW, fused": {"fused": True},
    "SGD": {"momentum": 0.9},
    "SGD, foreach": {"momentum": 0.9, "foreach": True},
}
CLIP = "clip_grad_norm_"
OPTIONS = {"weights": 200, "width": 256, "runs": 15, "ranks": 2}
QUICK = {"weights": 10, "width": 16, "runs": 3}


def weights_of(name: str, num: int, width: int) -> tuple[list[nn.Parameter], Callable[..., Tensor]]:
    """Weights as contender ``name`` holds them, and what gives the rank's rows of one."""
    p, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    whole = [torch.randn(width, width) for _ in range(num)]
    model = nn.ParameterList(w.chunk(p)[rank].clone() if name == PLAIN else w for w in whole)
    if name == FSDP:
        fully_shard(model)
    elif name == SHARDED:
        paradyse.shard(model)
    rows = {FSDP: lambda x: x.to_local(), SHARDED: lambda x: x.local, PLAIN: lambda x: x}[name]
    for w in model.parameters():
        w.grad = w.detach().clone()
    return list(model.parameters()), rows


def measure(rank: Rank, args: Namespace) -> dict[str, Any]:
    """What is done -> contender -> seconds of each run."""
    found = {}
    for way, how in {**WAYS, CLIP: {}}.items():
        steps, sums = {}, {}
        for name in (SHARDED, FSDP, PLAIN):
            weights, rows = weights_of(name, args.weights, args.width)
            if way == CLIP:
                step: Callable[[], Any] = partial(clip_grad_norm_, weights, 1.0)
            else:
                step = getattr(torch.optim, way.split(",")[0])(weights, lr=1e-3, **how).step
            step()
            if (way, name) != (CLIP, PLAIN):  # which knows nothing of other ranks' rows
                of = [w.grad if way == CLIP else w for w in weights]
                sums[name] = sum(rows(x).detach().double().abs().sum().item() for x in of)
            steps[name] = lambda _, step=step: seconds_of(step)
        check_equal(sums)
        turns = take_turns(steps, [0], range(-3, args.runs))
        found[way] = {name: median(of[0]) for name, of in turns.items()}
        rank.report(f"{way} done")
    return found


@benchmark(QUICK, **OPTIONS, inner="eager")
def main(bench: Benchmark, args: Namespace) -> None:
    found = bench.on_ranks(measure)
    bench.add(
        f"{args.weights} weights of {args.width} x {args.width} over {bench.num_ranks} ranks, "
        f"gloo; medians of {args.runs} interleaved runs, ms."
    )
    rows = [
        [way, *map(milliseconds, of.values()), f"{of[FSDP] / of[SHARDED]:.2f}"]
        for way, of in found.items()
    ]
    bench.table(["step", SHARDED, FSDP, PLAIN, "FSDP2 / paradyse"], rows)
