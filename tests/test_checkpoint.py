"""Checkpoints: exact on any number of ranks, whole or not there, refused before any change."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankFailure, RankPool, run_ranks
from models import make_batch, make_model, relative, whole
from torch import Tensor, nn

import paradyse

PLANS = ("megatron_ts", "megatron_cz", "metp", "ulysses_z")
BEFORE, AFTER = 3, 20
"""Steps before the checkpoint, and losses compared after it."""

Run = tuple[Any, Any, torch.optim.Optimizer]
"""The model, what to call, the optimizer."""
LOSSES = 1e-9
"""Largest relative difference: sums are taken in another order."""


def loss_in_float64(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """HuggingFace's own casts to float32."""
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    return nn.functional.cross_entropy(logits.reshape(-1, vocab_size), shifted)


def make(family: str, seed: int, **config: Any) -> Any:
    model = make_model(family, torch.float64, seed, **config)
    model.loss_function = loss_in_float64
    return model


def new_run(family: str = "llama_odd", seed: int = 0, **config: Any) -> Run:
    """Float64, sharded and compiled; a plan of its own for every step."""
    model = paradyse.shard(make(family, seed, **config))
    plans = itertools.cycle(PLANS)
    options = {"plan": lambda workload: next(plans), "inner": "eager"}
    call = torch.compile(model, backend="paradyse", options=options)
    return model, call, torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)


