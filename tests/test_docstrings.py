"""What documents say of the code: parameters and errors of public functions, names of files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import paradyse

ROOT = Path(__file__).resolve().parent.parent

COMPLETE = ("paradyse", "passes", "kernels")
"""Folders."""

CONVENTIONS = {"self", "cls", "gm", "ctx", "names", "node"}
"""Parameters that mean the same everywhere; ``gm`` and ``ctx`` those of a pass, then of a rule."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files() -> list[Path]:
    found = (ROOT / name for name in COMPLETE)
    return sorted(f for p in found for f in (p.rglob("*.py") if p.is_dir() else (p,)))


def public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Functions and classes without a leading underscore, and such methods of such classes."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{prefix}{node.name}.")


def raised(node: ast.AST) -> Iterator[str]:
    """Names of the exceptions raised in ``node``'s own body, not in functions inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call):
            name = ast.unparse(child.exc.func)
            if name.endswith("Error"):
                yield name
        if not isinstance(child, Function | ast.ClassDef | ast.Lambda):
            yield from raised(child)


def lacks(node: Function | ast.ClassDef, module: str) -> Iterator[str]:
    """What ``node``'s docstring leaves out.

    A parameter is documented by a line under ``Args:`` or by its name in double backticks in the
    text, or in the docstring of the ``module`` for what means the same in all of it. Gradients of
    operators (``forward`` and ``backward`` of a ``ctx``) follow from them.
    """
    text = ast.get_docstring(node) or ""
    if isinstance(node, ast.ClassDef):
        if not text:
            yield "a docstring"
        return
    arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    if arguments[:1] == ["ctx"]:
        return
    section = text.partition("Args:\n")[2]
    entries = re.findall(r"^    (\w[\w, *]*):", section, re.M)
    documented = {name.strip(" *") for entry in entries for name in entry.split(",")}
    documented.update(re.findall(r"``(\w+)``", text + module), CONVENTIONS)
    yield from (f"the parameter {name}" for name in arguments if name not in documented)
    if "Raises:\n" not in text:
        yield from (f"that it raises {name}" for name in sorted(set(raised(node))))


@pytest.mark.parametrize("file", files(), ids=lambda f: f.relative_to(ROOT).as_posix())
def test_public_docstrings_are_complete(file: Path) -> None:
    tree = ast.parse(file.read_text())
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno} {name} lacks {what}"
        for name, node in public(tree.body)
        for what in lacks(node, ast.get_docstring(tree) or "")
    ]
    assert not found, "\n".join(found)


def test_the_public_api_is_documented() -> None:
    for name in paradyse._API:
        assert getattr(paradyse, name).__doc__, name


@pytest.mark.parametrize(
    "document", [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")], ids=lambda f: f.name
)
def test_files_named_in_documents_exist(document: Path) -> None:
    folders = ("paradyse", "passes", "kernels", "tests", "benchmarks", "examples")
    here = {f.as_posix() for folder in folders for f in (ROOT / folder).rglob("*.py")}
    named = re.findall(r"`([\w/]+\.py)`", document.read_text())
    missing = sorted({n for n in named if not any(f.endswith("/" + n) for f in here)})
    assert not missing, f"{document.name} names {missing}"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ('def f(x):\n    """Nothing of it."""', ["the parameter x"]),
        ('def f(x):\n    """Half of ``x``."""', []),
        ('def f(x, y):\n    """Sum.\n\n    Args:\n        x, y: two numbers.\n    """', []),
        ('def f():\n    """No."""\n    raise ValueError("no")', ["that it raises ValueError"]),
        ("class C:\n    pass", ["a docstring"]),
    ],
)
def test_the_check_sees_what_is_missing(source: str, what: list[str]) -> None:
    (node,) = ast.parse(source).body
    assert isinstance(node, Function | ast.ClassDef)
    assert list(lacks(node, "")) == what
