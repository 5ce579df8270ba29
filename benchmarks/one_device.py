"""One GPU: a training step of an unmodified Llama of 1.1 billion parameters, long sequences.

    python benchmarks/one_device.py                     # 32K and 128K tokens
    python benchmarks/one_device.py --lengths 16384     # other lengths
    python benchmarks/one_device.py --backends paradyse --profile  # and where its time goes
    python benchmarks/one_device.py --quick             # tiny, also on a CPU, to see that it runs

torch.compile(backend="paradyse") against torch.compile(backend="inductor"): HuggingFace's Llama in
the shape of TinyLlama-1.1B (22 layers, hidden 2,048, 32 heads and 4 KV heads of width 64, MLP
5,632, vocabulary 32,000), bfloat16, batch 1. From --checkpoint-from tokens on with HuggingFace's
activation checkpointing, for both.

Every contender at every length is a process of its own, which compiles, warms up, and then takes
turns with the other one, --rounds times: so a peak of memory is one contender's, and one that runs
out of memory takes nobody along; the table then says so. Between its turns a process holds no
memory but its weights and their gradients. --side-by-side has all compile at the same time, for
lengths that the device has the memory for together: what runs out of it there may have run into
what others held, and `auto` plans as if it were alone. What is compared of gradients is the
projection of each on a random vector. The peak is the allocator's
(torch.cuda.max_memory_allocated). --profile adds, for each contender and length, the kernels that
take most of the time of one more step. The report is written anew after every round.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, TypeVar

import torch
from contenders import BACKENDS, Contender, compiled, llama
from runner import Benchmark, benchmark, check_equal, fresh_process, log, median, take_turns

from paradyse.distributed.failures import is_out_of_memory
from paradyse.runtime.runs import FUSE_AFTER, FUSED_TOKENS

T = TypeVar("T")

OPTIONS: dict[str, Any] = {"lengths": (32768, 131072), "steps": 5, "rounds": 2}
OPTIONS |= {"checkpoint_from": 32768, "seconds": 600.0}
OPTIONS["side_by_side"] = {"action": "store_true", "help": "all compile at the same time"}
OPTIONS["backends"] = {"nargs": "+", "choices": BACKENDS, "default": list(BACKENDS)}
OPTIONS["profile"] = {"action": "store_true", "help": "the kernels that take most of the time"}
QUICK: dict[str, Any] = {"lengths": (128, 192), "steps": 2, "rounds": 1, "checkpoint_from": 192}
TINY_LLAMA = {"layers": 22, "hidden": 2048, "heads": 32, "kv_heads": 4}
TINY_LLAMA |= {"vocabulary": 32000, "intermediate": 5632}
"""Zhang et al., TinyLlama, arXiv 2401.02385, table 2."""

MOST_KERNELS = 20
"""In a table of what was profiled."""

WARM_UP = 2
"""Steps of each run that are not timed: they compile."""
STEADY = FUSE_AFTER + 2
"""As many of a sequence so short that blocks run together once their plan is used often."""

TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
"""Of a gradient's projection, relative to its norm: bfloat16 rounds every activation to 2^-9."""


@dataclass(frozen=True)
class Seen:
    """What one process saw, but for the time of its steps."""

    peak_gib: float
    loss: float
    projections: dict[str, tuple[float, float]]
    """Of each gradient: its product with a random vector of unit length, and its norm."""
    kernels: list[tuple[str, int, float]]
    """Name, calls and milliseconds of those that a profiled step spent most time in."""


@dataclass(frozen=True)
class Prepared:
    """What a process keeps between its turns."""

    contender: Contender
    seq_len: int
    args: Namespace


_prepared: list[Prepared] = []
"""In a process of a contender: the one that it is."""


