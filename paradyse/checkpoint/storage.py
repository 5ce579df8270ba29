"""The files of a checkpoint: written and read by the planners of ``torch.distributed.checkpoint``.

Every stretch of rows lies in a file as it was written, and the metadata has the CRC-32 of its
bytes, which is compared before anything of the stretch is used. The metadata file ends in the
CRC-32 of itself. PyTorch's own reader passes over both, and loads these files too.

Nothing here runs code that a file names: values are read with ``weights_only``, and the metadata,
which PyTorch unpickles, is taken for what PyTorch writes there and nothing else.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.serialization import get_unsafe_globals_in_checkpoint

from paradyse.checkpoint.folder import METADATA, listed, way_out
from paradyse.distributed.together import Together
from paradyse.weights.versions import count_write

log = logging.getLogger(__name__)

_MARK = b"crc32:"
"""Of the end of the metadata file; eight hexadecimal digits follow."""
_BLOCK_BYTES = 1 << 20


# Writing


def write(ranks: Together, path: Path, entries: Mapping[str, Any]) -> None:
    """Write ``entries`` of every rank; all is on the disk when this returns.

    Args:
        ranks: that write, each what it holds.
        path: a folder that does not exist yet.
        entries: nested by name, as of ``get_state_dict``.
    Raises:
        ValueError: a value could not be read again.
        RuntimeError: a rank could not write.
    """
    planner, writer = _SavePlanner(), FileSystemWriter(path, overwrite=False)

    def plan_mine() -> Any:
        planner.set_up_planner(dict(entries), writer.storage_meta(), ranks.is_first)
        writer.set_up_storage_writer(ranks.is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all(plans: list[Any]) -> tuple[list[Any], Any]:
        plans, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(plans), metadata

    def write_mine(plan: Any) -> list[Any]:
        written = writer.write_data(planner.finish_plan(plan), planner).wait()
        _note_checksums(path, [result.storage_data for result in written])
        return written

    def finish(metadata: Any, written: list[list[Any]]) -> None:
        writer.finish(metadata, written)
        _seal(path / METADATA)

    plans = ranks.each(plan_mine)
    plans, metadata = ranks.first(partial(plan_all, plans))
    written = ranks.each(partial(write_mine, plans[ranks.rank]))
    ranks.first(partial(finish, metadata, written))


class _SavePlanner(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        """What is written for ``object``; a value is seen to be one that can be read again."""
        data = super().transform_object(write_item, object)
        if isinstance(data, io.BytesIO):
            _value(write_item.index.fqn, data)
        return data


def _note_checksums(path: Path, stretches: Iterable[Any]) -> None:
    """Give each of ``stretches`` of files in ``path`` the checksum that the metadata will have."""
    for stretch in stretches:
        with open(path / stretch.relative_path, "rb") as file:
            stretch.checksum = _checksum(file, stretch)


def _checksum(file: BinaryIO, stretch: Any) -> int:
    file.seek(stretch.offset)
    found, left = 0, stretch.length
    while left and (block := file.read(min(left, _BLOCK_BYTES))):
        found, left = zlib.crc32(block, found), left - len(block)
    return found


def _seal(file: Path) -> None:
    """Append its checksum to ``file``; unpickling passes over what follows the pickle."""
    digits = f"{zlib.crc32(file.read_bytes()):08x}"
    with open(file, "ab") as stream:
        stream.write(_MARK + digits.encode())
        stream.flush()
        os.fsync(stream.fileno())


# Reading


def read_metadata(path: Path) -> Any:
    """The metadata of the checkpoint at ``path``.

    Raises:
        ValueError: it is damaged, or not what torch.distributed.checkpoint writes.
    """
    try:
        return _unsealed((path / METADATA).read_bytes())
    except Exception as e:  # a damaged pickle raises nearly anything
        raise ValueError(f"{path / METADATA} cannot be read ({e}). {way_out(path)}") from e


def _unsealed(data: bytes) -> Any:
    body, mark, digits = data.rpartition(_MARK)
    if mark and f"{zlib.crc32(body):08x}".encode() != digits:
        raise ValueError("its bytes are not those that were saved: the checksum differs")
    stream = io.BytesIO(body if mark else data)
    metadata = _MetadataUnpickler(stream).load()
    if stream.read():
        raise ValueError("it goes on where it should end")
    if not isinstance(metadata, Metadata):
        raise ValueError(f"it holds a {type(metadata).__name__}")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Makes what metadata consists of; refuses anything else that a file names."""

    PLAIN = {("torch", "Size"), ("torch.serialization", "_get_layout")}
    RECORDS = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem"))

    def find_class(self, module: str, name: str) -> Any:
        """What ``name`` of ``module`` stands for.

        Raises:
            UnpicklingError: it is no part of metadata.
        """
        if (module, name) in self.PLAIN:
            return super().find_class(module, name)
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):
            return PurePath  # where it was saved
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module in self.RECORDS and "." not in name:
            found = super().find_class(module, name)
            if is_dataclass(found) or (isinstance(found, type) and issubclass(found, Enum)):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of metadata")


