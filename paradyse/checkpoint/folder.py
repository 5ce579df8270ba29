"""The folder that checkpoints lie in: what is complete, what is damaged, what is removed when.

    step-00000020        complete: it got this name by one rename, with everything on the disk
    step-00000020.old    complete: what a save of the same step is about to replace
    step-00000040.tmp    a save under way, or one that was killed

The next save removes what a killed one left.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

METADATA = ".metadata"
"""The file that torch.distributed.checkpoint writes last."""

_COMPLETE = re.compile(r"step-(\d{8,})(\.old)?")


def check_counts(step: Any, keep: Any) -> None:
    """Refuse values of ``step`` and ``keep`` that ``save_checkpoint`` cannot take.

    Raises:
        ValueError: one of them is no count.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step is {step!r}; give the number of steps done, an int of 0 or more")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep is {keep!r}; give an int of 1 or more, or None for all")


def make_room(folder: Path, step: int) -> Path:
    """Make ``folder``, clear it of what killed saves left, and name the checkpoint of ``step``.

    Raises:
        ValueError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ValueError(f"{folder} cannot be made ({e.strerror}); give another folder") from e
    for remains in folder.glob("step-*.tmp"):
        shutil.rmtree(remains)
    complete = _complete(folder)
    for old in [p for p in complete if p.suffix and p.with_suffix("") in complete]:
        _remove(old)
    return folder / f"step-{step:08d}"


def _complete(folder: Path, below: float = math.inf) -> list[Path]:
    """Complete checkpoints in ``folder`` of steps ``below`` one, the newest last."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _COMPLETE.fullmatch(path.name)
        if match and int(match[1]) < below and (path / METADATA).is_file():
            found.append((int(match[1]), match[2] is None, path))
    return [path for *_, path in sorted(found)]


def next_step(folder: Path) -> int:
    """A step above those of all complete checkpoints in ``folder``, 0 where there is none."""
    names = [_COMPLETE.fullmatch(path.name) for path in _complete(folder)]
    return max((int(match[1]) + 1 for match in names if match), default=0)


def newest(folder: Path) -> Path:
    """The complete checkpoint of the highest step in ``folder``; itself if it is a checkpoint.

    Raises:
        FileNotFoundError: there is none.
    """
    if (folder / METADATA).is_file():
        return folder
    found = _complete(folder)
    if found:
        return found[-1]
    what = "does not exist" if not folder.exists() else "holds no complete checkpoint"
    remains = sorted(p.name for p in folder.glob("step-*.tmp"))
    killed = f" ({', '.join(remains)}: a save that did not finish)" if remains else ""
    raise FileNotFoundError(
        f"{folder} {what}{killed}; give the folder that paradyse.save_checkpoint was given"
    )


def finish(unfinished: Path, path: Path, metadata: Any, step: int, keep: int | None) -> None:
    """Give the checkpoint its name, and remove what it replaces.

    Args:
        unfinished: the folder that ranks wrote to.
        path: its name from now on.
        metadata: of the checkpoint, by torch.distributed.checkpoint.
        step: of the checkpoint.
        keep: how many checkpoints of steps up to this one stay; None: all.
    Raises:
        ValueError: files that other ranks wrote are not to be seen here.
    """
    unseen = damage_of(unfinished, metadata)
    if unseen:
        raise ValueError(
            f"rank 0 does not see what other ranks wrote: {unseen}. Give a folder on a file system "
            "that all ranks share"
        )
    _sync(unfinished)
    old = path.with_name(path.name + ".old")
    if path.exists():
        _remove(old)
        path.rename(old)
    unfinished.rename(path)
    _sync(path.parent)
    _remove(old)
    if keep is not None:
        former = _complete(path.parent, below=step)
        for p in former[: max(len(former) - (keep - 1), 0)]:
            _remove(p)


def _remove(path: Path) -> None:
    """Remove a complete checkpoint, if there is one, so that half of it never looks complete."""
    if path.exists():
        unfinished = path.with_name(path.name + ".tmp")
        path.rename(unfinished)
        shutil.rmtree(unfinished)


def _sync(folder: Path) -> None:
    """Return once the names in ``folder`` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def way_out(path: Path) -> str:
    """Which other checkpoint could be loaded in place of the damaged one at ``path``."""
    others = [str(p) for p in _complete(path.parent) if p != path]
    return f"Load another one: {others[-1]}" if others else "There is no other one beside it"


def damage_of(path: Path, metadata: Any) -> str:
    """Which files of the checkpoint at ``path`` are missing or too short; empty if none.

    Args:
        metadata: of the checkpoint, by torch.distributed.checkpoint.
    """
    needed: dict[str, int] = {}
    for piece in metadata.storage_data.values():
        end = piece.offset + piece.length
        needed[piece.relative_path] = max(end, needed.get(piece.relative_path, 0))
    sizes = {n: size for n in needed if (size := _size_bytes(path / n)) is not None}
    missing = [n for n in needed if n not in sizes]
    short = [f"{n} has {s} of {needed[n]} bytes" for n, s in sizes.items() if s < needed[n]]
    parts = [f"missing are {listed(missing)}"] * bool(missing) + [listed(short)] * bool(short)
    return "; ".join(parts)


def _size_bytes(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def listed(names: Iterable[str]) -> str:
    """The first three of ``names`` for an error, and how many there are besides."""
    first, rest = (names := list(names))[:3], names[3:]
    return ", ".join(first) + (f" and {len(rest)} more" if rest else "")
