"""Measurements of a model's blocks on a machine, as a file of JSON lines.

The first line says what was measured on (``Header``), each further one is one ``Measurement``.
Lines are appended as they are measured, so a run that is killed leaves a file that can be gone on
with. Cost models are fitted when the file is loaded; nothing fitted is stored.
"""

from __future__ import annotations

import json
import logging
import platform
import stat
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypeVar, get_origin, get_type_hints

from paradyse.types import ATTENTION_STRATEGIES, HEAD, LEVER_SETS, REPLICATED, Point

log = logging.getLogger(__name__)

SCHEMA = 1
"""Version of the file's fields."""

REST = "rest"
"""Kind of the measurements of what is not in a block."""

MEASURED, OVER_LIMIT = "measured", "over the memory limit"
"""Outcomes of a measurement."""


@dataclass(frozen=True)
class Header:
    """What the measurements of one file were made on."""

    versions: Mapping[str, str]
    """Of paradyse, python, torch, triton."""
    device: str
    """Name of the device, such as "NVIDIA H100 80GB HBM3" or "cpu, AMD EPYC, 2 cores"."""
    num_ranks: int
    dtype: str
    """Of weights and activations: "float32", "bfloat16"."""
    sharded: bool
    """Weights at rest were 1/p on each rank."""
    inner: str
    """Compiler of the pieces."""
    machine: Mapping[str, object]
    """Fields of ``costs.Machine``: rates of a rank, latency and bandwidth of each collective."""
    memory_limit: int | None = None
    """Bytes of a rank at which measuring stopped; None: none was set."""
    schema: int = SCHEMA


@dataclass(frozen=True)
class Measurement:
    """One block under one strategy at one workload; times are medians, of the slowest rank."""

    structure: str
    """``BlockSpec.structure``: blocks of equal structure cost the same."""
    kind: str
    """``attention``, ``mlp`` or ``head``; ``rest`` for all that is in none of them."""
    strategy: str
    """A variant's name (``canonical_strategy``); of the head its levers; "" for ``rest``."""
    batch: int
    seq_len: int
    training: bool
    """Whether gradients were computed."""
    outcome: str = MEASURED
    forward_s: float = 0.0
    backward_s: float = 0.0
    saved_bytes: int = 0
    """Held from forward to backward, weights and their gradients not counted; of ``rest``: what is
    still held when the blocks' backward begins, gradients included."""
    workspace_bytes: int = 0
    """The most held beyond that while the block ran, forward or backward, but for weights of others
    that were on their way; of ``rest``: beyond all that is saved, such as logits."""
    ahead_bytes: int = 0
    """Of the block's own weights, what was held while they were on their way and another one ran.
    """
    floor_bytes: int = 0
    """Of the head, or of ``rest`` where there is none: held when nothing is saved any more, as
    gradients are summed over ranks. A step needs so much at least, whatever else it saves; with
    whole logits these too, where the caller has them."""


@dataclass(frozen=True)
class Profile:
    """A file, read."""

    header: Header
    measurements: tuple[Measurement, ...]
    path: str
    checksum: int
    """Of what was read: equal on ranks that read the same."""


_T = TypeVar("_T", Header, Measurement)

AGAIN = "measure again with `paradyse profile`"
"""The way out where a profile is of no use."""
_OUT = f"remove the line, or {AGAIN}"

_LEAST = {"num_ranks": 1, "memory_limit": 1, "batch": 1, "seq_len": 1}
"""Of a number, where that is not 0."""
_MOST, _MOST_S = 2**60, 1e6
"""Of a number, and of seconds: no block takes longer."""


