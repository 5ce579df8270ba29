"""Where results go: checked before the work begins, and written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

PROBE_BYTES = 1 << 16
"""Written to see whether a disk has room."""


def check_folder(flag: str, given: str) -> Path:
    """The folder ``given`` with ``flag``, which need not be there yet.

    Raises:
        ValueError: it is a file, or cannot be made or written.
    """
    path = Path(given)
    there = next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))
    if not there.is_dir():
        raise ValueError(f"{flag} {given}: {there} is no folder; name another one")
    _check_room(flag, given, there)
    return path


def check_file(flag: str, given: str) -> Path:
    """The file ``given`` with ``flag``, which need not be there yet.

    Raises:
        ValueError: it is no regular file, its folder is not there, or it cannot be written.
    """
    path, folder = Path(given), Path(given).resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{flag} {given}: no folder {folder}; make it, or name another file")
    if path.is_dir():
        raise ValueError(f"{flag} {given}: that is a folder; name a file")
    if os.path.lexists(path) and not path.is_file():
        raise ValueError(f"{flag} {given}: that is no regular file; name another one")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{flag} {given}: it may not be written; name another file")
    _check_room(flag, given, folder)
    return path


def _check_room(flag: str, given: str, folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
    except OSError as e:
        raise ValueError(
            f"{flag} {given}: {folder} cannot be written ({e.strerror}); name another place"
        ) from e


def write_whole(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` in the place of what is there; a failure leaves that.

    Raises:
        OSError: the disk is full, or ``path`` cannot be written; it names ``path``.
    """
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as e:
        unfinished.unlink(missing_ok=True)
        raise OSError(e.errno, e.strerror, str(path)) from e
