"""Nothing but ``paradyse.torch_private`` reaches for what is not public in PyTorch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

NOT_PYTORCH = {"_ActionsContainer", "_exit", "_from_config", "_train_batch_size"}
"""Of argparse, os, transformers."""

OPERATORS = {
    "_foreach_zero_",
    "_is_all_true",
    "_is_any_true",
    "_local_scalar_dense",
    "_to_copy",
    "_unsafe_view",
}
"""Of ATen, with an underscore in their names in every version."""

HIDDEN = re.compile(
    r"(torch|triton)\b.*(\._|\.experimental\b)|torch\.(fx\.traceback|multiprocessing\.reductions)\b"
)


def names_of_ours(trees: list[ast.Module]) -> set[str]:
    """Everything that the source defines or assigns."""
    found = set()
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found | NOT_PYTORCH | OPERATORS


def private_reaches(tree: ast.Module, ours: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name) for name in found if HIDDEN.match(name))
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if HIDDEN.match(a.name))
        elif isinstance(node, ast.Attribute):
            hidden = node.attr.startswith("_") and not node.attr.startswith("__")
            if hidden and node.attr not in ours:
                yield node.lineno, ast.unparse(node)


def test_nothing_else_reaches_for_what_is_private() -> None:
    files = [
        f for folder in ("paradyse", "passes", "kernels") for f in (ROOT / folder).rglob("*.py")
    ]
    trees = {f: ast.parse(f.read_text()) for f in files if f.name != "torch_private.py"}
    ours = names_of_ours(list(trees.values()))
    found = [
        f"{f.relative_to(ROOT)}:{line}: {name}"
        for f, tree in trees.items()
        for line, name in private_reaches(tree, ours)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from torch._guards import tracing",
        "from torch.utils import _pytree as pytree",
        "import torch._dynamo",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "torch._C.f()",
        "op._schema",
        "triton.runtime._x",
    ],
)
def test_the_check_sees_what_is_private(source: str) -> None:
    assert list(private_reaches(ast.parse(source), set()))
