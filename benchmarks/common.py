"""What the benchmarks share: the model, the machine, interleaved medians, the report."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"

VOCABULARY = 256
"""Byte-level tokens, as in ``paradyse demo``: the same small head for all contenders."""


def llama(
    layers: int, hidden: int, heads: int | None = None, kv_heads: int | None = None, **config: Any
) -> Any:
    """An unmodified HuggingFace Llama with random weights, equal on all ranks.

    Heads of width 32 and an MLP of 8/3 of the hidden width, unless said otherwise; ``config`` has
    any other field of a LlamaConfig.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = heads or hidden // 32
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": -(-hidden * 8 // 3 // 8) * 8,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads // 2,
        "max_position_embeddings": 65536,
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**{**fields, **config}))


def random_tokens(seq_len: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """[1, seq_len] int64, equal on all ranks."""
    generator = torch.Generator().manual_seed(seq_len)
    return torch.randint(vocabulary, (1, seq_len), generator=generator)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The flags that all benchmarks have."""
    out = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    out.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    out.add_argument(
        "--report-only", action="store_true", help="exit with 0 even if a goal is missed"
    )
    return out


def gpu() -> list[str]:
    """A line on the GPU, where there is one."""
    if not torch.cuda.is_available():
        return []
    d = torch.cuda.get_device_properties(0)
    return [
        f"{d.name}, {d.total_memory / 2**30:.0f} GiB, compute capability {d.major}.{d.minor}, CUDA "
        f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    ]


def machine(threads: str, dtype: str = "float32") -> list[str]:
    """Lines on what this ran on."""
    import transformers

    cpu = platform.processor() or platform.machine()
    memory = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            s.split(":")[1].strip() for s in info.read_text().splitlines() if "model name" in s
        ]
        cpu = names[0] if names else cpu
        total = int(Path("/proc/meminfo").read_text().split()[1])
        memory = f", {total / 2**20:.0f} GiB"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f", load {os.getloadavg()[0]:.1f} at the end" if hasattr(os, "getloadavg") else ""
    return [
        f"{cpu}, {cores} cores{memory}, {threads}{load}",
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {dtype}, {date.today().isoformat()}",
        *gpu(),
    ]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a markdown table; the first column is text, the others are numbers."""
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join([first, *rest]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2)] + ["-" * (w + 1) + ":" for w in widths[1:]]) + "|"
    return [line(header), rule, *map(line, rows)]


@dataclass(frozen=True)
class Goal:
    """A figure, and the least or most it may be."""

    what: str
    value: float
    limit: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        word = "at least" if self.at_least else "at most"
        state = "met" if self.met else "**missed**"
        return f"- {self.what}: {self.value:.2f}, goal {word} {self.limit:g}: {state}"


@dataclass
class Report:
    """Collects lines, shows them as they come, and leaves them in ``benchmarks/results``."""

    name: str
    args: argparse.Namespace
    lines: list[str] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    dtype: str = "float32"

    def add(self, *lines: str) -> None:
        self.lines += lines
        for line in lines:
            print(line, flush=True)

    def finish(self, threads: str) -> int:
        """Write the file (not for ``--quick``); the exit status."""
        self.add("", "## Goals", "", *map(str, self.goals), "", "## Machine", "")
        self.add(*(f"- {line}" for line in machine(threads, self.dtype)))
        if not self.args.quick:
            RESULTS.mkdir(exist_ok=True)
            text = "\n".join([f"# {self.name}", "", *self.lines]) + "\n"
            (RESULTS / f"{self.name}.md").write_text(text)
        missed = [g for g in self.goals if not g.met]
        return 1 if missed and not (self.args.report_only or self.args.quick) else 0


def check_equal(losses: Mapping[str, float], tolerance: float = 1e-4) -> None:
    """The first is the reference.

    Raises:
        SystemExit: a loss differs from it by more than ``tolerance``, relative.
    """
    (name, reference), *others = losses.items()
    for other, loss in others:
        if not abs(loss - reference) <= tolerance * abs(reference):
            sys.exit(f"not timed: {other} gives loss {loss:.7g}, {name} {reference:.7g}")
