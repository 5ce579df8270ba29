"""The runner that all benchmarks share: options, processes, turns, and the report.

``benchmark`` makes a function a command, and hands it a ``Benchmark``, which has the options and
the report. What it measures runs in this process, in fresh ones (``alone``) or on ranks
(``Benchmark.on_ranks``). Losses are compared before anything is timed (``check_equal``), and
contenders take turns (``take_turns``).
"""

import argparse
import logging
import multiprocessing
import os
import pkgutil
import platform
import random
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import date
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from paradyse.cli.charts import Line, Page
from paradyse.cli.launch import Rank, RanksFailed, Setting, choose_links, run_ranks
from paradyse.cli.links import parse_rate
from paradyse.cli.pages import WAY_OUT, write_png
from paradyse.planning.machine import describe_device

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"

WHERE = "folder of the report; default benchmarks/results, with --quick none is written"
OPTIONS: dict[str, Any] = {
    "quick": {"action": "store_true", "help": "tiny sizes, to see that it runs"},
    "report_only": {"action": "store_true", "help": "exit with 0 even if a goal is missed"},
    "out": {"type": Path, "metavar": "FOLDER", "help": WHERE},
}
"""Of every benchmark."""
LINKS: dict[str, Any] = {
    "link": {"type": parse_rate, "metavar": "RATE", "help": "what a rank may send, as 800mbit"},
    "like": {"metavar": "NAME", "help": "links in the ratio of a100-nvlink, h100-ib, ..."},
}
"""Of benchmarks on ranks; such a report is a file of its own, named after both."""
NAMED = ("family", "sharded", "learn", "profile_seconds")
"""Options that are in the name of the report where given, as another number of ranks is."""

K = TypeVar("K")
T = TypeVar("T")
median = statistics.median


def log(*words: object) -> None:
    """Shows progress."""
    print(*words, file=sys.stderr, flush=True)


@contextmanager
def fresh_process() -> Iterator[ProcessPoolExecutor]:
    """One that calls functions, one after the other. It does not outlive a block that is cut off,
    and neither does any that was started inside the block."""
    spawn, others = multiprocessing.get_context("spawn"), {*multiprocessing.active_children()}
    with ProcessPoolExecutor(1, spawn) as pool:
        try:
            yield pool
        except BaseException:
            for process in {*multiprocessing.active_children()} - others:
                process.kill()
            raise


def alone(function: Callable[..., T], *given: Any, **env: str) -> T:
    """``function(*given)`` in a fresh process, with ``env`` added to its environment."""
    with patch.dict(os.environ, env), fresh_process() as pool:
        return pool.submit(function, *given).result()


MANY_MODELS = {"recompile_limit": 256, "fail_on_recompile_limit_hit": True}
"""For Dynamo, which counts models that are compiled apart as recompilations of one function, and at
its limit would run them eagerly."""


def for_all() -> dict[str, Any]:
    """Dynamo's settings for all contenders: ``MANY_MODELS``, and to pass over what transformers
    logs once, which would break the graphs of others than ours."""
    once = getattr(logging.Logger, "warning_once", None)  # transformers adds it
    return MANY_MODELS | ({"ignore_logging_functions": {once}} if once else {})


def run_target(rank: Rank, target: str, args: argparse.Namespace) -> Any:
    """What runs on each rank: ``module:function``."""
    run = pkgutil.resolve_name(target)
    with torch._dynamo.config.patch(for_all()):
        return run(rank, args)


def seconds_of(step: Callable[[], object]) -> float:
    """Seconds of ``step()``; on several ranks from a common start, and of the slowest rank."""
    several = dist.is_initialized()
    if several:
        dist.barrier()
    start = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    if several:
        dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def take_turns(
    contenders: Mapping[K, Callable[[int], T]],
    lengths: Sequence[int],
    rounds: Iterable[int],
    tell: Callable[[str], object] = lambda text: None,
) -> dict[K, dict[int, list[T]]]:
    """What each contender returns at each length, round by round.

    A length may be there several times. The order is drawn anew each time, alike on all ranks: what
    follows one that leaves garbage behind, or a link's queue full, is slower. Rounds below 0 warm
    up and are not kept.
    """
    names, rng = list(contenders), random.Random(0)
    found: dict[K, dict[int, list[T]]] = {c: {n: [] for n in lengths} for c in names}
    for r in rounds:
        for n in lengths:
            for name in rng.sample(names, len(names)):
                result = contenders[name](n)
                if r >= 0:
                    found[name][n].append(result)
        tell("warmed up" if r < 0 else f"round {r + 1}")
    return found


