"""Profiles that are refused with the line, and files that are none and stay as they are.

One profile is measured; each case spoils a copy of it in one place.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input import Words, refused
from tiny import Tiny, tokens
from torch import nn

import paradyse
from paradyse.planning.costs import Machine
from paradyse.planning.measured import load_cost_model
from paradyse.planning.profile_file import SCHEMA, read_profile, remove
from paradyse.types import BlockSpec

AGAIN = "measure again with `paradyse profile`"
LINE = "remove the line, or measure again with `paradyse profile`"
ANOTHER = "give another file, or remove this one"
EAGER = {"inner": "eager"}
DEEP = "[" * 100_000
HUGE = 10**400


def go_on(path: Path) -> None:
    """Measure a model into ``path``, or go on where a former run ended."""

    def batch(size: int, seq_len: int) -> dict[str, Any]:
        return {"ids": tokens(size, seq_len), "labels": tokens(size, seq_len)}

    given = {"options": EAGER, "make_batch": batch}
    paradyse.profile(Tiny(layers=1), path, [8], repeats=1, training=False, **given)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of a profile: its setting, then measurements."""
    path = tmp_path_factory.mktemp("measured") / "profile.jsonl"
    go_on(path)
    return path.read_text().splitlines()


def spoilt(lines: list[str], number: int, changes: dict[str, Any]) -> bytes:
    """``lines`` with ``changes`` to fields of line ``number``; a field without a value goes."""
    fields = json.loads(lines[number - 1]) | changes
    line = json.dumps({k: v for k, v in fields.items() if v is not ...})
    return "\n".join([*lines[: number - 1], line, *lines[number:], ""]).encode()


def written(folder: Path, content: bytes) -> Path:
    path = folder / "profile.jsonl"
    path.write_bytes(content)
    return path


SETTINGS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"schema": SCHEMA + 1}, f"schema {SCHEMA + 1}; this version reads schema {SCHEMA}"),
    ({"schema": 0}, f"schema 0; this version reads schema {SCHEMA}"),
    ({"schema": "1"}, f"schema '1'; this version reads schema {SCHEMA}"),
    ({"schema": True}, f"schema True; this version reads schema {SCHEMA}"),
    ({"schema": None}, f"schema None; this version reads schema {SCHEMA}"),
    ({"schema": ...}, "no schema: this is not a profile"),
    ({"device": ...}, "no field 'device'"),
    ({"device": 3}, "device is 3, not str"),
    ({"versions": "2.13"}, "versions is '2.13', not Mapping"),
    ({"num_ranks": "2"}, "num_ranks is '2', not int"),
    ({"num_ranks": 1.0}, "num_ranks is 1.0, not int"),
    ({"num_ranks": 0}, "num_ranks is 0"),
    ({"num_ranks": -1}, "num_ranks is -1"),
    ({"num_ranks": HUGE}, "num_ranks is 1000"),
    ({"dtype": ["float32"]}, "dtype is ['float32'], not str"),
    ({"sharded": 0}, "sharded is 0, not bool"),
    ({"sharded": "false"}, "sharded is 'false', not bool"),
    ({"inner": None}, "inner is None, not str"),
    ({"machine": []}, "machine is [], not Mapping"),
    ({"memory_limit": "80GiB"}, "memory_limit is '80GiB', not int | None"),
    ({"memory_limit": 0}, "memory_limit is 0"),
    ({"ranks": 2}, "unknown field 'ranks'"),
)

OTHER_RUNS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"num_ranks": 8}, "measured with num_ranks 8, this would add measurements with 1"),
    ({"dtype": "float16"}, "measured with dtype 'float16'"),
    ({"sharded": True}, "measured with sharded True"),
    ({"inner": "inductor"}, "measured with inner 'inductor'"),
    ({"device": "abacus"}, "measured with device 'abacus'"),
    ({"memory_limit": 2**30}, "measured with memory_limit 1073741824"),
    ({"versions": {"torch": "1.0"}}, "measured with versions {'torch': '1.0'}"),
)

MEASUREMENTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"kind": "tail"}, "kind is 'tail', not one of attention, mlp, experts, head, rest"),
    ({"kind": "head"}, "strategy is 'replicated', not one of '', tiled, vocabulary, "),
    ({"kind": ...}, "no field 'kind'"),
    ({"kind": None}, "kind is None, not str"),
    ({"outcome": "crashed"}, "outcome is 'crashed', not one of measured, over the memory limit"),
    ({"strategy": "fsdp"}, "strategy is 'fsdp', not one of megatron_ts, "),
    ({"strategy": ""}, "strategy is '', not one of megatron_ts, "),
    ({"strategy": "Metp"}, "strategy is 'Metp', not one of megatron_ts, "),
    ({"strategy": 3}, "strategy is 3, not str"),
    ({"kind": "rest"}, "strategy is 'replicated', not one of ''"),
    ({"structure": 7}, "structure is 7, not str"),
    ({"batch": 0}, "batch is 0, not of 1 to"),
    ({"batch": -2}, "batch is -2"),
    ({"batch": True}, "batch is True, not int"),
    ({"batch": "2"}, "batch is '2', not int"),
    ({"batch": HUGE}, "batch is 1000"),
    ({"seq_len": 0}, "seq_len is 0, not of 1 to"),
    ({"seq_len": 8.5}, "seq_len is 8.5, not int"),
    ({"seq_len": 10**30}, "seq_len is 1000"),
    ({"training": 1}, "training is 1, not bool"),
    ({"training": "no"}, "training is 'no', not bool"),
    ({"forward_s": 0.0}, "forward_s is 0.0, not a time"),
    ({"forward_s": math.nan}, "forward_s is nan"),
    ({"forward_s": math.inf}, "forward_s is inf"),
    ({"forward_s": -1.0}, "forward_s is -1.0"),
    ({"forward_s": 1e9}, "forward_s is 1000000000.0, not of 0 to 1e+06"),
    ({"forward_s": "fast"}, "forward_s is 'fast', not float"),
    ({"backward_s": -0.5}, "backward_s is -0.5"),
    ({"backward_s": 1e300}, "backward_s is 1e+300"),
    ({"backward_s": None}, "backward_s is None, not float"),
    ({"saved_bytes": -1}, "saved_bytes is -1"),
    ({"saved_bytes": 1.5}, "saved_bytes is 1.5, not int"),
    ({"saved_bytes": HUGE}, "saved_bytes is 1000"),
    (
        {"workspace_bytes": 2**80},
        "workspace_bytes is 1208925819614629174706176",
    ),
    ({"floor_bytes": [1]}, "floor_bytes is [1], not int"),
    ({"speed": 3}, "unknown field 'speed'"),
)

RATES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"matmul_flops": 0.0}, "matmul_flops of the machine is 0"),
    ({"matmul_flops": "fast"}, "matmul_flops of the machine is 'fast', not a number"),
    ({"matmul_flops": HUGE}, "matmul_flops of the machine is 1000"),
    ({"matmul_flops": ...}, "missing 1 required positional argument: 'matmul_flops'"),
    ({"attention_flops": -1e9}, "attention_flops of the machine is -1000000000.0"),
    ({"memory_bandwidth": -1.0}, "memory_bandwidth of the machine is -1"),
    ({"bandwidth_bytes": 1e30}, "bandwidth_bytes of the machine is 1e+30"),
    ({"bandwidth_bytes": math.nan}, "bandwidth_bytes of the machine is nan"),
    ({"latency_s": 1e9}, "latency_s of the machine is 1000000000.0"),
    ({"latency_s": True}, "latency_s of the machine is True, not a number"),
    ({"op_overhead_s": -1e-6}, "op_overhead_s of the machine is -1e-06"),
    ({"overlap": 5}, "overlap of the machine is 5"),
    ({"overlap": "all"}, "overlap of the machine is 'all', not a number"),
    ({"capacity_bytes": -1}, "capacity_bytes of the machine is -1"),
    ({"capacity_bytes": "80GiB"}, "capacity_bytes of the machine is '80GiB', not a number"),
    ({"communicator_bytes": -1}, "communicator_bytes of the machine is -1"),
    ({"links": 3}, "the fields of the machine"),
    ({"links": [1]}, "the fields of the machine"),
    ({"links": {"all_gather": 3}}, "the fields of the machine"),
    ({"links": {"all_gather": {"latency_s": 1e-4}}}, "'bandwidth_bytes'"),
    (
        {"links": {"all_gather": {"latency_s": 1e-4, "bandwidth_bytes": 0.0}}},
        "bandwidth_bytes of the link of all_gather is 0",
    ),
    (
        {"links": {"all_gather": {"latency_s": -1, "bandwidth_bytes": 1e9}}},
        "latency_s of the link of all_gather is -1",
    ),
)

FOREIGN: dict[str, bytes] = {
    "a word": b"my notes",
    "lines": b"my notes\nof today",
    "zeros": bytes(10_000),
    "an image": b"\x89PNG\r\n\x1a\n\x00\xff",
    "bytes": b"\x00\xff\xfe\x89PNG",
    "gzip": gzip.compress(b'{"versions": {}}' * 50),
    "UTF-16": '{"versions": {}}\n'.encode("utf-16"),
    "a cut object": b'{"name": "paradyse", "ver',
    "an object": b'{"name": "paradyse"}',
    "a list": b"[1, 2]\n",
    "a number": b"42",
    "a text": b'"profile"\n',
    "null": b"null\n",
    "a cut word": b'{"vers\xe9',
    "nested deeply": DEEP.encode(),
    "nested deeply, and more lines": f"{DEEP}\n{DEEP}\n".encode(),
    "an object nested deeply": b'{"model": ' + DEEP.encode() + b"\n",
    "a number of many digits": b"9" * 5000 + b"\n",
    "CSV": b"kind,strategy\nattention,metp\n",
}

