"""Thousands of random steps over two ranks, beside one process that trains on the same batches.

    python tests/soak.py                              # 10,000 steps
    python tests/soak.py --steps 500                  # fewer
    python tests/soak.py --out-of-memory              # one rank runs out of memory now and then

Every step draws a length, a batch size, a mask (none, padding on either side, packed documents)
and a plan of a strategy per block from its number, so that all ranks draw the same. A small Llama
with sharded weights and AdamW must have the losses of the same Llama in one process, which each
rank trains beside it. Memory must stay flat, and what the package keeps for each workload bounded:
live objects of its classes and entries of their containers are counted.

With --out-of-memory an operator or a message of one rank raises ``torch.OutOfMemoryError``, in
forward or in backward; all ranks catch it, drop the batch, and go on.

The learning rate is such that training forgets how it rounds: at ten times as much, two trainings
in one process, from weights that differ by 1e-7, have losses that differ by 1e-5 after 4,000 steps
and by 4e-2 after 7,000; at this one by 3e-7 throughout.

The compiler of the pieces is "eager": with inductor the first hours would go to compiling every
strategy and mask, and what is asked here is about the steps after that.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import PATIENCE
from models import make_batch, make_model
from scripts import BENCHMARKS, TESTS, Report, options_of
from torch import Tensor

import paradyse
from paradyse.cli.launch import Rank, RanksFailed, Setting, run_ranks
from paradyse.distributed import collectives
from paradyse.distributed.session import Recent
from paradyse.planning import planner
from paradyse.types import ATTENTION_STRATEGIES, DSP, Plan, Workload

NUM_RANKS = 2
NUM_BLOCKS = 2
"""Attention and MLP of one layer."""
MASKS = ("plain", "left", "right", "packed")
LENGTHS, BATCHES = (3, 48), (1, 3)
LEARNING_RATE = 1e-4
TOLERANCE = 1e-4
"""Of a loss, relative."""
LOOK_EVERY = 250
"""Steps between two looks at memory and at what is kept."""
SETTLED = 1000
"""Memory is flat from this step on."""
GROWTH = 0.02
"""Share that counts as flat: what an allocator's fragments come to."""
CAPACITY = 64
"""Entries of each cache of the package, few enough to be full at half of the steps: whatever still
grows then has no bound."""
MORE = 0.01
"""Share of live objects and entries by which they may differ between two looks."""
FAIL_SHARE = 0.05
"""Of steps that run out of memory, with --out-of-memory."""


@dataclass
class Look:
    """What a rank holds after so many steps."""

    step: int
    step_s: float
    """Median of the steps since the last look, the reference's included."""
    worst: float
    """Largest relative difference of a loss since the last look."""
    loss: float
    rss_bytes: int
    tensor_bytes: int
    """Of the storages of all live tensors."""
    held: Counter[str] = field(default_factory=Counter)
    """Class of the package, or its attribute -> live objects, or entries."""
    failed: int = 0
    """Steps so far that ran out of memory."""


class Shortage:
    """Lets an operator or a message of one rank run out of memory."""

    SITES = ("silu", "silu_backward", "message")

    def __init__(self, rank: int) -> None:
        self.rank, self.site, self.left = rank, "", 0
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("silu", self._silu, "CPU")
        self._library.impl("silu_backward", self._silu_backward, "CPU")
        self._start, collectives._start = collectives._start, self._message

    @contextlib.contextmanager
    def during(self, draw: random.Random) -> Iterator[None]:
        """Inside, one of the next calls of a site that ``draw`` chooses raises on one rank, in some
        of the steps."""
        fails, rank = draw.random() < FAIL_SHARE, draw.randrange(NUM_RANKS)
        site, calls = draw.choice(self.SITES), draw.randint(1, 20)
        self.site = site if fails and rank == self.rank else ""
        self.left = calls if site == "message" else 1
        try:
            yield
        finally:
            self.site = ""

    def _reach(self, site: str) -> None:
        if site == self.site:
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError(f"no memory for {site}, as this script has it")

    def _silu(self, x: Tensor) -> Tensor:
        self._reach("silu")
        return x * x.sigmoid()

    def _silu_backward(self, grad: Tensor, x: Tensor) -> Tensor:
        self._reach("silu_backward")
        s = x.sigmoid()
        return grad * s * (1 + x * (1 - s))

    def _message(
        self, what: str, x: Tensor, axis: Any, block_id: int, *args: Any, **kwargs: Any
    ) -> Any:
        if block_id != collectives.AGREEMENT:  # by which ranks tell each other of the shortage
            self._reach("message")
        return self._start(what, x, axis, block_id, *args, **kwargs)


