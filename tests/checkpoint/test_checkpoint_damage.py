"""Bytes of a checkpoint that are not those that were saved: noticed by whoever reads them."""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool
from test_checkpoint import contents, equal
from test_checkpoint_files import refused, save_small, small_run
from torch import nn

import paradyse
from paradyse.checkpoint import storage

FLIPS = 150
"""Of one bit each, spread over all files of a checkpoint."""


def flip(file: Path, at: int, bit: int = 3) -> None:
    """Change one bit of ``file``, or change it back."""
    with open(file, "r+b") as stream:
        stream.seek(at)
        (byte,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ 1 << bit]))


def test_no_flipped_bit_loads(tmp_path: Path) -> None:
    """Anywhere in the files: headers, values, padding, metadata, checksums."""
    run, draw = small_run(), random.Random(0)
    path = paradyse.save_checkpoint(tmp_path, *run, step=1, extra={"lr": [0.1, 0.2]})
    sizes = {file: file.stat().st_size for file in path.iterdir()}
    places = [(file, at) for file, size in sizes.items() for at in range(size)]
    other = small_run(1)
    for i in range(FLIPS):
        file, at = places[(2 * i + 1) * len(places) // (2 * FLIPS)]
        bit = draw.randrange(8)
        flip(file, at, bit)
        text = refused(tmp_path, *other)
        named = "has other bytes for" if file.name.endswith(".distcp") else "cannot be read"
        assert named in text and file.name in text, (file.name, at, bit, text)
        assert "There is no other one beside it" in text
        flip(file, at, bit)
    assert paradyse.load_checkpoint(tmp_path, *other).extra == {"lr": [0.1, 0.2]}
    assert equal(contents(*other), contents(*run))


def stretch_of(path: Path, name: str, nth: int = 0) -> Any:
    """Where the stretch ``nth`` of the tensor ``name`` lies."""
    found = storage.read_metadata(path).storage_data.items()
    return [stretch for index, stretch in found if index.fqn == name][nth]


def test_the_error_names_file_tensor_and_way_out(tmp_path: Path) -> None:
    run = small_run()
    for step in (1, 2):
        path = paradyse.save_checkpoint(tmp_path, *run, step=step)
    at = stretch_of(path, "optimizer.state.weight.exp_avg")
    flip(path / at.relative_path, at.offset + at.length // 2)
    text = refused(tmp_path, *small_run(1))
    assert f"{path} is damaged: __0_0.distcp has other bytes for " in text
    assert "optimizer.state.weight.exp_avg" in text
    assert f"Load another one: {tmp_path / 'step-00000001'}" in text
    assert paradyse.load_checkpoint(tmp_path / "step-00000001", *small_run(1)).step == 1
    paradyse.load_checkpoint(path, small_run(1)[0])  # reads no state of the optimizer


def test_a_metadata_file_without_its_end(tmp_path: Path) -> None:
    path = paradyse.save_checkpoint(tmp_path, *small_run(), step=1)
    file = path / ".metadata"
    whole = file.read_bytes()
    for num_bytes in range(1, 14):
        file.write_bytes(whole[:-num_bytes])
        assert "cannot be read" in refused(tmp_path, *small_run(1))


def load_what_is_damaged(folder: str) -> str:
    return refused(Path(folder), *small_run(1))


@pytest.mark.parametrize("nproc", [1, 3])
def test_other_ranks_notice(
    nproc: int, tmp_path: Path, ranks: Callable[[int], RankPool], pool2: RankPool
) -> None:
    """The second rank's stretch of rows; of three ranks the first reads nothing of it."""
    pool2.run(save_small, str(tmp_path), timeout_s=60)
    path = tmp_path / "step-00000001"
    at = stretch_of(path, "model.weight", nth=1)
    assert at.relative_path == "__1_0.distcp"
    flip(path / at.relative_path, at.offset + at.length // 2)
    texts = ranks(nproc).run(load_what_is_damaged, str(tmp_path), timeout_s=60)
    for text in texts:
        assert "__1_0.distcp has other bytes for model.weight at [1, 0]" in text
    assert [text.startswith("on rank ") for text in texts] == [nproc == 3, False, False][:nproc]


@pytest.fixture
def saved_before_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with monkeypatch.context() as patch:
        patch.setattr(storage, "_note_checksums", lambda path, stretches: None)
        patch.setattr(storage, "_seal", lambda file: None)
        return paradyse.save_checkpoint(tmp_path, *small_run(), step=1)


def test_saved_before_checksums(
    saved_before_checksums: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = small_run(1)
    with caplog.at_level(logging.WARNING, "paradyse"):
        paradyse.load_checkpoint(saved_before_checksums, *run)
    assert equal(contents(*run), contents(*small_run()))
    assert f"{saved_before_checksums} has no checksums" in caplog.text
    caplog.clear()
    path = paradyse.save_checkpoint(saved_before_checksums.parent, *run, step=2)
    paradyse.load_checkpoint(path, *run)
    assert not caplog.text


# Code that files name


class Intruder:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@dataclass
class Position:
    """A class of the user's own."""

    epoch: int


def test_metadata_runs_no_code(saved_before_checksums: Path, tmp_path: Path) -> None:
    mark = tmp_path / "was_here"
    (saved_before_checksums / ".metadata").write_bytes(pickle.dumps(Intruder(mark)))
    text = refused(saved_before_checksums, *small_run(1))
    assert "which is no part of metadata" in text and not mark.exists()


def test_values_run_no_code(
    saved_before_checksums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "was_here"
    with monkeypatch.context() as patch:
        patch.setattr(storage._SavePlanner, "transform_object", dcp_transform())
        paradyse.save_checkpoint(tmp_path, *small_run(), step=2, extra=Intruder(mark))
    mark.unlink(missing_ok=True)
    text = refused(tmp_path, *small_run(1))
    assert "extra holds " in text and "add_safe_globals" in text and not mark.exists()


def dcp_transform() -> Any:
    from torch.distributed.checkpoint import DefaultSavePlanner

    return DefaultSavePlanner.transform_object


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    run = small_run()
    paradyse.save_checkpoint(tmp_path, *run, step=1)
    with pytest.raises(ValueError, match="extra holds .*Position, which a checkpoint may not name"):
        paradyse.save_checkpoint(tmp_path, *run, step=2, extra={"at": Position(3)})
    assert paradyse.load_checkpoint(tmp_path, *run).step == 1
    with torch.serialization.safe_globals([Position]):
        paradyse.save_checkpoint(tmp_path, *run, step=2, extra={"at": Position(3)})
        assert paradyse.load_checkpoint(tmp_path, *run).extra == {"at": Position(3)}
    assert "extra holds " in refused(tmp_path, *run)


def test_optimizers_of_plain_values(tmp_path: Path) -> None:
    """A schedule that steps them puts its own values into their groups."""
    model = nn.Linear(5, 3)
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop):
        optimizer = kind(model.parameters(), lr=torch.tensor(0.1) if kind.__name__ == "Adam" else 1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1.0, total_steps=9, cycle_momentum=False
        )
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        schedule.step()
        extra = {"scheduler": schedule.state_dict()}
        paradyse.save_checkpoint(tmp_path, model, optimizer, step=1, extra=extra)
        assert paradyse.load_checkpoint(tmp_path, model, optimizer).extra == extra