def present_versions() -> dict[str, str]:
    """``Header.versions`` of this process; "none" for what is not installed."""
    found = {"python": platform.python_version()}
    for name in ("paradyse", "torch", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def append(path: str | Path, header: Header, measurements: Iterable[Measurement] = ()) -> None:
    """Add ``measurements`` to the file at ``path``, which is made with ``header`` if it is missing.

    One process writes a file. Each line is flushed on its own, and what a killed writer left of a
    line is removed first, so a file is never more than one line short.

    Raises:
        ValueError: the file holds measurements of another header, is not a profile, or cannot be
            written.
    """
    path = Path(path)
    kept = own_lines(path, header)
    try:
        with path.open("ab") as file:
            file.truncate(len(kept))
            if not kept.strip():
                _write(file, asdict(header))
            elif not kept.endswith(b"\n"):
                file.write(b"\n")
            for m in measurements:
                _write(file, asdict(m))
    except OSError as e:
        raise ValueError(f"cannot write {str(path)!r}: {e.strerror}; give another file") from e


def remove(path: str | Path) -> None:
    """Remove the profile at ``path``, if there is one.

    Raises:
        ValueError: the file is not a profile; it stays.
    """
    own_lines(path)
    Path(path).unlink(missing_ok=True)


def own_lines(path: str | Path, header: Header | None = None) -> bytes:
    """What is in the profile at ``path``, without a line that was cut off; nothing where there is
    none yet.

    Raises:
        ValueError: the file is not a profile, cannot be read or made, or holds measurements of
            another header than ``header``.
    """
    path = Path(path)
    try:
        whole = _contents(path)
    except FileNotFoundError as e:
        if not path.parent.is_dir():
            raise ValueError(f"{path}: no folder {path.parent}; make it, or give another") from e
        return b""
    begin = b'{"%s": ' % fields(Header)[0].name.encode()
    if whole.strip() and whole[: len(begin)] != begin[: len(whole)]:
        raise ValueError(f"{path}: this is not a profile; give another file, or remove this one")
    kept = _without_cut_line(whole)
    if header is not None and kept.strip():
        held = _setting(kept.decode(errors="replace").splitlines()[0], f"{path}:1")
        _check_same(held, header, path)
    return kept


def _check_same(held: Header, header: Header, path: Path) -> None:
    for name, theirs in vars(held).items():
        ours = getattr(header, name)
        if name != "machine" and ours != theirs:  # a machine's rates differ each time
            raise ValueError(
                f"{path}: measured with {name} {theirs!r}, this would add measurements with "
                f"{ours!r}; give another file, or remove this one"
            )


def _contents(path: Path) -> bytes:
    """What is in the file at ``path``; FileNotFoundError, or ValueError where it is none."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as e:
        raise ValueError(f"cannot read {str(path)!r}: {e.strerror}; give another file") from e
    what = "is a folder" if stat.S_ISDIR(mode) else "is no regular file"
    raise ValueError(f"{str(path)!r} {what}; give a file")


def _write(file: Any, fields_of: Mapping[str, Any]) -> None:
    file.write(json.dumps(fields_of).encode() + b"\n")
    file.flush()


def _without_cut_line(whole: bytes) -> bytes:
    """All but a last line that has no end and cannot be read."""
    last = whole[whole.rfind(b"\n") + 1 :]
    try:
        json.loads(last or b"0")
    except (ValueError, RecursionError):
        return whole[: len(whole) - len(last)]
    return whole


def read_profile(path: str | Path) -> Profile:
    """The measurements of the file at ``path``.

    A last line that was cut off by a kill is left out, and logged.

    Raises:
        ValueError: there is no such file, it is of another schema, or a line is not a measurement;
            names the file, the line and the way out.
    """
    path = Path(path)
    try:
        whole = _contents(path)
    except FileNotFoundError as e:
        raise ValueError(
            f"cannot read the profile {str(path)!r}: {e.strerror}; `paradyse profile` writes one"
        ) from e
    kept = _without_cut_line(whole)
    if kept != whole:
        log.warning("%s: the last line was cut off while it was written; left out", path)
    lines = kept.decode(errors="replace").splitlines()
    if not kept.strip():
        raise ValueError(f"{path}: an empty file, not a profile; {AGAIN}")
    header = _setting(lines[0], f"{path}:1")
    measurements = [
        _measurement(line, f"{path}:{i}") for i, line in enumerate(lines[1:], 2) if line.strip()
    ]
    return Profile(header, tuple(measurements), str(path), zlib.crc32(kept))


def _setting(line: str, where: str) -> Header:
    found = _object(line, where, AGAIN)
    schema = found.get("schema")
    if schema is True or schema != SCHEMA:
        what = f"schema {schema!r}" if "schema" in found else "no schema: this is not a profile"
        raise ValueError(f"{where}: {what}; this version reads schema {SCHEMA}: {AGAIN}")
    return _checked(Header, found, where, AGAIN)


def _measurement(line: str, where: str) -> Measurement:
    found = _object(line, where, _OUT)
    for name in ("sent_bytes", "messages"):  # nothing reads them; earlier versions wrote them
        found.pop(name, None)
    m = _checked(Measurement, found, where, _OUT)
    legal = {
        "kind": (*LEVER_SETS, REST),
        "outcome": (MEASURED, OVER_LIMIT),
        "strategy": _legal_points(m.kind),
    }
    for name, values in legal.items():
        if getattr(m, name) not in values:
            known = ", ".join(v or "''" for v in values)
            raise ValueError(f"{where}: {name} is {getattr(m, name)!r}, not one of {known}; {_OUT}")
    if m.outcome == MEASURED and m.forward_s <= 0:
        raise ValueError(f"{where}: forward_s is {m.forward_s}, not a time; {_OUT}")
    return m


def _legal_points(kind: str) -> tuple[str, ...]:
    """What ``Measurement.strategy`` may be of this ``kind``: a strategy, with levers or without; of
    the head levers alone."""
    sets, strategies = LEVER_SETS.get(kind, ()), (*ATTENTION_STRATEGIES, REPLICATED)
    if kind == HEAD:
        return tuple("+".join(levers) for levers in sets)
    return tuple(str(Point(s, levers)) for levers in sets for s in strategies) or ("",)


def _object(line: str, where: str, way_out: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{where}: not JSON ({e}); {way_out}") from e
    if not isinstance(found, dict):
        raise ValueError(f"{where}: not an object of named fields; {way_out}")
    return found


def _holds(hint: Any, value: Any) -> bool:
    """Whether a ``value`` of JSON is one of a field of type ``hint``."""
    if isinstance(value, bool):
        return hint is bool
    if get_origin(hint) is Mapping:
        return isinstance(value, dict)
    return isinstance(value, int | float if hint is float else hint)


def _checked(cls: type[_T], found: Mapping[str, Any], where: str, way_out: str) -> _T:
    """``cls`` from fields whose names, types and sizes are right, else ValueError."""
    known, hints = {f.name: f for f in fields(cls)}, get_type_hints(cls)
    needed = [n for n, f in known.items() if f.default is MISSING]
    wrong = [f"no field {n!r}" for n in needed if n not in found]
    wrong += [f"unknown field {n!r}" for n in found if n not in known]
    for name, value in found.items():
        if name not in known:
            continue
        if not _holds(hints[name], value):
            wrong.append(f"{name} is {value!r}, not {known[name].type}")
        elif isinstance(value, int | float):
            least, most = _LEAST.get(name, 0), _MOST_S if name.endswith("_s") else _MOST
            if not least <= value <= most:
                wrong.append(f"{name} is {short(value)}, not of {least} to {most:g}")
    if wrong:
        raise ValueError(f"{where}: {'; '.join(wrong)}; {way_out}")
    return cls(**found)
