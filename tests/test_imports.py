"""Who may import whom: the table of the design, held against the imports in the source."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

EVERYTHING = frozenset({"*"})
ALLOWED: dict[str, frozenset[str]] = {
    "kernels": frozenset(),
    "types": frozenset(),
    "config": frozenset({"types"}),
    "mesh": frozenset({"types"}),
    "comm": frozenset({"types", "mesh", "kernels"}),
    "sharding": frozenset({"types", "kernels"}),  # kernels: the rules of our own operators
    "profiles": frozenset({"types"}),  # measurements as a file
    "cost": frozenset({"types", "profiles"}),
    "machine": frozenset({"types", "mesh", "comm", "cost"}),  # measures what cost computes with
    "lower": frozenset({"types"}),
    "saved": frozenset(),  # what autograd keeps
    "pieces": frozenset({"types", "sharding"}),  # a part of a graph at other sizes
    "replicas": frozenset({"mesh", "comm"}),  # the data-parallel axis
    "data": frozenset({"mesh"}),  # which batches a rank reads
    "weights": frozenset({"types", "mesh", "comm", "replicas"}),  # how a block takes its weights
    "deferred": frozenset({"types", "mesh", "comm"}),  # outputs gathered when first used
    "sharded_model": frozenset({"types", "mesh", "comm"}),  # the user's call that spreads weights
    "checkpoint": frozenset({"sharded_model"}),  # the user's calls that save and load a run
    "loading": frozenset({"types", "mesh", "comm"}),  # the user's call that reads weights
    "strategies": frozenset(
        {"types", "mesh", "sharding", "comm", "kernels", "lower", "pieces", "weights"}
    ),
    "passes": frozenset(
        {"types", "mesh", "comm", "sharding", "kernels", "pieces", "weights", "strategies"}
        | {"replicas"}
    ),
    "program": frozenset(  # the steps of a capture, and the frame of one call
        {"types", "mesh", "comm", "sharding", "lower", "pieces", "weights", "deferred"}
        | {"strategies", "passes", "replicas", "saved"}
    ),
    "capture": frozenset(
        {"config", "mesh", "sharding", "pieces", "strategies", "passes", "program"}
    ),
    "describe": frozenset({"types", "pieces", "strategies", "program"}),
    "solver": frozenset(),
    "time_ratios": frozenset(),  # estimates from noisy measurements
    "corrections": frozenset({"types", "cost", "time_ratios"}),  # what a run has shown of its costs
    "planner": frozenset({"types", "config", "cost", "corrections", "solver", "strategies"}),
    "devices": frozenset({"types", "cost"}),  # machines on paper
    "dry_run": frozenset(  # a model on ranks that are not there
        {"types", "config", "cost", "solver", "planner", "mesh", "comm", "kernels", "lower"}
        | {"pieces", "weights", "strategies", "passes", "program", "capture", "describe"}
        | {"saved"}
    ),
    "online": frozenset(  # costs fed back
        {"types", "comm", "cost", "corrections", "planner", "program", "saved", "time_ratios"}
    ),
    "switch": frozenset({"types", "mesh", "comm", "lower"}),
    "corpus": frozenset(),  # text for the command line
    "length_distributions": frozenset(),  # published ones, for traces
    "launch": frozenset(),  # its local ranks
    "integrations": frozenset(),  # its models
    **dict.fromkeys(
        ["__init__", "backend", "verification", "profiler", "cli", "report", "trainer"], EVERYTHING
    ),
}
"""Row: a module of the package, with those named after it (``cost`` and ``cost_forest``).
Its value: the rows that it may import, besides itself."""

PART_OF = {
    "token_ops": "comm",
    "shards": "comm",
    "chunks": "comm",
    "gathered": "weights",
    "frame": "program",
    "profiler_marks": "program",
}
"""Modules that belong to a row of another name."""

LEAVES = {"kernels": {"torch", "triton"}, "types": {"torch"}}
"""These import nothing beyond the standard library and what is named here."""

OPTIONAL = {
    "transformers": "paradyse/cli/models.py",
    "safetensors": "paradyse/checkpoint/load_safetensors.py",
    "accelerate": "paradyse/trainer.py",
    "matplotlib": "paradyse/cli/charts.py",
}
"""Not a dependency: the one file that may import it."""

DISTRIBUTIONS = {"scikit-learn": "sklearn"}
"""Dependencies whose import name is another."""


def source_files() -> list[Path]:
    folders = ("paradyse", "passes", "kernels")
    return sorted(f for folder in folders for f in (ROOT / folder).rglob("*.py"))


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    if parts[0] != "paradyse":
        parts = ("paradyse", *parts)
    return ".".join(parts)


MODULES = {module_name(f).removesuffix(".__init__") for f in source_files()}
MODULES |= {"paradyse.passes", "paradyse.kernels"}


def row_of(module: str) -> str:
    """The row of the table that a module of the package belongs to."""
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "__init__"
    rows = [row for row in ALLOWED if name == row or name.startswith(f"{row}_")]
    return PART_OF.get(name, max(rows, key=len, default=name))


def imports(source: str, module: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything ``source`` imports, at any depth of nesting.

    Name by name for ``from``: a submodule where there is one, else the module that it comes from.
    """
    package = module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield node.lineno, name if name in MODULES else base
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            name = node.args[0]
            if called in ("import_module", "importlib.import_module", "__import__"):
                # A computed name is one this test cannot follow, and so is refused.
                literal = isinstance(name, ast.Constant) and isinstance(name.value, str)
                yield node.lineno, name.value if literal else "?"


