"""What holds for every bad input: one error in words, and no file that is written or lost."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

Words = str | tuple[str, ...]
"""Parts of an error's text: what was given, and the way out."""


def name_of(given: object) -> str:
    """``given`` for the name of a test, equal in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(given))[:50]


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and bytes of everything below ``folder``, by name."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        found[str(path.relative_to(folder))] = (
            mode,
            path.read_bytes() if stat.S_ISREG(mode) else b"",
        )
    return found


def missing(words: Words, text: str) -> list[str]:
    """Those of ``words`` that are not in ``text``."""
    return [w for w in ((words,) if isinstance(words, str) else words) if w not in text]


@contextmanager
def refused(folder: Path, words: Words, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Inside, an error of ``kind`` itself is raised whose text has ``words``; ``folder`` stays."""
    before = contents(folder)
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind, "an error that another library raises"
    assert not missing(words, str(caught.value)), str(caught.value)
    assert contents(folder) == before
