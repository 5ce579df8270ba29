"""Who may import whom: one ordered list of layers, held against the imports in the source."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS = (
    ("torch_private",),
    ("kernels", "types"),
    ("config",),
    ("distributed",),
    ("data", "graph", "token_scores", "weights"),
    ("checkpoint", "strategies"),
    ("passes",),
    ("runtime",),
    ("planning",),
    ("mixed", "profiling"),
    ("offline",),
    ("choice",),
    ("planned_program",),
    ("backend",),
    ("over_replicas",),
    ("accelerator", "reports", "verification"),
    ("trainer",),
    ("cli",),
    ("__main__",),
    ("__init__",),
)
"""Folders and modules of the root. Each imports only what stands above it, or within itself."""

NARROWER = {
    "checkpoint": {"distributed", "torch_private", "weights"},
    "data": {"distributed"},
}
"""Of what stands above, no more than this."""

LEAVES = {"kernels": {"torch", "triton"}, "torch_private": {"torch"}, "types": {"torch"}}
"""These import nothing beyond the standard library and what is named here."""

OPTIONAL = {
    "transformers": "paradyse/cli/models.py",
    "safetensors": "paradyse/checkpoint/load_safetensors.py",
    "accelerate": "paradyse/over_replicas.py",
    "altair": "paradyse/cli/drawing.py",
    "vl_convert": "paradyse/cli/drawing.py",
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
LEVEL = {name: i for i, layer in enumerate(LAYERS) for name in layer}


def folder_of(module: str) -> str:
    """The folder, or module of the root, that ``module`` belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


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


def may_import(mine: str, theirs: str) -> bool:
    if theirs == mine or mine == "__init__":  # whose public names are imported on first use
        return True
    if theirs == "__init__":  # the version
        return LEVEL[mine] >= LEVEL["backend"]
    allowed = NARROWER.get(mine)
    return LEVEL[theirs] < LEVEL[mine] and (allowed is None or theirs in allowed)


def violations(source: str, module: str, path: str) -> list[str]:
    """What ``source`` imports against the list, one line each."""
    found = []
    mine = folder_of(module)
    if mine not in LEVEL:
        return [f"{path}: paradyse.{mine} has no place in LAYERS of {Path(__file__).name}"]
    for line, name in sorted(set(imports(source, module))):
        top = name.split(".")[0]
        where = f"{path}:{line}: "
        if top == "paradyse":
            if not may_import(mine, folder_of(name)):
                found.append(f"{where}{mine} imports {name}")
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
def test_imports_follow_the_list(file: Path) -> None:
    path = file.relative_to(ROOT).as_posix()
    found = violations(file.read_text(), module_name(file), path)
    assert not found, "\n".join(found)


def test_no_two_modules_import_each_other() -> None:
    """Nor three in a circle: not within a folder either, nor for types alone."""
    graph = nx.DiGraph()
    for file in source_files():
        module = module_name(file)
        mine = module.removesuffix(".__init__")
        names = {name for _, name in imports(file.read_text(), module)}
        graph.add_edges_from((mine, n) for n in names if n in MODULES and mine != "paradyse")
    circles = [sorted(c) for c in nx.strongly_connected_components(graph) if len(c) > 1]
    assert not circles, circles


def test_no_file_is_longer_than_500_lines() -> None:
    folders = ("paradyse", "passes", "kernels", "tests", "benchmarks", "examples")
    files = (f for folder in folders for f in (ROOT / folder).rglob("*.py"))
    long = {f.name: n for f in files if (n := len(f.read_text().splitlines())) > 500}
    assert not long, long


@pytest.mark.parametrize(
    ("module", "source", "part"),
    [
        ("paradyse.distributed.axis", "from paradyse import backend", "imports paradyse.backend"),
        ("paradyse.distributed.axis", "from .. import backend", "imports paradyse.backend"),
        ("paradyse.passes.place", "def f():\n    import paradyse.planning", "passes imports"),
        ("paradyse.kernels.ring", "import numpy as np", "kernels imports numpy"),
        ("paradyse.kernels.ring", "from ..types import Plan", "kernels imports paradyse.types"),
        ("paradyse.weights.shard", "import paradyse.graph", "weights imports paradyse.graph"),
        ("paradyse.checkpoint.save", "import paradyse.graph", "checkpoint imports paradyse.graph"),
        ("paradyse.cli.main", "import transformers", "in paradyse/cli/models.py alone"),
        ("paradyse.cli.main", "import_module('transformers')", "in paradyse/cli/models.py alone"),
        ("paradyse.cli.main", "import pandas", "cli imports pandas"),
        ("paradyse.cli.main", "import passes", "cli imports passes"),
        ("paradyse.planning.costs", "importlib.import_module(name)", "planning imports ?"),
        ("paradyse.novelty", "", "has no place"),
    ],
)
def test_the_check_sees_what_is_not_allowed(module: str, source: str, part: str) -> None:
    (found,) = violations(source, module, module.replace(".", "/") + ".py")
    assert part in found


def test_the_check_allows_what_the_list_allows() -> None:
    source = "import math, torch\nfrom paradyse.types import Plan\nfrom .axis import Axis\n"
    assert not violations(source, "paradyse.distributed.tokens", "paradyse/distributed/tokens.py")


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their names alone."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def missing_names(source: str) -> list[str]:
    """What ``source`` imports of the package, and is not there."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        if node.module.partition(".")[0] == "paradyse":
            module = import_module(node.module)
            names = [a.name for a in node.names if not hasattr(module, a.name)]
            spec = getattr(module, "__path__", None)
            found += [n for n in names if not (spec and find_spec(f"{node.module}.{n}"))]
    return found


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples"])
def test_what_is_imported_when_it_is_needed_is_there(folder: str) -> None:
    """Inside functions too, of tests that seldom run."""
    files = sorted((ROOT / folder).rglob("*.py"))
    found = {f.name: missing_names(f.read_text()) for f in files}
    assert files and not {name for name, missing in found.items() if missing}, found
    gone = "def f():\n    from paradyse.types import Point, no_such_name\n"
    assert missing_names(gone) == ["no_such_name"]
