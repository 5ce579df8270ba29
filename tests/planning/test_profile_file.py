"""Profiles as files: what is written is read, what a kill left is dropped, all else is refused."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from paradyse.planning.profile_file import (
    OVER_LIMIT,
    Header,
    Measurement,
    append,
    present_versions,
    read_profile,
    remove,
)

HEADER = Header(
    versions={"paradyse": "0.1.0", "torch": "2.13.0"},
    device="cpu, two cores",
    num_ranks=2,
    dtype="float32",
    sharded=False,
    inner="eager",
    machine={"matmul_flops": 1e11, "links": {"all_gather": {"latency_s": 1e-4}}},
    memory_limit=2**34,
)
ROW = Measurement("a", "attention", "metp", 2, 128, True, forward_s=0.5, backward_s=1.0)
LONG = replace(ROW, seq_len=4096, outcome=OVER_LIMIT, forward_s=0.0, backward_s=0.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "profile.jsonl"


def test_what_is_appended_is_read(file: Path) -> None:
    full = replace(ROW, saved_bytes=7, workspace_bytes=2, floor_bytes=1)
    append(file, HEADER)
    assert read_profile(file).measurements == ()
    append(file, HEADER, [full])
    append(file, HEADER, [LONG, ROW])
    profile = read_profile(file)
    assert profile.header == HEADER
    assert profile.measurements == (full, LONG, ROW)
    assert profile.path == str(file)
    assert len(file.read_text().splitlines()) == 4
    before = profile.checksum
    append(file, HEADER, [ROW])
    assert read_profile(file).checksum != before


def test_fields_that_are_no_longer_written_are_passed_over(file: Path) -> None:
    append(file, HEADER)
    with file.open("a") as f:
        f.write(json.dumps(asdict(ROW) | {"sent_bytes": {"all_gather": 7}, "messages": {}}) + "\n")
    assert read_profile(file).measurements == (ROW,)


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_cut_by_a_kill_is_dropped_and_the_file_gone_on_with(
    file: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    append(file, HEADER, [ROW])
    whole = file.read_bytes()
    file.write_bytes(whole + json.dumps(asdict(LONG)).encode()[:cut])
    with caplog.at_level(logging.WARNING):
        assert read_profile(file).measurements == (ROW,)
    assert f"{file}: the last line was cut off" in caplog.text
    append(file, HEADER, [LONG])
    assert read_profile(file).measurements == (ROW, LONG)
    assert file.read_bytes().startswith(whole)


def test_a_setting_cut_by_a_kill_is_written_anew(file: Path) -> None:
    file.write_text('{"versions": {')
    with pytest.raises(ValueError, match="an empty file, not a profile; measure again"):
        read_profile(file)
    append(file, HEADER, [ROW])
    assert read_profile(file).header == HEADER


def test_a_last_line_that_only_lacks_its_end_is_kept(file: Path) -> None:
    append(file, HEADER, [ROW])
    file.write_bytes(file.read_bytes().rstrip())
    assert read_profile(file).measurements == (ROW,)
    append(file, HEADER, [LONG])
    assert read_profile(file).measurements == (ROW, LONG)


def test_measurements_of_two_settings_do_not_mix(file: Path) -> None:
    append(file, HEADER, [ROW])
    other_rates = replace(HEADER, machine={"matmul_flops": 2e11})
    append(file, other_rates, [ROW])  # a machine measured twice is the same machine
    text = "measured with num_ranks 2, this would add measurements with 4; give another file"
    with pytest.raises(ValueError, match=re.escape(text)):
        append(file, replace(HEADER, num_ranks=4), [ROW])
    assert len(read_profile(file).measurements) == 2


def test_a_missing_file_names_the_way_out(file: Path) -> None:
    with pytest.raises(
        ValueError, match=r"cannot read the profile '.*profile.jsonl': No such file"
    ):
        read_profile(file)


def test_a_profile_is_removed_on_request(file: Path) -> None:
    remove(file)
    for header in (HEADER, replace(HEADER, schema=0)):  # of another version it is one all the same
        append(file, header, [ROW])
        remove(file)
        assert not file.exists()


def test_versions_of_this_process_are_those_a_setting_names() -> None:
    import torch

    found = present_versions()
    assert set(found) == {"paradyse", "python", "torch", "triton"}
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
