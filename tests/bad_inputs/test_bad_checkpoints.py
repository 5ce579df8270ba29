"""Checkpoints of runs that are refused, with their words; model, optimizer and files stay.

A run of two checkpoints is saved; each case spoils a copy of it, or gives what does not fit.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input import Words, refused
from torch import nn

import paradyse

NEWEST = "step-00000002"
META, DATA = f"{NEWEST}/.metadata", f"{NEWEST}/__0_0.distcp"
OTHER = "Load another one: "
GIVE = "give the folder that paradyse.save_checkpoint was given"
NONE = "holds no complete checkpoint"

Run = tuple[nn.Module, torch.optim.Optimizer]


def run_of(seed: int = 0) -> Run:
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        paradyse.save_checkpoint(folder, *run_of(), step=step)
    return folder


def held(run: Run) -> str:
    """All that a run holds."""
    return str((run[0].state_dict(), run[1].state_dict()))


def only(folder: Path, name: str) -> None:
    """Nothing in ``folder`` but an empty folder ``name``."""
    for path in folder.iterdir():
        shutil.rmtree(path)
    (folder / name).mkdir()


def in_place_of(file: Path, make: Callable[[Path], Any]) -> None:
    file.unlink()
    make(file)


UNREADABLE = (".metadata cannot be read", OTHER, "step-00000001")
MISSING = (f"{NEWEST} is damaged: missing are __0_0.distcp", OTHER, "step-00000001")
SHORT = (f"{NEWEST} is damaged: __0_0.distcp has ", "bytes", OTHER)

FOLDERS: dict[str, tuple[Callable[[Path], Any], type[Exception], Words]] = {
    "no folder": (shutil.rmtree, FileNotFoundError, ("does not exist", GIVE)),
    "an empty folder": (
        lambda f: [shutil.rmtree(f), f.mkdir()],
        FileNotFoundError,
        (NONE, GIVE),
    ),
    "a file": (
        lambda f: [shutil.rmtree(f), f.write_text("my notes")],
        FileNotFoundError,
        (NONE, GIVE),
    ),
    "a save that was killed": (
        lambda f: only(f, "step-00000007.tmp"),
        FileNotFoundError,
        (NONE, "(step-00000007.tmp: a save that did not finish)", GIVE),
    ),
    "a step of nothing": (lambda f: only(f, "step-00000007"), FileNotFoundError, (NONE, GIVE)),
    "a name that is no step": (lambda f: only(f, "step-7"), FileNotFoundError, (NONE, GIVE)),
    "another program's folder": (lambda f: only(f, "checkpoint-7"), FileNotFoundError, NONE),
    "metadata of nothing": (lambda f: os.truncate(f / META, 0), ValueError, UNREADABLE),
    "metadata cut": (lambda f: os.truncate(f / META, 100), ValueError, UNREADABLE),
    "metadata in words": (lambda f: (f / META).write_text("notes"), ValueError, UNREADABLE),
    "metadata of zeros": (lambda f: (f / META).write_bytes(bytes(500)), ValueError, UNREADABLE),
    "metadata of another program": (
        lambda f: (f / META).write_bytes(pickle.dumps({"step": 7})),
        ValueError,
        UNREADABLE,
    ),
    "metadata that is a number": (
        lambda f: (f / META).write_bytes(pickle.dumps(7)),
        ValueError,
        UNREADABLE,
    ),
    "data gone": (lambda f: (f / DATA).unlink(), ValueError, MISSING),
    "data that is a folder": (lambda f: in_place_of(f / DATA, Path.mkdir), ValueError, MISSING),
    "data that is a pipe": (lambda f: in_place_of(f / DATA, os.mkfifo), ValueError, MISSING),
    "data that leads nowhere": (
        lambda f: in_place_of(f / DATA, lambda file: file.symlink_to("nowhere")),
        ValueError,
        MISSING,
    ),
    "no data": (lambda f: os.truncate(f / DATA, 0), ValueError, SHORT),
    "half of the data": (
        lambda f: os.truncate(f / DATA, (f / DATA).stat().st_size // 2),
        ValueError,
        SHORT,
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_that_are_refused(name: str, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    spoil, kind, words = FOLDERS[name]
    spoil(folder)
    run = run_of(seed=1)
    before = held(run)
    with refused(tmp_path, words, kind):
        paradyse.load_checkpoint(folder, *run)
    assert held(run) == before


def optimizer_of(*parameters: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


WRONG_RUNS: dict[str, tuple[Callable[[], tuple[Any, Any]], Words]] = {
    "a wider model": (
        lambda: (nn.Linear(6, 3), None),
        ("is of another model", "shapes differ: weight ([3, 5] there, [3, 6] here)"),
    ),
    "a model with more outputs": (
        lambda: (nn.Linear(5, 4), None),
        "shapes differ: bias ([3] there, [4] here), weight ([3, 5] there, [4, 5] here)",
    ),
    "a model of other names": (
        lambda: (nn.Sequential(nn.Linear(5, 3)), None),
        "it lacks 0.weight, 0.bias; it has weight, bias besides",
    ),
    "a model with less": (lambda: (nn.Linear(5, 3, bias=False), None), "it has bias besides"),
    "a model of nothing": (lambda: (nn.ReLU(), None), "it has weight, bias besides"),
    "a model without memory": (
        lambda: (nn.Linear(5, 3, device="meta"), None),
        ("weight, bias: on the meta device", "call paradyse.load_safetensors"),
    ),
    "a dict": (lambda: ({}, None), "give a torch.nn.Module, not dict"),
    "no model": (lambda: (None, None), "give a torch.nn.Module, not NoneType"),
    "another optimizer": (
        lambda: (m := nn.Linear(5, 3), torch.optim.SGD(m.parameters())),
        ("holds the state of AdamW, this optimizer is SGD", "or none to load the weights alone"),
    ),
    "a scheduler as optimizer": (
        lambda: (m := nn.Linear(5, 3), torch.optim.lr_scheduler.StepLR(optimizer_of(m.bias), 1)),
        "holds the state of AdamW, this optimizer is StepLR",
    ),
    "parameters in another order": (
        lambda: (m := nn.Linear(5, 3), optimizer_of(m.bias, m.weight)),
        "an optimizer with other parameter groups: of [2] parameters there, of [2] here",
    ),
    "fewer parameters": (
        lambda: (m := nn.Linear(5, 3), optimizer_of(m.bias)),
        "an optimizer with other parameter groups: of [2] parameters there, of [1] here",
    ),
    "another model's parameters": (
        lambda: (nn.Linear(5, 3), optimizer_of(*nn.Linear(5, 3).parameters())),
        ("the optimizer has 2 parameters that the model has not", "model.parameters()"),
    ),
}


@pytest.mark.parametrize("name", WRONG_RUNS)
def test_runs_that_do_not_fit(name: str, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    make, words = WRONG_RUNS[name]
    run = make()
    before = str(run[0].state_dict()) if isinstance(run[0], nn.Module) else ""
    with refused(tmp_path, words):
        paradyse.load_checkpoint(tmp_path / "run", *run)
    assert not before or str(run[0].state_dict()) == before


def test_an_optimizer_that_was_not_saved(tmp_path: Path) -> None:
    run = run_of()
    paradyse.save_checkpoint(tmp_path, run[0], step=1)
    with refused(tmp_path, ("holds no optimizer", "leave it out to load the weights alone")):
        paradyse.load_checkpoint(tmp_path, *run)


def save(folder: Path, **changes: Any) -> None:
    model, optimizer = run_of()
    given = {"folder": folder, "model": model, "optimizer": optimizer, "step": 3, **changes}
    paradyse.save_checkpoint(**given)


STEP = "give the number of steps done, an int of 0 or more"
KEEP = "give an int of 1 or more, or None for all"

SAVES: dict[str, tuple[Callable[[Path], Any], Words]] = {
    "a step below 0": (lambda f: save(f, step=-1), f"step is -1; {STEP}"),
    "a step as text": (lambda f: save(f, step="4"), f"step is '4'; {STEP}"),
    "a step of None": (lambda f: save(f, step=None), f"step is None; {STEP}"),
    "a step of True": (lambda f: save(f, step=True), f"step is True; {STEP}"),
    "half a step": (lambda f: save(f, step=1.5), f"step is 1.5; {STEP}"),
    "keep none": (lambda f: save(f, keep=0), f"keep is 0; {KEEP}"),
    "keep less than none": (lambda f: save(f, keep=-1), f"keep is -1; {KEEP}"),
    "keep True": (lambda f: save(f, keep=True), f"keep is True; {KEEP}"),
    "keep half": (lambda f: save(f, keep=1.5), f"keep is 1.5; {KEEP}"),
    "keep a text": (lambda f: save(f, keep="2"), f"keep is '2'; {KEEP}"),
    "a file as folder": (
        lambda f: save(f / META),
        (".metadata cannot be made (File exists)", "give another folder"),
    ),
    "a folder in a file": (
        lambda f: save(f / META / "run"),
        ("run cannot be made (Not a directory)", "give another folder"),
    ),
    "a device as folder": (
        lambda f: save(Path("/dev/full")),
        ("/dev/full cannot be made (File exists)", "give another folder"),
    ),
    "no model": (lambda f: save(f, model=None), "give a torch.nn.Module, not NoneType"),
    "a dict as model": (lambda f: save(f, model={}), "give a torch.nn.Module, not dict"),
    "another model's optimizer": (
        lambda f: save(f, model=nn.Linear(5, 3)),
        ("the optimizer has 2 parameters that the model has not", "model.parameters()"),
    ),
}


@pytest.mark.parametrize("name", SAVES)
def test_saves_that_are_refused(name: str, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    call, words = SAVES[name]
    with refused(tmp_path, words):
        call(tmp_path / "run")
