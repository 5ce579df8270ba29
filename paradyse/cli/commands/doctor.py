"""``paradyse doctor``: is everything here that the backend needs, and what it can do without?"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from paradyse.cli import launch
from paradyse.cli.json_output import show_json
from paradyse.cli.screen import make_console, show_table
from paradyse.planning.units import format_bytes

COMPILER = "clang++" if sys.platform == "darwin" else "g++"
"""What inductor calls where the environment has no ``CXX``; it looks for no other one."""
INSTALL = "pip install -e . in the checkout (make setup does it), with this Python"
"""This package, which is on no index."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    found: str
    problem: str = ""
    """What is missing, and the way out; empty: all is well."""
    advice: str = ""
    """What would be better; nothing fails for want of it."""

    @property
    def state(self) -> str:
        """In a word."""
        return "PROBLEM" if self.problem else "advice" if self.advice else "ok"


def _version(name: str, least: str = "", needed: str = "", way: str = "") -> Finding:
    """A distribution's version. ``needed``: what for, if it must be there, which ``way`` gets."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        way = way or f"pip install {name}"
        return Finding(name, "not installed", f"{needed}: {way}" if needed else "")
    numbers = [int(x) for x in version.split("+")[0].split(".")[:2] if x.isdigit()]
    if least and numbers < [int(x) for x in least.split(".")]:
        return Finding(name, version, f"too old: pip install '{name}>={least}'")
    return Finding(name, version)


def _optional(name: str, least: str, what_for: str, extra: str) -> Finding:
    """A distribution that the backend does without."""
    found = _version(name, least)
    install = f"{what_for}: pip install 'paradyse[{extra}]'"
    lacks = found.found == "not installed" or found.problem
    return Finding(name, found.found, advice=install if lacks else "")


def _device() -> Finding:
    import torch

    n = torch.cuda.device_count()
    if n:
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(n))
        return Finding("device", f"{n} GPU{'s' * (n > 1)}: {names}")
    from paradyse.planning.machine import device_capacity

    memory = format_bytes(device_capacity(torch.device("cpu")))
    return Finding("device", f"CPU, {launch.num_cores()} cores, {memory} usable")


def _allocator() -> Finding:
    """The launcher of the commands sets it; for ``torchrun`` it is the user's to set."""
    import torch

    if not torch.cuda.device_count():
        return Finding("CUDA allocator", "not used")
    settings = [os.environ[v] for v in launch.ALLOCATOR_VARIABLES if v in os.environ]
    if any(launch.EXPANDABLE in s for s in settings):
        return Finding("CUDA allocator", launch.EXPANDABLE)
    return Finding(
        "CUDA allocator",
        ", ".join(settings) or "default settings",
        advice=f"export {launch.ALLOCATOR_VARIABLES[0]}={launch.EXPANDABLE} before torchrun: "
        "lengths that vary fragment the memory of a GPU",
    )


def _compiler() -> Finding:
    """Inductor compiles C++ for CPUs; on GPUs Triton wants a C compiler for its launchers."""
    asked = os.environ.get("CXX")
    name = COMPILER if asked is None else asked
    if path := name and shutil.which(name):
        return Finding("C++ compiler", path)
    way = "apt-get install g++, or set CXX to another one"
    if asked is not None:
        way = "set CXX to one that is there, or unset it"
    return Finding(
        "C++ compiler",
        "none" if asked is None else f"none at CXX={asked!r}",
        f"inductor calls {name!r} and no other: {way}; without it use "
        "options={'inner': 'aot_eager'} (--inner aot_eager)",
    )


def _backends() -> Finding:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Finding("collectives", "none", "this torch was built without torch.distributed")
    there = {"gloo": dist.is_gloo_available(), "NCCL": dist.is_nccl_available()}
    found = ", ".join(f"{name} {'yes' if yes else 'no'}" for name, yes in there.items())
    problem = ""
    if not there["gloo"]:
        problem = "gloo is needed on CPUs: install a build that has it"
    elif torch.cuda.device_count() and not there["NCCL"]:
        problem = "NCCL is needed on GPUs: install a CUDA build of torch"
    return Finding("collectives", found, problem)


def _entry_point() -> Finding:
    import torch

    points = importlib.metadata.entry_points(group="torch_dynamo_backends")
    mine = [p for p in points if p.name == "paradyse"]
    if not mine:
        return Finding("backend", "not registered", INSTALL)
    if "paradyse" not in torch.compiler.list_backends(exclude_tags=()):
        return Finding("backend", f"{mine[0].value}, not known to Dynamo", INSTALL)
    return Finding("backend", f"backend='paradyse' is {mine[0].value}")


def _ranks() -> Finding:
    """Two processes and one all-reduce."""
    device = launch.choose_device("auto", 2)
    try:
        sums = launch.run_ranks(
            "paradyse.cli.rank_jobs:sum_of_ranks", 2, {}, launch.Setting(device, timeout_s=90)
        )
    except launch.RanksFailed as e:
        return Finding(
            "2 ranks",
            "failed",
            f"{e}\ncheck GLOO_SOCKET_IFNAME (lo for local ranks) and firewalls on loopback",
        )
    wrong = "" if sums == [1.0, 1.0] else f"an all-reduce of 0 and 1 gave {sums}"
    return Finding("2 ranks", f"an all-reduce works ({device})", wrong)


OPTIONAL = (
    ("transformers", "5.17", "every command but doctor makes its models by it", "hf"),
    ("accelerate", "", "AcceleratorMixin and HuggingFace's Trainer need it", "hf"),
    ("peft", "", "adapters need it", "hf"),
    ("safetensors", "", "load_safetensors and save_pretrained need it", "hf"),
    ("trl", "1.16", "TRL's trainers are in it", "trl"),
    ("altair", "5.5", "charts of plan, bench and demo are drawn by it", "plot"),
    ("vl-convert-python", "1.8", "charts of plan, bench and demo are drawn by it", "plot"),
)
"""Distribution, the least version ("": any), what it is for, and the extra that has it."""

CHECKS: tuple[Callable[[], Finding], ...] = (
    lambda: Finding("python", f"{platform.python_version()} ({sys.executable})"),
    lambda: _version("paradyse", needed="it is imported from a folder, not installed", way=INSTALL),
    lambda: _version("torch", "2.11", "the backend is one of torch's"),
    lambda: _version("triton"),
    *(partial(_optional, *row) for row in OPTIONAL),
    _device,
    _allocator,
    _compiler,
    _backends,
    _entry_point,
    _ranks,
)


def run_doctor(args: argparse.Namespace) -> int:
    """Every check, shown as ``args`` say; exit code 1 if one found what keeps the backend from
    running."""
    console = make_console(args.json)
    with console.status("looking around ..."):
        findings = [check() for check in CHECKS]
    rows = [(f.state, f.what, f.found) for f in findings]
    show_table(console, "what the backend needs", ("", "what", "found"), rows)
    problems = [f for f in findings if f.problem]
    if args.json:
        show_json({"ok": not problems, "findings": findings})
    for f in findings:
        if f.problem:
            console.print(f"{f.what}: {f.problem}", style="bold red")
        if f.advice:
            console.print(f"{f.what}: {f.advice}", style="yellow")
    if problems:
        return 1
    console.print(
        "The backend can run. To see inside: TORCH_LOGS='+paradyse' for logs, and the option "
        "'dump': folder for the graph after every pass.",
    )
    return 0