def train(run: Run, steps: range) -> list[float]:
    _, call, optimizer = run
    losses = []
    for i in steps:
        optimizer.zero_grad()
        loss = call(**make_batch("plain", 2, 9 + i % 5, seed=i)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def contents(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of all weights and all of the optimizer's state, whole, by name."""
    out = {f"weight {n}": x.clone() for n, x in paradyse.full_state_dict(model).items()}
    for name, p in model.named_parameters():
        state = sorted(optimizer.state.get(p, {}).items())
        out |= {f"{k} of {name}": whole(x) for k, x in state}
    return out


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# From four ranks to two and to one


def save_amid_training(folder: str) -> list[float]:
    run = new_run()
    model, call, optimizer = run
    train(run, range(BEFORE))
    saved = contents(model, optimizer)
    path = paradyse.save_checkpoint(folder, call, optimizer, step=BEFORE, extra={"at": "here"})
    assert path == Path(folder) / "step-00000003"
    if torch.distributed.get_rank() == 0:
        torch.save(saved, Path(folder) / "saved.pt")
    assert equal(saved, contents(model, optimizer))
    return train(run, range(BEFORE, BEFORE + AFTER))


def resume(folder: str, captured: bool) -> list[float]:
    run = new_run(seed=1)
    model, call, optimizer = run
    if captured:  # weights lie by heads and columns then, and there is state to replace
        train(run, range(1))
    found = paradyse.load_checkpoint(folder, model if captured else call, optimizer)
    assert (found.step, found.extra) == (BEFORE, {"at": "here"})
    assert equal(torch.load(Path(folder) / "saved.pt"), contents(model, optimizer))
    return train(run, range(BEFORE, BEFORE + (4 if captured else AFTER)))


@pytest.fixture(scope="module")
def trained(
    ranks: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[float]]:
    """A checkpoint of four ranks, and the losses of the run that went on."""
    folder = tmp_path_factory.mktemp("run")
    losses = ranks(4).run(save_amid_training, str(folder), timeout_s=300)
    assert all(x == losses[0] for x in losses)
    return folder, losses[0]


@pytest.mark.parametrize(("nproc", "captured"), [(2, False), (2, True), (1, False)])
def test_resumed_on_other_ranks(
    nproc: int,
    captured: bool,
    trained: tuple[Path, list[float]],
    ranks: Callable[[int], RankPool],
) -> None:
    """Weights and moments bit for bit; losses as those of the run that was not interrupted."""
    folder, want = trained
    for got in ranks(nproc).run(resume, str(folder), captured, timeout_s=300):
        assert len(got) == (4 if captured else AFTER)
        assert max(abs(a / b - 1) for a, b in zip(got, want)) < LOSSES


def test_resumed_without_ranks(trained: tuple[Path, list[float]]) -> None:
    """A plain model in one process, eager; the folder of the step is given."""
    folder, want = trained
    model = make("llama_odd", seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    found = paradyse.load_checkpoint(folder / "step-00000003", model, optimizer)
    assert found.path == folder / "step-00000003"
    assert equal(torch.load(folder / "saved.pt"), contents(model, optimizer))
    got = train((model, model, optimizer), range(BEFORE, BEFORE + AFTER))
    assert max(abs(a / b - 1) for a, b in zip(got, want)) < LOSSES


# PyTorch's own calls


def save_both_ways(folder: str) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    run = new_run("gpt2", num_hidden_layers=1)
    model, call, optimizer = run
    train(run, range(1))
    weights, state = get_state_dict(call, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/torch")
    paradyse.save_checkpoint(folder, model, optimizer, step=1)
    return contents(model, optimizer)


def load_both_ways(folder: str, captured: bool) -> tuple[list[dict[str, Tensor]], list[float]]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    run = new_run("gpt2", seed=1, num_hidden_layers=1)
    model, call, optimizer = run
    if captured:
        train(run, range(1))
        optimizer.zero_grad()
    loaded = []
    for path in (f"{folder}/torch", f"{folder}/step-00000001"):
        with torch.no_grad():
            torch._foreach_zero_(list(model.parameters()))
        weights, state = get_state_dict(call, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
        set_state_dict(call, optimizer, model_state_dict=weights, optim_state_dict=state)
        loaded.append(contents(model, optimizer))
    return loaded, train(run, range(1, 2))


def test_plain_torch_saves_and_loads(tmp_path: Path, pool2: RankPool, pool4: RankPool) -> None:
    """``get_state_dict`` and ``set_state_dict``: what they saved, and what we did; on other ranks,
    before and after a capture.

    The embedding of GPT-2 is tied to its head.
    """
    want = pool2.run(save_both_ways, str(tmp_path), timeout_s=200)[0]
    losses = []
    for pool, captured in ((pool4, False), (pool2, True)):
        for loaded, after in pool.run(load_both_ways, str(tmp_path), captured, timeout_s=200):
            assert all(equal(got, want) for got in loaded)
            losses += after
    assert len(losses) == 6 and all(abs(x / losses[0] - 1) < LOSSES for x in losses)


def count_what_is_written(folder: str) -> tuple[int, int, set[str]]:
    """Bytes of this rank's rows, bytes of the rank's file, and what DCP asked of the tensors."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from paradyse.shards import ShardedTensor

    asked = set()

    def spy(self: Any, name: str, do: Any, *args: Any) -> Any:
        asked.add(name)
        return do(self, *args)

    patch = pytest.MonkeyPatch()
    for name in ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"):
        do = getattr(ShardedTensor, name)
        patch.setattr(ShardedTensor, name, partialmethod(spy, name, do))
    table = paradyse.shard(nn.Embedding(1001, 64))
    try:
        dcp.save(table.state_dict(), checkpoint_id=folder)
        dcp.load(table.state_dict(), checkpoint_id=folder)
    finally:
        patch.undo()
    mine = table.weight.local.numel() * 4
    file = Path(folder) / f"__{dist.get_rank()}_0.distcp"
    return mine, file.stat().st_size, asked


def test_each_rank_writes_its_rows(tmp_path: Path, pool2: RankPool) -> None:
    """PyTorch calls the protocol: no rank writes a whole tensor."""
    for mine, written, asked in pool2.run(count_what_is_written, str(tmp_path), timeout_s=60):
        assert mine < written < 1.1 * mine
        assert asked == {"__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"}


def save_in_the_background(folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    table = paradyse.shard(nn.Embedding(11, 4))
    want = whole(table.weight)
    saved = dcp.async_save(table.state_dict(), checkpoint_id=folder)
    with torch.no_grad():  # what is written is a copy
        table.weight.zero_()
    saved.result()
    dcp.load(table.state_dict(), checkpoint_id=folder)
    assert torch.equal(whole(table.weight), want)


def test_saved_while_training_goes_on(tmp_path: Path, pool2: RankPool) -> None:
    pool2.run(save_in_the_background, str(tmp_path), timeout_s=60)


def share_rows_with_another_axis(folder: str) -> tuple[int, int]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    torch.manual_seed(0)
    table = paradyse.shard(nn.Embedding(3, 4), mesh)
    want = whole(table.weight)
    path = paradyse.save_checkpoint(folder, table, step=0)
    with torch.no_grad():
        table.weight.zero_()
    paradyse.load_checkpoint(folder, table)
    assert torch.equal(whole(table.weight), want)
    from torch.distributed.checkpoint import FileSystemReader

    entry = FileSystemReader(path).read_metadata().state_dict_metadata["model.weight"]
    return len(entry.chunks), sum(c.sizes.numel() for c in entry.chunks)


def test_rows_on_several_ranks_are_written_once(tmp_path: Path, pool4: RankPool) -> None:
    got = pool4.run(share_rows_with_another_axis, str(tmp_path), timeout_s=60)
    assert got == [(2, 12)] * 4


def hold_no_rows(folder: str) -> None:
    torch.manual_seed(0)
    table = paradyse.shard(nn.Linear(3, 2))  # of four ranks two hold nothing
    want = {n: whole(x) for n, x in table.named_parameters()}
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    paradyse.save_checkpoint(folder, table, optimizer, step=1)  # before the first step
    with torch.no_grad():
        for p in table.parameters():
            p.zero_()
    paradyse.load_checkpoint(folder, table, optimizer)
    assert all(torch.equal(whole(x), want[n]) for n, x in table.named_parameters())
    assert not optimizer.state


def test_ranks_without_rows(tmp_path: Path, pool4: RankPool) -> None:
    pool4.run(hold_no_rows, str(tmp_path), timeout_s=60)


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

    from paradyse import checkpoint_files

    one = dist.get_rank() == 1
    run = small_run(1)
    before = contents(*run)
    patch = pytest.MonkeyPatch()
    if where == "load" and one:
        patch.setattr(checkpoint_files, "_size_bytes", lambda file: None)
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
        "write": "save failed on rank 1: OSError: disk full",
        "save": "the optimizer has 2 parameters that the model has not",
    }
    for where, part in parts.items():
        texts = pool2.run(refuse_together, str(tmp_path), where, timeout_s=60)
        assert all(part in text for text in texts), texts
        assert ("on rank 1: " in texts[0]) and (where == "write" or "on rank" not in texts[1])
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".tmp"] == ["step-00000001"]


def save_small(folder: str) -> None:
    paradyse.save_checkpoint(folder, *small_run(), step=1)


# Files for transformers


def save_for_transformers(family: str, folder: str) -> tuple[str, int]:
    import torch.distributed as dist

    model = paradyse.shard(make_model(family))
    call = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    call(input_ids=make_batch("plain", 1, 7)["input_ids"])  # weights lie by heads and columns then
    weights = paradyse.full_state_dict(call, cpu=True, rank0_only=True)
    kept = len(weights)
    call.save_pretrained(folder, state_dict=weights, is_main_process=dist.get_rank() == 0)
    with pytest.raises(ValueError) as error:
        model.save_pretrained(folder + "-sharded")
    return str(error.value), kept


@pytest.mark.parametrize("family", ["llama_odd", "gpt2"])
def test_transformers_loads_what_was_saved(family: str, tmp_path: Path, pool2: RankPool) -> None:
    """Plain ``from_pretrained``, with equal logits; GPT-2 is tied."""
    results = pool2.run(save_for_transformers, family, str(tmp_path / "out"), timeout_s=100)
    model = make_model(family)
    assert [kept for _, kept in results] == [len(model.state_dict()), 0]
    for text, _ in results:
        assert "state_dict=paradyse.full_state_dict(model, cpu=True, rank0_only=True)" in text
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert equal(dict(loaded.state_dict()), dict(model.state_dict()))
    batch = make_batch("plain", 2, 9)
    assert relative(loaded(**batch).logits, model(**batch).logits) == 0