def or_none(turn: Callable[..., T], *given: Any) -> T | None:
    """``turn(*given)``, in a process of its own; None where it runs out of memory. What is free
    again is given back to the device."""
    try:
        return turn(*given)
    except Exception as e:
        if not is_out_of_memory(e):
            raise
        _prepared.clear()
        return None
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def prepare(backend: str, seq_len: int, dtype: str, args: Namespace) -> bool:
    """Compiles and warms up."""
    cuda = torch.cuda.is_available()
    sizes: Any = {"layers": 2, "hidden": 64} if args.quick else TINY_LLAMA
    with torch.device("cuda" if cuda else "cpu"):  # where random weights take no time
        model = llama(**sizes, max_tokens=max(seq_len, 2048))
    model.to(getattr(torch, dtype)).train()
    if seq_len >= args.checkpoint_from:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    contender = compiled(model, backend)
    for _ in range(STEADY if seq_len <= FUSED_TOKENS else WARM_UP):
        contender.loss(seq_len)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    _prepared.append(Prepared(contender, seq_len, args))
    return True


def time_steps() -> list[float]:
    """Seconds of each step of a turn; the first one finds the allocator empty and is left out."""
    mine = _prepared[0]
    end = time.monotonic() + mine.args.seconds
    mine.contender.loss(mine.seq_len)
    seconds = [mine.contender.time_s(mine.seq_len)]
    while len(seconds) < mine.args.steps and time.monotonic() < end:
        seconds.append(mine.contender.time_s(mine.seq_len))
    return seconds


def look() -> Seen:
    """What there is to see behind the last turn."""
    contender, seq_len, args = (mine := _prepared[0]).contender, mine.seq_len, mine.args
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    loss, found = contender.loss(seq_len), {}
    for i, (name, grad) in enumerate(contender.gradients().items()):
        torch.manual_seed(i)
        direction = torch.randn_like(grad, dtype=torch.float32)
        product = (grad.float() * direction).sum() / direction.norm()
        found[name] = float(product), float(grad.float().norm())
    return Seen(peak, loss, found, profiled(contender, seq_len) if args.profile else [])


class Resident:
    """A contender at a length, in the process of ``pool``."""

    def __init__(self, pool: ProcessPoolExecutor, *given: Any) -> None:
        self._pool, self.seconds = pool, list[float]()
        self.seen: Seen | None = None
        self._ready = pool.submit(or_none, prepare, *given)

    @cached_property
    def fits(self) -> bool:
        """Whether it had the memory to compile and warm up; waits until it has."""
        return bool(self._ready.result())

    def take_turn(self, seq_len: int) -> None:
        """Steps of ``seq_len``, the length that it is for."""
        if not self.fits:
            return
        found = self._pool.submit(or_none, time_steps).result()
        if found is None:
            self.fits = False
        else:
            self.seconds += found

    def look(self) -> Seen | None:
        """What it saw; None where it ran out of memory."""
        seen = self._pool.submit(or_none, look).result() if self.fits else None
        self.fits = seen is not None
        return seen


def profiled(contender: Contender, seq_len: int) -> list[tuple[str, int, float]]:
    """``Run.kernels`` of one step: kernels on a GPU, operators on a CPU."""
    with torch.profiler.profile() as found:
        contender.loss(seq_len)
    # ranges that were marked on the host are on the device's line too
    events = [e for e in found.key_averages() if not e.is_user_annotation]
    on_device = [e for e in events if e.device_type != torch.autograd.DeviceType.CPU]
    if on_device:
        rows = [(e.key, e.count, e.self_device_time_total / 1e3) for e in on_device]
    else:
        rows = [(e.key, e.count, e.self_cpu_time_total / 1e3) for e in events]
    return sorted(rows, key=lambda row: -row[2])


def show_kernels(bench: Benchmark, what: str, seen: Seen) -> None:
    """A table of the kernels that were ``seen``."""
    total = sum(ms for *_, ms in seen.kernels)
    rows = [
        [name.replace("|", "/")[:70], str(n), f"{ms:.2f}", f"{ms / total:.1%}"]
        for name, n, ms in seen.kernels[:MOST_KERNELS]
    ]
    title = f"### {what}: {total:.1f} ms in {sum(n for _, n, _ in seen.kernels):,} calls"
    bench.table(["kernel", "calls", "ms", "share"], rows, title)


