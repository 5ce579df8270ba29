"""One fault to sow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One change of one file, and tests that are to catch it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest: files or ids, narrow and fast."""