def check_equal(losses: Mapping[str, float], tolerance: float = 1e-4) -> None:
    """Exits where a loss differs from the first by more than ``tolerance``, relative."""
    (name, reference), *others = losses.items()
    for other, loss in others:
        if not abs(loss - reference) <= tolerance * abs(reference):
            sys.exit(f"not timed: {other} gives loss {loss:.7g}, {name} {reference:.7g}")


def noise_of(differences: Sequence[float], level: float = 0.95) -> float:
    """What the median's absolute value stays below by chance, with a probability of ``level``.

    A permutation test of paired samples: if two things that take turns did not differ, either sign
    of each round's difference would be as likely as the other, so the medians of differences with
    random signs show how far a median strays by chance.
    """
    values = np.abs(np.asarray(differences, dtype=float))
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (4000, len(values)))
    return float(np.quantile(np.abs(np.median(signs * values, axis=1)), level))


def is_noise(differences: Sequence[float], level: float = 0.95) -> bool:
    """Whether the median of ``differences`` is one that chance gives."""
    return bool(abs(np.median(differences)) <= noise_of(differences, level))


def lines_of(times: Mapping[str, Mapping[int, float]]) -> tuple[Line, ...]:
    """Of a chart: per contender its seconds over lengths."""
    points = {c: tuple((n, of[n], True) for n in sorted(of)) for c, of in times.items()}
    return tuple(Line(c, p) for c, p in points.items())


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], above: str | None) -> list[str]:
    """Lines of a Markdown table."""
    first, *widths = (max(map(len, column)) for column in zip(header, *rows, strict=True))

    def line(cells: Sequence[str]) -> str:
        rest = [c.rjust(w) for c, w in zip(cells[1:], widths, strict=True)]
        return "| " + " | ".join([cells[0].ljust(first), *rest]) + " |"

    rule = "|".join(["", "-" * (first + 2), *("-" * (w + 1) + ":" for w in widths), ""])
    return [*([] if above is None else ["", above]), "", line(header), rule, *map(line, rows)]