def compare(reference: Seen, other: Seen, tolerance: float) -> None:
    """Exits where the loss or a gradient is not inductor's."""
    check_equal({"inductor": reference.loss, "paradyse": other.loss}, tolerance)
    for name, (projection, norm) in reference.projections.items():
        error = abs(other.projections[name][0] - projection) / norm
        if not error <= tolerance:
            sys.exit(f"not timed: the gradients of {name} differ by {error:.1e}")


def row_of(seq_len: int, turns: dict[str, Resident], checkpointing: bool) -> list[str]:
    """Of the table: times, their ratio, peaks."""
    times = [median(of.seconds) if of.fits else 0.0 for of in turns.values()]
    cells = [f"{t:.3f}" if t else "out of memory" for t in times]
    ratio = f"{times[0] / times[1]:.2f}" if len(times) == 2 and all(times) else ""
    peaks = [of.seen.peak_gib if of.seen else 0.0 for of in turns.values()]
    what = f"{seq_len:,} tokens" + ", checkpointing" * checkpointing
    return [what, *cells, ratio, *(f"{p:.1f}" if p else "" for p in peaks)]


def measure(
    bench: Benchmark,
    seq_len: int,
    turns: dict[str, Resident],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> list[str]:
    """One more of the ``rows``, of the contenders at one length, which agree."""
    args = bench.args
    for r in range(args.rounds if any(one.fits for one in turns.values()) else 0):
        take_turns({b: one.take_turn for b, one in turns.items()}, [seq_len], [r])
        row = row_of(seq_len, turns, seq_len >= args.checkpoint_from)
        log(f"round {r + 1}: {row}")
        bench.draft(args.out, header, [*rows, row])
    for one in turns.values():
        one.seen = one.look()
    seen = [turns[b].seen for b in BACKENDS if b in turns]
    if len(seen) == 2 and seen[0] and seen[1]:
        compare(seen[0], seen[1], TOLERANCE[bench.dtype])
    return row_of(seq_len, turns, seq_len >= args.checkpoint_from)


@benchmark(QUICK, **OPTIONS)
def main(bench: Benchmark, args: Namespace) -> str:
    cuda = torch.cuda.is_available()
    if not args.quick and not cuda:
        sys.exit(
            "one_device needs a CUDA device, and PyTorch sees none; `--quick` runs a tiny model on "
            "the CPU, one_process.py is the same comparison for CPUs"
        )
    bench.dtype = "bfloat16" if cuda else "float32"
    columns = [[f"{b}{what}" for b in args.backends] for what in (", s", " peak, GiB")]
    header = ["length", *columns[0], "ratio", *columns[1]]
    bench.add(
        "Training step of a Llama of 1.1 billion parameters on one device, batch 1, medians of "
        f"at most {args.rounds} x {args.steps} steps; ratio: {' / '.join(args.backends[:2])}."
    )
    rows, profiles = list[list[str]](), []
    for together in [args.lengths] if args.side_by_side else [[n] for n in args.lengths]:
        with ExitStack() as stack:
            every: dict[int, dict[str, Resident]] = {n: {} for n in together}
            for n, b in product(together, args.backends):
                process = stack.enter_context(fresh_process())
                every[n][b] = one = Resident(process, b, n, bench.dtype, args)
                if not args.side_by_side:
                    log(f"{n:,} tokens, {b}: {'ready' if one.fits else 'out of memory'}")
            # which waits: all are idle when one is timed
            fit = sum(one.fits for turns in every.values() for one in turns.values())
            log(f"{fit} of {len(together) * len(args.backends)} fit")
            for n, turns in every.items():
                rows.append(measure(bench, n, turns, header, rows))
                bench.draft(args.out, header, rows)
                seen = [(f"{n:,} tokens, {b}", one.seen) for b, one in turns.items()]
                profiles += [(what, s) for what, s in seen if s and args.profile]
                for what, s in seen:  # the tables come behind all lengths
                    log(what, *(f"\n{call}" for call in (s.kernels[:MOST_KERNELS] if s else ())))
    bench.table(header, rows)
    for what, s in profiles:
        show_kernels(bench, what, s)
    return "one GPU" if cuda else "the CPU, tiny"
