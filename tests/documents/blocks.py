"""Blocks of code in the documents (fenced Python, and indented commands, graphs and formulas), and
the examples in docstrings of public names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import paradyse

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Block:
    """A block of a document."""

    document: str
    """Its path from the root, or ``help(paradyse.name)``."""
    line: int
    """Where it starts."""
    language: str
    """"python", or "" of indented lines."""
    text: str

    @property
    def at(self) -> str:
        """For people: which block it is."""
        return f"{self.document}:{self.line}"


def documents() -> list[Path]:
    """README, CONTRIBUTING and all of docs/ and benchmarks/README.md."""
    return [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "benchmarks" / "README.md",
    ]


def blocks_of(document: Path) -> Iterator[Block]:
    """All blocks of a document, in order."""
    yield from blocks_in(document.read_text(), document.relative_to(ROOT).as_posix())


def blocks_in(text: str, name: str) -> Iterator[Block]:
    """All blocks of a ``text``, in order, as those of the document ``name``."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        fence = re.match(r"```(\w*)$", lines[at])
        if fence:
            end = lines.index("```", at + 1)
            yield Block(name, at + 1, fence[1], "\n".join(lines[at + 1 : end]) + "\n")
            at = end + 1
            continue
        if lines[at].startswith("    ") and at and not lines[at - 1].strip():
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            text = "\n".join(line[4:] for line in lines[at:end]).rstrip() + "\n"
            yield Block(name, at + 1, "", text)
            at = end
            continue
        at += 1


def examples() -> Iterator[Block]:
    """Of every public name, of which a docstring's blocks are Python."""
    for name in paradyse._API:
        of = f"help(paradyse.{name})"
        for block in blocks_in(inspect.getdoc(getattr(paradyse, name)) or "", of):
            yield replace(block, language="python")


def all_blocks() -> list[Block]:
    """Of all documents."""
    return [block for document in documents() for block in blocks_of(document)]