class Report:
    """What is shown and written: lines, tables and goals, and the machine at the end.

    Args:
        name: its title, and the name of its file.
    """

    def __init__(self, name: str) -> None:
        self.name, self.dtype = name, "float32"
        self.lines: list[str] = []
        self.goals: list[str] = []
        self.missed = False

    def add(self, *lines: str) -> None:
        """Shows lines, and keeps them for the report."""
        self.lines += lines
        print(*lines, sep="\n", flush=True)

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[str]], above: str | None = None
    ) -> None:
        """A Markdown table, below a line; the first column is text, the others are numbers."""
        self.add(*_table(header, rows, above))

    def draft(
        self,
        folder: Path | None,
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        above: str | None = None,
    ) -> None:
        """Writes what there is so far into ``folder``, if there is one, with a ``table`` that is to
        have more rows: a run that is ended before its time leaves what it has measured."""
        if folder:
            self._save(folder, [*self.lines, *_table(header, rows, above), "", "Not complete."])

    def at_least(self, what: str, value: float, goal: float) -> None:
        self._goal(f"{what}: {value:.2f}, goal at least {goal:g}", value >= goal)

    def at_most(self, what: str, value: float, goal: float) -> None:
        self._goal(f"{what}: {value:.2f}, goal at most {goal:g}", value <= goal)

    def _goal(self, text: str, met: bool) -> None:
        self.goals.append(f"- {text}: {'met' if met else '**missed**'}")
        self.missed |= not met

    def write(self, folder: Path | None, threads: str) -> None:
        """Adds goals, machine and command, and writes the report into ``folder``, if there is one.

        Args:
            folder: made if need be.
            threads: what it ran on.
        """
        if self.goals:
            self.add("", "## Goals", "", *self.goals)
        self.add("", "## Machine", "", *(f"- {s}" for s in _machine(threads, self.dtype)))
        if folder:
            self._save(folder, self.lines)

    def _save(self, folder: Path, lines: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = "\n".join([f"# {self.name}", "", *lines]) + "\n"
        (folder / f"{self.name}.md").write_text(text)


class Benchmark(Report):
    """The report of one benchmark, with its options and its ranks.

    Args:
        name: of the file that the report is written to.
        doc: the benchmark's docstring, for ``--help``.
        quick: other defaults under ``--quick``: tiny sizes.
        options: name to default value, whose type is the option's. A tuple takes several values,
            and a dict is what ``add_argument`` is given. ``ranks`` and ``inner`` make a benchmark
            on ranks.
    """

    def __init__(
        self, name: str, doc: str | None, quick: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(name)
        if "ranks" in options:
            options |= LINKS
        parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        for option, default in (OPTIONS | options).items():
            given: dict[str, Any] = {"default": default, "type": type(default)}
            if isinstance(default, dict):
                given = dict(default)
            elif isinstance(default, tuple):
                given |= {"nargs": "*", "type": type(default[0])}
            flag = f"--{option.replace('_', '-')}"
            parser.add_argument(*given.pop("flags", [flag]), **given)
        self.args = parser.parse_args()
        if self.args.quick:
            parser.set_defaults(**quick or {})
            self.args = parser.parse_args()
        elif not self.args.out:
            self.args.out = RESULTS
        if isinstance(options.get("ranks"), int) and self.args.ranks != options["ranks"]:
            self.name += f"_{self.args.ranks}_ranks"
        named = {o: getattr(self.args, o, None) for o in NAMED}
        self.name += "".join(f"_{x if isinstance(x, str) else o}" for o, x in named.items() if x)

    @cached_property
    def rate(self) -> float | None:
        """Bits per second that each rank may send; the report tells of it."""
        if not (self.args.link or self.args.like):
            return None
        rate, words = choose_links(argparse.Namespace(**vars(self.args), usual=""), "cpu")
        self.name += "_links"
        self.add(words[0].upper() + words[1:], "")
        return rate

    def picture(self, page: Page) -> None:
        """Draw ``page`` beside the report, which shows it."""
        if self.args.out:
            self.args.out.mkdir(parents=True, exist_ok=True)
            drawn = write_png(self.args.out / f"{self.name}.png", page)
            self.add("", f"![times]({self.name}.png)" if drawn else f"No picture: {WAY_OUT}.")

    @property
    def num_ranks(self) -> str:
        return "two" if self.args.ranks == 2 else str(self.args.ranks)

    @property
    def ranks(self) -> str:
        """``two ranks, gloo, inner=inductor``"""
        return f"{self.num_ranks} ranks, gloo, inner={self.args.inner}"

    def on_ranks(self, measure: Callable[[Rank, argparse.Namespace], T]) -> T:
        """What rank 0 of ``--ranks`` returns of ``measure(rank, args)``, a function of a module of
        this folder. The lines that it reports are shown."""
        target = f"{Path(measure.__code__.co_filename).stem}:{measure.__name__}"
        path = [str(FOLDER), os.environ.get("PYTHONPATH", "")]
        env = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        setting = Setting(timeout_s=7200, silence_s=1800, env=env, rate=self.rate)
        how = {"target": target, "args": self.args}, setting, lambda _, line: log(line)
        try:
            return run_ranks("runner:run_target", self.args.ranks, *how)[0]
        except RanksFailed as e:
            sys.exit(str(e))

    def finish(self, threads: str | None = None) -> int:
        """Writes the report, if there is one, and returns the exit status.

        Args:
            threads: what the benchmark ran on; default: its ranks, of one thread each.
        """
        if not (self.lines or self.goals):
            return 0
        self.write(self.args.out, threads or f"{self.num_ranks} processes of one thread")
        return int(self.missed and not (self.args.report_only or self.args.quick))


Main = Callable[["Benchmark", argparse.Namespace], str | None]


def benchmark(
    quick: Mapping[str, Any] | None = None, **options: Any
) -> Callable[[Main], Callable[[], int]]:
    """Makes ``main(bench, args)``, the last function of a file, what the file runs.

    ``quick`` and ``options`` are those of ``Benchmark``. ``main`` returns what it ran on, as
    ``finish`` is told, and the command the exit status.
    """

    def decorate(main: Main) -> Callable[[], int]:
        def command() -> int:
            name = Path(main.__code__.co_filename).stem
            # so that what ranks need of the system, such as links, is given back
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
            bench = Benchmark(name, main.__globals__["__doc__"], quick, **options)
            with torch._dynamo.config.patch(MANY_MODELS):
                return bench.finish(main(bench, bench.args))

        if main.__module__ == "__main__":
            sys.exit(command())
        return command

    return decorate


def _machine(threads: str, dtype: str) -> list[str]:
    """The hardware, the versions and the command."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpu = describe_device(torch.device("cpu")).removeprefix("cpu, ")
    out = [
        f"{cpu}, {memory:.0f} GiB, {threads}, load {os.getloadavg()[0]:.1f} at the end",
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{version('transformers')}, {dtype}, {date.today().isoformat()}",
    ]
    if torch.cuda.is_available():
        d = torch.cuda.get_device_properties(0)
        out.append(
            f"{d.name}, {d.total_memory / 2**30:.0f} GiB, compute capability {d.major}.{d.minor}, "
            f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        )
    return [*out, f"`{shlex.join(['python', *sys.argv])}`"]
