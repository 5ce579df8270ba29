"""Checkpoints on the disk: killed saves, what is kept, and what is refused."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankFailure, RankPool, run_ranks
from test_checkpoint import contents, equal
from torch import nn

import paradyse
from paradyse.checkpoint.folder import METADATA, make_room

# Killed while saving


def small_run(seed: int = 0) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(paradyse.shard(model).parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def be_killed(folder: str, doomed: int) -> None:
    from torch.distributed.checkpoint import filesystem

    paradyse.save_checkpoint(folder, *small_run(0), step=1)
    write, count = filesystem._write_item, itertools.count()

    def half(*args: Any) -> Any:
        if torch.distributed.get_rank() == doomed and next(count) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args)

    filesystem._write_item = half
    paradyse.save_checkpoint(folder, *small_run(1), step=2)


def go_on(folder: str) -> None:
    model, optimizer = small_run(2)
    found = paradyse.load_checkpoint(folder, model, optimizer)
    assert found.step == 1
    assert equal(contents(model, optimizer), contents(*small_run(0)))
    paradyse.save_checkpoint(folder, *small_run(1), step=2)
    assert paradyse.load_checkpoint(folder, model, optimizer).step == 2
    assert equal(contents(model, optimizer), contents(*small_run(1)))


@pytest.mark.broad(but="1")
@pytest.mark.parametrize("doomed", [0, 1])
def test_a_rank_is_killed_while_it_writes(doomed: int, tmp_path: Path, pool2: RankPool) -> None:
    with pytest.raises(RankFailure, match=f"rank {doomed} of 2 died, exit code -9"):
        run_ranks(be_killed, 2, str(tmp_path), doomed, timeout_s=60, pg_timeout_s=10)
    names = {"step-00000001", "step-00000002.tmp"}
    assert {p.name for p in tmp_path.iterdir()} == names
    pool2.run(go_on, str(tmp_path), timeout_s=60)
    assert {p.name for p in tmp_path.iterdir()} == {"step-00000001", "step-00000002"}


@contextlib.contextmanager
def moments(folder: Path) -> Iterator[list[Path]]:
    """Copies of ``folder``: one before each operation that changes what lies on the disk."""
    taken: list[Path] = []

    def watched(do: Any) -> Any:
        def copy_first(*args: Any, **kwargs: Any) -> Any:
            taken.append(folder.with_name(f"moment{len(taken)}"))
            shutil.copytree(folder, taken[-1])
            return do(*args, **kwargs)

        return copy_first

    with pytest.MonkeyPatch.context() as patch:
        for holder, names in ((os, ("fsync", "unlink", "rmdir")), (Path, ("rename", "mkdir"))):
            for name in names:
                patch.setattr(holder, name, watched(getattr(holder, name)))
        patch.setattr(torch, "save", watched(torch.save))
        yield taken


@pytest.mark.parametrize("step", [1, 2], ids=["the same step", "the next"])
def test_whole_at_every_moment(step: int, tmp_path: Path) -> None:
    """A second save, with the first one replaced or removed: one of the two loads at any time."""
    folder = tmp_path / "run"
    first, second = small_run(0), small_run(1)
    paradyse.save_checkpoint(folder, *first, step=1)
    with moments(folder) as taken:
        paradyse.save_checkpoint(folder, *second, step=step, keep=1)
    taken.append(folder)
    found = []
    for copy in taken:
        model, optimizer = small_run(2)
        paradyse.load_checkpoint(copy, model, optimizer)
        found.append(equal(contents(model, optimizer), contents(*second)))
        assert found[-1] or equal(contents(model, optimizer), contents(*first))
    assert len(taken) > 15
    assert found == sorted(found) and not found[0] and found[-1]
    assert [p.name for p in folder.iterdir()] == [f"step-0000000{step}"]


def test_keeps_as_many_as_asked(tmp_path: Path) -> None:
    model, optimizer = small_run()
    for step in (1, 2, 30, 3):
        paradyse.save_checkpoint(tmp_path, model, optimizer, step=step, keep=2)
    # the later step of a former run is not this run's to remove
    assert sorted(p.name[-2:] for p in tmp_path.iterdir()) == ["02", "03", "30"]
    for keep in (0, True, 1.5):
        with pytest.raises(ValueError, match="keep is"):
            paradyse.save_checkpoint(tmp_path, model, step=4, keep=keep)
    for step in (-1, "4", None):
        with pytest.raises(ValueError, match="step is"):
            paradyse.save_checkpoint(tmp_path, model, step=step)


# Refused


def refused(folder: Path, model: Any, optimizer: Any = None, kind: Any = ValueError) -> str:
    """What the error says; nothing has changed."""
    before = contents(model, optimizer or torch.optim.SGD(model.parameters()))
    with pytest.raises(kind) as error:
        paradyse.load_checkpoint(folder, model, optimizer)
    assert equal(before, contents(model, optimizer or torch.optim.SGD(model.parameters())))
    return str(error.value)


def test_no_checkpoint(tmp_path: Path) -> None:
    model, _ = small_run()
    assert "does not exist" in refused(tmp_path / "no", model, kind=FileNotFoundError)
    (tmp_path / "step-00000007.tmp").mkdir()
    text = refused(tmp_path, model, kind=FileNotFoundError)
    assert "no complete checkpoint (step-00000007.tmp: a save that did not finish)" in text


def test_another_model(tmp_path: Path) -> None:
    model, optimizer = small_run()
    paradyse.save_checkpoint(tmp_path, model, optimizer, step=1)
    assert "shapes differ: weight ([3, 5] there, [3, 6] here)" in refused(tmp_path, nn.Linear(6, 3))
    text = refused(tmp_path, nn.Sequential(nn.Linear(5, 3, bias=False)))
    assert "is of another model: it lacks 0.weight; it has weight, bias besides" in text
    assert "it has bias besides" in refused(tmp_path, nn.Linear(5, 3, bias=False))
    with pytest.raises(ValueError, match="weight, bias: on the meta device"):
        paradyse.load_checkpoint(tmp_path, nn.Linear(5, 3, device="meta"))


def test_another_optimizer(tmp_path: Path) -> None:
    model, optimizer = small_run()
    paradyse.save_checkpoint(tmp_path, model, optimizer, step=1)
    other = torch.optim.SGD(model.parameters(), momentum=0.9)
    assert "holds the state of AdamW, this optimizer is SGD" in refused(tmp_path, model, other)
    for parameters in ([model.bias, model.weight], [model.bias]):
        text = refused(tmp_path, model, torch.optim.AdamW(parameters))
        assert "other parameter groups: of [2] parameters there" in text
    strange = torch.optim.AdamW(nn.Linear(5, 3).parameters())
    for call in (
        lambda: paradyse.load_checkpoint(tmp_path, model, strange),
        lambda: paradyse.save_checkpoint(tmp_path, model, strange, step=2),
    ):
        with pytest.raises(ValueError, match="2 parameters that the model has not"):
            call()
    paradyse.save_checkpoint(tmp_path, model, step=2)
    assert "holds no optimizer" in refused(tmp_path, model, optimizer)
    assert paradyse.load_checkpoint(tmp_path, model).step == 2


@pytest.mark.parametrize("how", ["missing", "short", "metadata", "foreign"])
def test_damaged(how: str, tmp_path: Path) -> None:
    model, optimizer = small_run()
    for step in (1, 2):
        path = paradyse.save_checkpoint(tmp_path, model, optimizer, step=step)
    file = path / ("__0_0.distcp" if how in ("missing", "short") else ".metadata")
    if how == "foreign":
        import torch.distributed.checkpoint as dcp

        shutil.rmtree(path)
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    elif how == "missing":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)
    text = refused(tmp_path, *small_run(1))
    part = {
        "missing": "is damaged: missing are __0_0.distcp",
        "short": "is damaged: __0_0.distcp has ",
        "metadata": ".metadata cannot be read",
        "foreign": "was not written by paradyse.save_checkpoint",
    }[how]
    assert part in text
    assert how == "foreign" or f"Load another one: {tmp_path / 'step-00000001'}" in text
    assert paradyse.load_checkpoint(tmp_path / "step-00000001", *small_run(1)).step == 1


def refuse_together(folder: str, where: str) -> tuple[str, str, str]:
    """One rank's model, file system or disk differs; all ranks raise."""
    import torch.distributed as dist

    from paradyse.checkpoint import folder as files

    one = dist.get_rank() == 1
    run = small_run(1)
    before = contents(*run)
    patch = pytest.MonkeyPatch()
    if where == "load" and one:
        patch.setattr(files, "_size_bytes", lambda file: None)
    if where == "write" and one:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(RuntimeError if where == "write" else ValueError) as error:
        if where == "load":
            paradyse.load_checkpoint(folder, *run)
        elif where == "write":
            paradyse.save_checkpoint(folder, *run, step=9)
        else:
            optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters()) if one else run[1]
            paradyse.save_checkpoint(folder, run[0], optimizer, step=9)
    patch.undo()
    assert equal(before, contents(*run))
    return str(error.value)


def test_what_one_rank_finds_all_ranks_raise(tmp_path: Path, pool2: RankPool) -> None:
    pool2.run(save_small, str(tmp_path), timeout_s=60)
    parts = {
        "load": "is damaged: missing are ",
        "write": "OSError: disk full",
        "save": "the optimizer has 2 parameters that the model has not",
    }
    for where, part in parts.items():
        texts = pool2.run(refuse_together, str(tmp_path), where, timeout_s=60)
        assert all(part in text for text in texts), texts
        assert ("on rank 1: " in texts[0]) and ("on rank" not in texts[1])
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".tmp"] == ["step-00000001"]


def save_small(folder: str) -> None:
    paradyse.save_checkpoint(folder, *small_run(), step=1)


# Files for transformers


def test_what_a_killed_save_had_replaced_counts_for_no_step(tmp_path: Path) -> None:
    """It was killed before it removed what it had replaced: ``keep`` counts steps."""
    for name in ("step-00000010.old", "step-00000020", "step-00000020.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / METADATA).touch()
    assert make_room(tmp_path, 30).name == "step-00000030"
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step-00000010.old", "step-00000020"}
