"""What a profile's file has, known on all ranks alike and written by the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paradyse.distributed.together import Together
from paradyse.planning.profile_file import (
    MEASURED,
    OVER_LIMIT,
    REST,
    Header,
    Measurement,
    append,
    own_lines,
    read_profile,
    remove,
)
from paradyse.profiling.steps import PartKey
from paradyse.types import HEAD, BlockSpec


class Book:
    """The file: what is known, on all ranks alike, and what is written by the first.

    Args:
        together: the ranks that measure.
        path: of the file.
        header: of what is measured now.
        batch, training: likewise; what the file has of others stays as it is.
        overwrite: the file is begun anew.
    Raises:
        ValueError: the file is no profile, or has another header.
    """

    def __init__(
        self,
        together: Together,
        path: Path,
        header: Header,
        batch: int,
        training: bool,
        overwrite: bool,
    ) -> None:
        self._together = together
        self.path, self.header, self.overwrite = path, header, overwrite
        self.batch, self.training = batch, training
        self.known: dict[tuple[PartKey, int], Measurement] = {}
        kept = self._together.first(self._kept)
        self._structures = {m.structure for m in kept if m.kind not in (REST, HEAD)}
        """Of the blocks of the model that the file is of."""
        for m in kept:
            if m.batch == batch and m.training == training:
                self.known[(m.structure, m.kind, m.strategy), m.seq_len] = m

    def _kept(self) -> tuple[Measurement, ...]:
        """What the file has that need not be measured again; nothing is written."""
        lines = own_lines(self.path, None if self.overwrite else self.header)
        return read_profile(self.path).measurements if lines.strip() and not self.overwrite else ()

    def begin(self, blocks: Iterable[BlockSpec]) -> None:
        """Make the file, if need be, for the model of these ``blocks``.

        Raises:
            ValueError: it is of another model, whose rest would be taken for this one's.
        """
        if self._structures and not self._structures & {b.structure for b in blocks}:
            raise ValueError(
                f"{self.path}: a profile of another model; give another file, or overwrite it"
            )

        def make() -> None:
            if self.overwrite:
                remove(self.path)
            append(self.path, self.header)

        self._together.first(make)

    def get(self, part: PartKey, seq_len: int) -> Measurement | None:
        """What was measured of ``part`` at ``seq_len`` tokens, if it was not over the limit."""
        found = self.known.get((part, seq_len))
        return found if found is not None and found.outcome == MEASURED else None

    def was_over(self, part: PartKey, before: int) -> bool:
        """Whether ``part`` was over the limit at a length below ``before``."""
        rows = self.known.items()
        return any(m.outcome == OVER_LIMIT for (p, n), m in rows if p == part and n < before)

    def add(self, seq_len: int, rows: Mapping[PartKey, Mapping[str, Any]]) -> None:
        """Write down ``rows``, the fields of each part, as measured at ``seq_len`` tokens."""
        made = [
            Measurement(*part, self.batch, seq_len, self.training, **fields)
            for part, fields in rows.items()
        ]
        for part, m in zip(rows, made, strict=True):
            self.known[part, seq_len] = m
        self._together.first(lambda: append(self.path, self.header, made))