EMPTY = {"nothing": b"", "nothing but lines": b"\n\n \n"}
"""A profile may begin in such a file."""


def ids(rows: tuple[tuple[dict[str, Any], str], ...]) -> list[str]:
    return [repr(changes)[:50] for changes, _ in rows]


@pytest.mark.parametrize(("changes", "text"), SETTINGS, ids=ids(SETTINGS))
def test_settings_that_are_none(
    changes: dict[str, Any], text: str, measured: list[str], tmp_path: Path
) -> None:
    path = written(tmp_path, spoilt(measured, 1, changes))
    with refused(tmp_path, (f"{path}:1: ", text, AGAIN)):
        go_on(path)


@pytest.mark.parametrize(("changes", "text"), OTHER_RUNS, ids=ids(OTHER_RUNS))
def test_settings_of_another_run(
    changes: dict[str, Any], text: str, measured: list[str], tmp_path: Path
) -> None:
    path = written(tmp_path, spoilt(measured, 1, changes))
    with refused(tmp_path, (str(path), text, ANOTHER)):
        go_on(path)


@pytest.mark.parametrize(("changes", "text"), MEASUREMENTS, ids=ids(MEASUREMENTS))
def test_lines_that_are_no_measurement(
    changes: dict[str, Any], text: str, measured: list[str], tmp_path: Path
) -> None:
    path = written(tmp_path, spoilt(measured, 2, changes))
    with refused(tmp_path, (f"{path}:2: ", text, LINE)):
        go_on(path)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"structure": "a"}', "no field 'kind'; no field 'strategy'"),
        ('{"struct', "not JSON"),
        ("\x00\x01", "not JSON"),
        ("[1]", "not an object of named fields"),
        ("null", "not an object of named fields"),
        ("9" * 5000, "not JSON"),
        (DEEP, "not JSON"),
        ('{"structure": ' + DEEP, "not JSON"),
    ],
    ids=lambda x: x[:20],
)
def test_broken_lines_before_the_last(
    line: str, text: str, measured: list[str], tmp_path: Path
) -> None:
    path = written(tmp_path, "\n".join([measured[0], line, *measured[1:], ""]).encode())
    with refused(tmp_path, (f"{path}:2: ", text, LINE)):
        go_on(path)


@pytest.mark.parametrize(("changes", "text"), RATES, ids=ids(RATES))
def test_rates_that_no_machine_has(
    changes: dict[str, Any], text: str, measured: list[str], tmp_path: Path
) -> None:
    setting = json.loads(measured[0])
    machine = asdict(Machine(1e12, 1e11, 1e-5, 1e10)) | setting["machine"] | changes
    machine = {k: v for k, v in machine.items() if v is not ...}
    path = written(tmp_path, spoilt(measured, 1, {"machine": machine}))
    profile = read_profile(path)
    blocks = [
        BlockSpec(m.kind, m.kind, 0, m.structure) for m in profile.measurements if m.kind != "rest"
    ]
    with refused(tmp_path, (f"{path}:1: ", text, AGAIN)):
        load_cost_model(str(path), blocks, replace(profile.header, machine={}))


CHANGES: dict[str, Callable[[Path], Any]] = {"going on": go_on, "removing": remove}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FOREIGN)
def test_files_that_are_no_profile_stay(name: str, change: str, tmp_path: Path) -> None:
    path = written(tmp_path, FOREIGN[name])
    with refused(tmp_path, (str(path), "this is not a profile", ANOTHER)):
        CHANGES[change](path)


@pytest.mark.parametrize("name", [*FOREIGN, *EMPTY])
def test_files_that_are_no_profile_are_not_read(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, (FOREIGN | EMPTY)[name])
    with refused(tmp_path, (str(path), AGAIN)):
        read_profile(path)


def test_a_profile_stays_where_nothing_can_be_measured(measured: list[str], tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join(measured).encode())
    batch = {"input": torch.ones(1, 3)}
    with refused(tmp_path, "no block of this model can be switched"):
        paradyse.profile(
            nn.Linear(3, 1), path, [8], options=EAGER, make_batch=lambda *_: batch, overwrite=True
        )


def folder(path: Path) -> None:
    path.mkdir()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


PLACES: dict[str, tuple[Callable[[Path], Any], Words]] = {
    "a folder": (folder, "is a folder"),
    "a pipe": (pipe, "is no regular file"),
    "a device without an end": (device, "is no regular file"),
    "a link to itself": (loop, "Too many levels of symbolic links"),
}


@pytest.mark.parametrize("use", [*CHANGES, "reading"])
@pytest.mark.parametrize("name", PLACES)
def test_places_that_hold_no_profile(name: str, use: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.jsonl"
    make, words = PLACES[name]
    make(path)
    with refused(tmp_path, (str(path), *([words] if isinstance(words, str) else words))):
        {**CHANGES, "reading": read_profile}[use](path)