def violations(source: str, module: str, path: str) -> list[str]:
    """What ``source`` imports against the table, one line each."""
    found = []
    mine = row_of(module)
    if mine not in ALLOWED:
        return [f"{path}: paradyse.{mine} has no row in the table of {Path(__file__).name}"]
    for line, name in sorted(set(imports(source, module))):
        top = name.split(".")[0]
        where = f"{path}:{line}: "
        if top == "paradyse":
            theirs = row_of(name)
            free = ALLOWED[mine] is EVERYTHING or theirs in ALLOWED[mine] | {mine}
            if not free:
                found.append(f"{where}{mine} imports {name}; it may import {sorted(ALLOWED[mine])}")
        elif top in sys.stdlib_module_names:
            continue
        elif top in OPTIONAL:
            if path != OPTIONAL[top]:
                found.append(f"{where}{top} may be imported in {OPTIONAL[top]} alone")
        elif top not in LEAVES.get(mine, dependencies()):
            found.append(f"{where}{mine} imports {name}")
    return found


def dependencies() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = (d.split(";")[0].split(">")[0].split("=")[0].strip() for d in project["dependencies"])
    return {DISTRIBUTIONS.get(n, n) for n in names}


@pytest.mark.parametrize("file", source_files(), ids=lambda f: f.relative_to(ROOT).as_posix())
def test_imports_follow_the_table(file: Path) -> None:
    path = file.relative_to(ROOT).as_posix()
    found = violations(file.read_text(), module_name(file), path)
    assert not found, "\n".join(found)


def test_the_table_has_no_cycle_and_names_only_its_rows() -> None:
    below = {m: a for m, a in ALLOWED.items() if a is not EVERYTHING}
    assert all(a <= below.keys() for a in below.values())
    while ready := [m for m, a in below.items() if not a & below.keys()]:
        for m in ready:
            del below[m]
    assert not below, f"a cycle among {sorted(below)}"


@pytest.mark.parametrize(
    ("module", "source", "part"),
    [
        (
            "paradyse.distributed.collectives",
            "from paradyse import backend",
            "comm imports paradyse.backend",
        ),
        (
            "paradyse.distributed.collectives",
            "from . import backend",
            "comm imports paradyse.backend",
        ),
        (
            "paradyse.passes.place",
            "def f():\n    import paradyse.planning.planner",
            "passes imports",
        ),
        ("paradyse.kernels.ring", "import numpy as np", "kernels imports numpy"),
        (
            "paradyse.kernels.ring",
            "from ..mesh import Axis",
            "kernels imports paradyse.distributed.axis",
        ),
        ("paradyse.cli.main", "import transformers", "in paradyse/cli/models.py alone"),
        ("paradyse.cli.main", "import_module('transformers')", "in paradyse/cli/models.py alone"),
        ("paradyse.cli.main", "import pandas", "cli imports pandas"),
        ("paradyse.cli.main", "import passes", "cli imports passes"),
        ("paradyse.planning.costs", "importlib.import_module(name)", "cost imports ?"),
        ("paradyse.novelty", "", "has no row"),
    ],
)
def test_the_check_sees_what_is_not_allowed(
    module: str, source: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "MODULES", MODULES | {"paradyse.backend"})
    (found,) = violations(source, module, module.replace(".", "/") + ".py")
    assert part in found


def test_the_check_allows_what_the_table_allows() -> None:
    source = "import math, torch\nfrom paradyse.types import Plan\nfrom .mesh import Axis\n"
    assert not violations(
        source, "paradyse.distributed.collectives", "paradyse/distributed/collectives.py"
    )
