"""Real text that every machine has: the Python standard library's source files, byte by byte.

Files come whole, in a shuffled order, with the lengths that they have; those longer than the cap
are left out. Their lengths spread over orders of magnitude, which is what a plan has to follow.
"""

from __future__ import annotations

import os
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

VOCABULARY = 256
"""Tokens are bytes."""
MIN_TOKENS = 16
"""Shorter files say nothing; also the smallest cap."""
CAP = 4096
"""Tokens of the longest sequence, where nothing else is said."""
STEPS = 12
"""How many lengths are drawn, where nothing else is said."""
SUFFIXES = (".py", ".txt", ".md", ".rst")
SKIPPED = ("site-packages", "dist-packages", "__pycache__")
"""Folders inside the standard library's that are not of it."""


@dataclass(frozen=True)
class TextFile:
    """One file of the corpus; one training step."""

    path: str
    """Absolute."""
    name: str
    """For people: relative to the corpus's folder."""
    num_tokens: int

    def tokens(self) -> list[int]:
        """The file's bytes, ``num_tokens`` integers below ``VOCABULARY``.

        Raises:
            ValueError: the file is shorter than when the corpus was drawn.
        """
        data = Path(self.path).read_bytes()
        if len(data) < self.num_tokens:
            raise ValueError(f"{self.path} has changed: {len(data)} bytes, not {self.num_tokens}")
        return list(data[: self.num_tokens])


def draw_files(
    num_files: int, cap: int, seed: int = 0, folder: str | os.PathLike[str] | None = None
) -> list[TextFile]:
    """``num_files`` text files of ``MIN_TOKENS`` to ``cap`` bytes, equal for equal arguments.

    No file comes twice before every one has come once.

    Args:
        cap: the most tokens a file may have.
        seed: of the order.
        folder: where to look, below it too; None: the standard library.
    Raises:
        ValueError: the folder does not exist, or has no such file.
    """
    root, suffixes = _root(folder)
    found = []
    for path, size in _text_files(root, suffixes):
        if MIN_TOKENS <= size <= cap:
            name = path.relative_to(root).as_posix()
            found.append(TextFile(str(path.resolve()), name, size))
    if not found:
        raise ValueError(_none_found("bytes", cap, root, suffixes))
    shuffle = random.Random(seed).shuffle
    files: list[TextFile] = []
    while len(files) < num_files:
        shuffle(found)
        files += found[: num_files - len(files)]
    return files


def draw_lengths(
    count_tokens: Callable[[str], int],
    num_files: int,
    cap: int,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
) -> list[int]:
    """Lengths of ``num_files`` as ``draw_files`` draws them, in tokens that ``count_tokens`` finds.

    ``cap``, ``seed`` and ``folder`` are as there.
    Files are read in the order in which they are drawn, and no more of them than it takes. Bytes
    that are no UTF-8 count as replacement characters.

    Raises:
        ValueError: as ``draw_files``.
    """
    root, suffixes = _root(folder)
    paths = [path for path, size in _text_files(root, suffixes) if size]
    random.Random(seed).shuffle(paths)
    lengths: list[int] = []
    for path in paths:
        if len(lengths) == num_files:
            break
        length = count_tokens(path.read_text(encoding="utf-8", errors="replace"))
        lengths += [length] if MIN_TOKENS <= length <= cap else []
    if not lengths:
        raise ValueError(_none_found("tokens", cap, root, suffixes))
    return [lengths[i % len(lengths)] for i in range(num_files)]


def _root(folder: str | os.PathLike[str] | None) -> tuple[Path, tuple[str, ...]]:
    """The folder, and how names of text files end there."""
    root = Path(sysconfig.get_path("stdlib") if folder is None else folder)
    if not root.is_dir():
        raise ValueError(f"no folder {root}; name another one with text files in it")
    return root, (".py",) if folder is None else SUFFIXES


def _none_found(unit: str, cap: int, root: Path, suffixes: Sequence[str]) -> str:
    return (
        f"no text file of {MIN_TOKENS} to {cap} {unit} below {root}; raise the cap, or name "
        f"another folder (files ending in {', '.join(suffixes)} are read)"
    )


def _text_files(root: Path, suffixes: Sequence[str]) -> Iterator[tuple[Path, int]]:
    """Text files below ``root`` in one order on every machine, and their bytes."""
    for folder, below, names in os.walk(root):
        below[:] = sorted(set(below) - set(SKIPPED))
        for path in (Path(folder, name) for name in sorted(names)):
            if path.suffix in suffixes and path.is_file():
                yield path, path.stat().st_size


def length_ranges(cap: int) -> list[range]:
    """Five ranges of lengths that double up to ``cap``; the first starts at 1."""
    ends = sorted({max(1, cap >> i) for i in range(5)})
    return [range(low + 1, high + 1) for low, high in zip([0, *ends], ends)]
