"""Checkpoints: exact on any number of ranks, whole or not there, refused before any change."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool
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
    model = paradyse.shard(make(family, seed, num_hidden_layers=1, **config))
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


@pytest.mark.broad
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


@pytest.mark.broad
def test_resumed_without_ranks(trained: tuple[Path, list[float]]) -> None:
    """A plain model in one process, eager; the folder of the step is given."""
    folder, want = trained
    model = make("llama_odd", seed=1, num_hidden_layers=1)
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

    run = new_run("gpt2")
    model, call, optimizer = run
    train(run, range(1))
    weights, state = get_state_dict(call, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/torch")
    paradyse.save_checkpoint(folder, model, optimizer, step=1)
    return contents(model, optimizer)


def load_both_ways(folder: str, captured: bool) -> tuple[list[dict[str, Tensor]], list[float]]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    run = new_run("gpt2", seed=1)
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


@pytest.mark.broad
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

    from paradyse.weights.sharded_tensor import ShardedTensor

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


@pytest.mark.broad(but="llama_odd")
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