def read(ranks: Together, path: Path, metadata: Any, entries: dict[str, Any]) -> None:
    """Fill ``entries`` of every rank, flat names as in ``metadata``: tensors in place, values anew.

    Args:
        ranks: that read, each what it holds.
        path: the folder of the checkpoint.
    Raises:
        ValueError: the bytes of a file are not those that were saved, or a value names code.
            Nothing is changed then, on any rank.
        RuntimeError: a file could not be read; tensors may be filled in part.
    """
    planner, reader = _LoadPlanner(), FileSystemReader(path)

    def plan() -> Any:
        planner.set_up_planner(entries, metadata, ranks.is_first)
        reader.set_up_storage_reader(metadata, ranks.is_first)
        items = reader.prepare_local_plan(planner.create_local_plan())
        needed = {item.storage_index for item in items.items}
        _compare_checksums(path, {i: metadata.storage_data[i] for i in needed})
        return planner.finish_plan(items)

    plan_here = ranks.all_of(plan)
    ranks.all_of(partial(reader.read_data, plan_here, planner))
    count_write(entries.values())


def _compare_checksums(path: Path, stretches: Mapping[Any, Any]) -> None:
    """Raise ValueError where bytes of ``stretches``, by index, are not those that were saved."""
    for index, stretch in stretches.items():
        saved = getattr(stretch, "checksum", None)
        if saved is None:
            continue
        with open(path / stretch.relative_path, "rb") as file:
            if _checksum(file, stretch) != saved:
                at = f" at {list(index.offset)}" if index.offset else ""
                raise ValueError(
                    f"{path} is damaged: {stretch.relative_path} has other bytes for {index.fqn}"
                    f"{at} than were saved (the checksum differs). {way_out(path)}"
                )


def warn_without_checksums(path: Path, metadata: Any) -> None:
    """Log where ``metadata`` of the checkpoint at ``path`` has no checksums to notice damage by."""
    if not all(hasattr(stretch, "checksum") for stretch in metadata.storage_data.values()):
        log.warning("%s has no checksums: damage of its files would not be noticed", path)


class _LoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Put the value of ``read_item`` into the entries."""
        name = read_item.dest_index.fqn
        self.original_state_dict[name] = _value(name, value)


def _value(name: str, data: io.BytesIO) -> Any:
    """What ``data`` of torch.save holds, made of plain types."""
    data.seek(0)
    try:
        return torch.load(data, weights_only=True)
    except pickle.UnpicklingError as e:
        data.seek(0)
        what = "extra" if name == "run" else name
        classes = listed(sorted(get_unsafe_globals_in_checkpoint(data))) or str(e)
        raise ValueError(
            f"{what} holds {classes}, which a checkpoint may not name, as loading would run its "
            "code: give numbers, text, tensors, and lists and dicts of them (an array's tolist()), "
            "or, for classes that you trust, call torch.serialization.add_safe_globals first"
        ) from e