class Soak:
    """Both trainings, on one rank."""

    def __init__(self, rank: Rank, args: argparse.Namespace) -> None:
        Recent.CAPACITY = planner.MOST_PLANS = CAPACITY
        self.seed = args.seed
        self.plan: Any = Plan(("colossal_z",) * NUM_BLOCKS)
        sizes = {"num_hidden_layers": 1, "hidden_size": 32}
        self.reference = make_model("llama", **sizes)
        self.model = make_model("llama", **sizes)
        paradyse.shard(self.model)
        self.optimizers = [
            torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE)
            for m in (self.reference, self.model)
        ]
        options = {"inner": "eager", "plan": "auto" if args.plan == "auto" else self.plan_of}
        self.compiled: Any = torch.compile(
            self.model, backend="paradyse", dynamic=True, options=options
        )
        self.shortage = Shortage(rank.rank) if args.out_of_memory else None
        self.failed = 0

    def plan_of(self, workload: Workload) -> Plan:
        """The option ``plan``."""
        plan: Plan = self.plan
        return plan

    def step(self, number: int) -> tuple[float, float] | None:
        """Losses over the ranks and of one process; None where memory ran out."""
        draw = random.Random(f"{self.seed} {number}")
        how, batch_size = draw.choice(MASKS), draw.randint(*BATCHES)
        batch = make_batch(how, batch_size, draw.randint(*LENGTHS), seed=number)
        of = [s for s in ATTENTION_STRATEGIES if s != DSP or batch_size > 1]  # it needs a batch
        self.plan = Plan(tuple(draw.choice(of) for _ in range(NUM_BLOCKS)))
        reference, optimizer = self.optimizers
        optimizer.zero_grad()
        try:
            with self.shortage.during(draw) if self.shortage else contextlib.nullcontext():
                loss = self.compiled(**batch).loss
                loss.backward()
        except torch.OutOfMemoryError:
            self.failed += 1
            return None
        optimizer.step()
        reference.zero_grad()
        expected = self.reference(**batch).loss
        expected.backward()
        reference.step()
        return loss.item(), expected.item()


def train(rank: Rank, args: argparse.Namespace) -> list[Look]:
    """What runs on each rank."""
    soak, looks = Soak(rank, args), []
    seconds, differences, loss = [], [0.0], 0.0
    for number in range(1, args.steps + 1):
        start = time.perf_counter()
        losses = soak.step(number)
        seconds.append(time.perf_counter() - start)
        if losses is not None:
            loss, expected = losses
            differences.append(abs(loss - expected) / abs(expected))
        if number % LOOK_EVERY == 0 or number == args.steps:
            step_s, worst = statistics.median(seconds), max(differences)
            looks.append(
                Look(number, step_s, worst, loss, *memory(), held_by_package(), soak.failed)
            )
            rank.report(looks[-1])
            seconds, differences = [], [0.0]
    return looks


def memory() -> tuple[int, int]:
    """Bytes of this process that are resident, and of the storages of live tensors."""
    gc.collect()
    storages = {}
    for x in gc.get_objects():
        if issubclass(type(x), Tensor) and type(x) in (Tensor, torch.nn.Parameter):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return resident * os.sysconf("SC_PAGE_SIZE"), sum(storages.values())


def held_by_package() -> Counter[str]:
    """Live objects of the package's classes, and entries of their containers and caches."""
    found: Counter[str] = Counter()
    for x in gc.get_objects():
        cls = type(x)
        if not str(cls.__module__).startswith("paradyse."):
            continue
        found[cls.__name__] += 1
        if issubclass(cls, dict | list | set):
            found[f"{cls.__name__}, entries"] += len(x)
        for name, value in (getattr(x, "__dict__", None) or {}).items():
            if type(value) in (dict, list, set, deque):
                found[f"{cls.__name__}.{name}"] += len(value)
            elif hasattr(type(value), "cache_info"):
                found[f"{cls.__name__}.{name}"] += value.cache_info().currsize
    for module in [m for n, m in sys.modules.items() if n.startswith("paradyse.")]:
        for name, value in vars(module).items():
            if hasattr(type(value), "cache_info"):
                found[f"{module.__name__}.{name}"] = value.cache_info().currsize
    return found


def tell(look: Look) -> None:
    """Shows progress."""
    print(
        f"step {look.step}: {look.step_s * 1e3:.0f} ms, loss {look.loss:.4f}, off by "
        f"{look.worst:.1e}, {look.rss_bytes / 2**20:.0f} MiB, {look.held.total()} objects and "
        f"entries, {look.failed} failed",
        file=sys.stderr,
        flush=True,
    )


def judge(ranks: list[list[Look]], args: argparse.Namespace, report: Report) -> None:
    """Adds what the looks of all ranks show to ``report``."""
    first = ranks[0]
    report.add(
        f"Llama of one layer, hidden 32, sharded over {NUM_RANKS} ranks, AdamW, inner=eager, plans "
        f"{args.plan}, {args.steps:,} steps, seed {args.seed}"
        + (", one rank runs out of memory now and then." if args.out_of_memory else ".")
    )
    shown = [x for x in first if x.step % SETTLED == 0 or x is first[-1]]
    rows = [
        [
            f"{x.step:,}",
            f"{x.step_s * 1e3:.0f}",
            f"{x.loss:.4f}",
            f"{max(y.worst for y in first if y.step <= x.step):.1e}",
            f"{x.rss_bytes / 2**20:.1f}",
            f"{x.tensor_bytes / 2**10:.0f}",
            f"{x.held.total():,}",
            str(x.failed),
        ]
        for x in shown
    ]
    report.table(
        ["steps", "ms a step", "loss", "worst so far", "RSS, MiB", "tensors, KiB"]
        + ["objects and entries", "out of memory"],
        rows,
    )
    worst = max(x.worst for looks in ranks for x in looks)
    report.at_most("largest difference of a loss, in 1e-4", worst / TOLERANCE, 1)
    differ = len({tuple(x.failed for x in looks) for looks in ranks})
    report.at_most("different counts of failed steps on the ranks", differ, 1)
    if args.out_of_memory:
        report.at_least("steps that ran out of memory", first[-1].failed, args.steps // 100)
    if args.steps >= 4 * SETTLED:
        judge_growth(ranks, report)
    else:
        report.add("", f"Growth is judged from {4 * SETTLED:,} steps on.")


def judge_growth(ranks: list[list[Look]], report: Report) -> None:
    """Adds to ``report`` by how much memory grew since ``SETTLED``, and what the package holds
    since half of the steps, when its caches are full."""
    for what in ("rss_bytes", "tensor_bytes"):
        growth = max(_growth([getattr(x, what) for x in looks[3:]]) for looks in ranks)
        report.at_most(f"growth of {what} after {SETTLED:,} steps, %", 100 * growth, 100 * GROWTH)
    for looks in ranks:
        half, last = looks[len(looks) // 2].held, looks[-1].held
        grown = {n: (half[n], last[n]) for n in last if last[n] > half[n]}
        more = 100 * sum((last - half).values()) / half.total()
        what = f"objects and entries more than at half of the steps, % ({grown or 'none'})"
        report.at_most(what, more, 100 * MORE)


def _growth(values: list[int]) -> float:
    """Of the median of the last quarter over that of the first."""
    quarter = max(1, len(values) // 4)
    first, last = (statistics.median(v) for v in (values[:quarter], values[-quarter:]))
    return last / first - 1


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="default: 10,000")
    parser.add_argument("--seed", type=int, default=0)
    plans = {"choices": ("mixed", "auto"), "default": "mixed"}
    parser.add_argument("--plan", **plans, help="drawn anew in each step (default), or chosen")
    parser.add_argument("--out-of-memory", action="store_true", help="see above")
    args = parser.parse_args()
    # On a path of its own: ranks find this module, and the runner that fixes Dynamo's limits.
    env = {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, BENCHMARKS)))}
    setting = Setting("cpu", timeout_s=args.steps * PATIENCE + 600, silence_s=600, env=env)
    what = {"target": "soak:train", "args": args}
    report = Report("soak_out_of_memory" if args.out_of_memory else "soak")
    try:
        ranks = run_ranks("runner:run_target", NUM_RANKS, what, setting, lambda _, look: tell(look))
    except RanksFailed as e:
        sys.exit(str(e))
    judge(ranks, args, report)
    report.write(args.out, "two processes of one thread")
    return int(report.missed)


if __name__ == "__main__":
    sys.exit(main())
