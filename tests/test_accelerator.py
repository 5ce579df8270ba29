"""accelerate's loop over ranks: everything prepared, and each figure as in one process."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool
from models import make_batch, make_model, whole
from test_trainer import fresh_accelerate
from torch import Tensor, nn

from paradyse.accelerator import axes_of_all, compile_unless_compiled
from paradyse.over_replicas import over_replicas

EXACT = 1e-5
"""Relative, of float32 losses after a few steps of AdamW."""


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of one length each batch, lengths that vary over batches."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(96, (13 + 2 * (i // 4),), generator=g)
        return {"input_ids": ids, "labels": ids}


def loop(accelerator: Any, model: Any, num: int, folder: str = "") -> dict[str, Any]:
    """A loop as accelerate's documents have it: ``num`` batches, two to a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
    loader: Any = torch.utils.data.DataLoader(Rows(), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    found: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
    for _, batch in zip(range(num), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                found["norms"].append(norm.item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        gathered = accelerator.gather_for_metrics(loss.detach().repeat(len(batch["input_ids"])))
        found["losses"].append(gathered.mean().item())
        found["rates"].append(scheduler.get_last_lr()[0])
    found["samples"] = accelerator.reduce(torch.tensor(2), "sum").item()
    found["batches"] = len(loader)
    if folder:
        accelerator.save_state(folder)
        with torch.no_grad():
            before = {n: whole(p).clone() for n, p in model.named_parameters()}
            for p in model.parameters():
                p.mul_(2)
        accelerator.load_state(folder)
        same = [torch.equal(whole(p), before[n]) for n, p in model.named_parameters()]
        found["restored"] = all(same) and bool(same)
        found["names"] = {*accelerator.get_state_dict(model)} >= {*before}
    return found


def plain(accumulate: int = 2) -> dict[str, Any]:
    import accelerate

    with fresh_accelerate():
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        return loop(accelerator, make_model("llama"), 6)


def over_ranks(sharded: bool, folder: str, shape: tuple[int, int] = (1, 2)) -> dict[str, Any]:
    import accelerate
    from torch.distributed.device_mesh import init_device_mesh

    import paradyse

    class Accelerator(paradyse.AcceleratorMixin, accelerate.Accelerator):  # type: ignore[misc]
        pass

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))
    with fresh_accelerate():
        model = make_model("llama")
        if sharded:
            paradyse.shard(model, mesh)
        kept = [weakref.ref(p) for p in model.parameters()]  # as a step before would leave them
        options = {"inner": "eager"}
        how: dict[str, Any] = {"mesh": mesh, "backend_options": options, "cpu": True}
        told = {"dynamo_backend": "paradyse"} if sharded else {}
        accelerator = Accelerator(**how, **told, gradient_accumulation_steps=2)
        found = loop(accelerator, model, 6, folder)
        assert all(ref() is p for ref, p in zip(kept, model.parameters(), strict=True))
        return found


@pytest.mark.broad
@pytest.mark.parametrize("sharded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_everything_is_prepared(sharded: bool, pool2: RankPool, tmp_path: Path) -> None:
    want = plain()
    for found in pool2.run(over_ranks, sharded, str(tmp_path / "state"), timeout_s=200):
        for name in ("losses", "norms", "rates"):
            assert found[name] == pytest.approx(want[name], rel=EXACT), name
        assert found["samples"] == 2 and found["batches"] == want["batches"] == 7
        assert found["restored"] and found["names"]


@pytest.mark.slow
def test_two_groups_share_the_batches(pool4: RankPool) -> None:
    """Each takes half of them: a scheduler steps twice, as with two processes of accelerate."""
    want = plain(accumulate=4)
    for found in pool4.run(over_ranks, True, "", (2, 2), timeout_s=300):
        assert found["batches"] == 4 and found["samples"] == 4
        pairs = [sum(want["losses"][i : i + 2]) / 2 for i in (0, 2, 4)]  # the last after a step
        assert found["losses"][:3] == pytest.approx(pairs, rel=EXACT)
        assert found["norms"][0] == pytest.approx(want["norms"][0], rel=EXACT)
        assert found["rates"][1] == pytest.approx(1e-2 * 0.9**2)


def two_optimizers(folder: str) -> tuple[bool, bool]:
    """Whether both optimizers of a sharded model are as they were saved; and whether ranks have one
    random state where their own were lost."""
    import accelerate

    import paradyse

    class Accelerator(paradyse.AcceleratorMixin, accelerate.Accelerator):  # type: ignore[misc]
        pass

    with fresh_accelerate():
        model = paradyse.shard(make_model("llama"))
        accelerator = Accelerator(backend_options={"inner": "eager"}, cpu=True)
        halves = [list(model.parameters())[i::2] for i in range(2)]
        optimizers = [torch.optim.SGD(half, lr=0.1, momentum=0.9) for half in halves]
        model, *optimizers = accelerator.prepare(model, *optimizers)
        batch = make_batch("plain", 2, 13)

        def step() -> None:
            accelerator.backward(model(**batch).loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        step()
        accelerator.save_state(folder)
        before = [whole(s["momentum_buffer"]).clone() for o in optimizers for s in o.state.values()]
        step()
        rank = torch.distributed.get_rank()
        if rank:
            Path(folder, f"random_states_{rank}.pkl").unlink()  # as of a run on fewer ranks
        torch.manual_seed(rank)
        accelerator.load_state(folder)
        after = [whole(s["momentum_buffer"]) for o in optimizers for s in o.state.values()]
        states = [torch.empty_like(torch.get_rng_state()) for _ in range(2)]
        torch.distributed.all_gather(states, torch.get_rng_state())
        return all(map(torch.equal, before, after)), torch.equal(*states)


@pytest.mark.broad
def test_two_optimizers_of_one_model_and_random_states(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(two_optimizers, str(tmp_path / "state"), timeout_s=100) == [(True, True)] * 2


def gathered_of_groups() -> list[int]:
    """The numbers of all replicas, of which groups are 0 and 1, 2 and 3, or 0 and 2, 1 and 3."""
    import accelerate
    from torch.distributed.device_mesh import DeviceMesh

    import paradyse

    class Accelerator(paradyse.AcceleratorMixin, accelerate.Accelerator):  # type: ignore[misc]
        pass

    found: list[int] = []
    for ranks in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        with fresh_accelerate():
            mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("data", "sequence"))
            accelerator = Accelerator(mesh=mesh, cpu=True)
            number = torch.tensor([paradyse.replica_of(mesh)[0]])
            found += accelerator.gather(number).tolist()
    return found


@pytest.mark.broad
def test_what_is_gathered_is_of_each_group_once(pool4: RankPool) -> None:
    assert pool4.run(gathered_of_groups, timeout_s=100) == [[0, 1, 0, 1]] * 4


REFUSED: Mapping[str, Any] = {
    "inductor": ({"dynamo_backend": "inductor"}, "leave it out"),
    "by environment": ({"environment": "INDUCTOR"}, "ACCELERATE_DYNAMO_BACKEND"),
    "a mesh for the backend": ({"backend_options": {"mesh": "2x1"}}, "give it to Accelerator as"),
    "dispatched": ({"dispatch_batches": True}, "share each batch"),
}


def refused(how: dict[str, Any]) -> str:
    import accelerate

    import paradyse

    class Accelerator(paradyse.AcceleratorMixin, accelerate.Accelerator):  # type: ignore[misc]
        pass

    how = dict(how)
    with fresh_accelerate(), pytest.MonkeyPatch.context() as patch:
        if "environment" in how:
            patch.setenv("ACCELERATE_DYNAMO_BACKEND", how.pop("environment"))
        if how.pop("dispatch_batches", False):
            how["dataloader_config"] = accelerate.DataLoaderConfiguration(dispatch_batches=True)
        with pytest.raises(ValueError) as error:
            Accelerator(cpu=True, **how)
    return str(error.value)


@pytest.mark.parametrize("case", REFUSED)
def test_what_splits_batches_or_models_is_refused(case: str, pool2: RankPool) -> None:
    how, says = REFUSED[case]
    for text in pool2.run(refused, how):
        assert says in text, text


def trained_by_another_backend() -> str:
    import accelerate

    import paradyse

    class Accelerator(paradyse.AcceleratorMixin, accelerate.Accelerator):  # type: ignore[misc]
        pass

    with fresh_accelerate():
        accelerator = Accelerator(cpu=True)
        model = make_model("llama_odd")
        model.compile(backend="eager")
        model = accelerator.prepare(model)
        loss = model(**make_batch("plain", 1, 5)).loss
        with pytest.raises(ValueError) as error:
            accelerator.backward(loss)
    return str(error.value)


def test_options_for_a_compiled_model_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model, options = nn.Linear(2, 2), {"mesh": None, "plan": "auto"}
    for _ in range(2):
        compile_unless_compiled(caplog, model, options)
    other = nn.Linear(2, 2)
    other.compile(backend="eager")
    compile_unless_compiled(caplog, other, {"mesh": None})
    assert not caplog.messages
    compile_unless_compiled(caplog, other, options)
    compile_unless_compiled(caplog, model, {**options, "plan": "metp"})
    for text in (caplog.messages[0], caplog.messages[1]):
        assert "Linear was compiled before it was given to LogCaptureFixture" in text


def test_a_model_of_another_backend_is_refused(pool2: RankPool) -> None:
    for text in pool2.run(trained_by_another_backend):
        assert 'compile it with backend="paradyse"' in text


def of_groups(by_trainer: bool, shape: Sequence[Sequence[int]], folder: str) -> list[Any]:
    """What an Accelerator, ours or as Trainer has it, counts of things that groups have."""
    import accelerate
    from torch.distributed.device_mesh import DeviceMesh

    with fresh_accelerate():
        if by_trainer:
            mesh = DeviceMesh("cpu", shape, mesh_dim_names=("data", "sequence"))
            accelerator: Any = accelerate.Accelerator(cpu=True)
            over_replicas(accelerator, *axes_of_all(mesh, "Trainer"))
        else:
            accelerator = made(shape)
        name = f"group {accelerator.process_index}"
        found = [
            accelerator.gather_for_metrics([name, "b"]),
            accelerator.gather_for_metrics(torch.ones(1)).tolist(),
            accelerator.reduce(torch.tensor(3.0), "sum").item(),
            accelerator.reduce(torch.tensor(3.0), "mean").item(),
            accelerator.is_last_process,
        ]
        with accelerator.profile(accelerate.utils.ProfileKwargs(output_trace_dir=folder)):
            torch.ones(3).exp()
        return [*found, sorted(p.name for p in Path(folder).iterdir())]


@pytest.mark.parametrize("by_trainer", [False, True])
def test_things_of_groups_are_counted_once(
    by_trainer: bool, pool2: RankPool, tmp_path: Path
) -> None:
    """But each rank writes a trace, and one of all is the last."""
    traces = ["profile_0.json", "profile_1.json"]
    one = pool2.run(of_groups, by_trainer, [[0, 1]], str(tmp_path / "one"))
    want: list[Any] = [["group 0", "b"], [1.0], 3.0, 3.0]
    assert one == [[*want, False, traces], [*want, True, traces]]
    two = pool2.run(of_groups, by_trainer, [[1], [0]], str(tmp_path / "two"))
    want = [["group 0", "b", "group 1", "b"], [1.0] * 2, 6.0, 3.0]
    assert two == [[*want, False, traces], [*want, True, traces]]


def generated(inplace: bool, sharded: bool) -> list[tuple[bool, int, list[str]]]:
    """Whether tokens are one process's, how many graphs there are, and what was logged."""
    import logging

    import paradyse

    plain, model = (make_model("llama", use_cache=True).eval() for _ in range(2))
    for m in (plain, model):
        m.generation_config.pad_token_id = 0
    if sharded:
        paradyse.shard(model)
    options = {"inner": "eager"}
    call = model
    if inplace:
        model.compile(backend="paradyse", options=options)
    else:
        call = torch.compile(model, backend="paradyse", options=options)
    ids = make_batch("plain", 2, 9)["input_ids"]
    seen: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logs = [logging.getLogger(n) for n in ("paradyse", "torch._dynamo")]
    for log in logs:
        log.addHandler(handler)
    found = []
    try:
        for how in ({}, {"do_sample": True, "top_k": 20}, {"use_cache": False}):
            tokens = []
            for m in (call, plain):
                torch.manual_seed(7)
                tokens.append(m.generate(ids, max_new_tokens=12, **{"do_sample": False, **how}))
            found.append((torch.equal(*tokens), tokens[0].shape[1], list(seen)))
    finally:
        for log in logs:
            log.removeHandler(handler)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("inplace", [True, False])
def test_generate(inplace: bool, sharded: bool, pool2: RankPool) -> None:
    """Greedy, sampled, without a cache; whichever way the model was compiled."""
    for found in pool2.run(generated, inplace, sharded, timeout_s=300):
        assert len(found) == 3
        for same, length, seen in found:
            assert same and length == 21
            assert len(seen) <= 3, seen
            assert not any("recompile_limit" in text for text in seen)


def test_generate_on_shards(pool2: RankPool) -> None:
    """The quick one: called as people do after ``torch.compile``, outside of any graph."""
    for found in pool2.run(generated, False, True, timeout_s=200):
        assert all(same for same, _, _ in found)
        assert len(found[-1][2]) <= 1, found[-1][2]


def own_pace(folder: str) -> tuple[float, int, bool, list[bool]]:
    """The rate after one step of a schedule of its own on two groups; checkpoints of two saves with
    accelerate's counter as at the end of an epoch; whether the latest one is loaded; and what ranks
    make of a trigger that the last one alone has set, before and after they have heard of it."""
    import accelerate
    from torch.distributed.device_mesh import init_device_mesh

    import paradyse

    class Accelerator(paradyse.AcceleratorMixin, accelerate.Accelerator):  # type: ignore[misc]
        pass

    rank, options = torch.distributed.get_rank(), {"inner": "eager"}
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "sequence"))
    with fresh_accelerate():
        how: dict[str, Any] = {"cpu": True, "step_scheduler_with_optimizer": False}
        accelerator = Accelerator(mesh=mesh, backend_options=options, **how)
        optimizer = torch.optim.SGD(make_model("llama").parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
        optimizer.step()
        accelerator.prepare(schedule).step()
        rate = schedule.get_last_lr()[0]
    with fresh_accelerate():
        model = paradyse.shard(make_model("llama"))
        accelerator = Accelerator(backend_options=options, cpu=True)
        model = accelerator.prepare(model)
        first = next(model.parameters())
        for step in (2, 0):
            accelerator.step = step
            with torch.no_grad():
                first.fill_(step)
            accelerator.save_state(folder)
        with torch.no_grad():
            first.fill_(7)
        accelerator.load_state(folder)
        saves = len(list(Path(folder).glob("*/step-*")))
        if rank:
            accelerator.set_trigger()
        told = [accelerator.check_trigger() for _ in range(2)]
        return rate, saves, bool((whole(first) == 0).all()), told


@pytest.mark.broad
def test_schedules_saves_and_triggers_of_ones_own(pool2: RankPool, tmp_path: Path) -> None:
    for found in pool2.run(own_pace, str(tmp_path / "state"), timeout_s=200):
        assert found == (0.5, 1, True, [True, False])


def made(shape: Sequence[Sequence[int]]) -> Any:
    import accelerate
    from torch.distributed.device_mesh import DeviceMesh

    import paradyse

    cls: Any = type("Accelerator", (paradyse.AcceleratorMixin, accelerate.Accelerator), {})
    return cls(mesh=DeviceMesh("cpu", shape, mesh_dim_names=("data", "sequence")), cpu=True)


def parts_of(shape: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    with fresh_accelerate():
        accelerator = made(shape)
        with (
            accelerator.split_between_processes([1, 2, 3]) as mine,
            accelerator.split_between_processes([1, 2, 3], apply_padding=True) as padded,
        ):
            return mine, padded


def test_what_is_split_is_split_over_groups(pool2: RankPool) -> None:
    assert pool2.run(parts_of, [[0, 1]]) == [([1, 2, 3], [1, 2, 3])] * 2
    assert pool2.run(parts_of, [[0], [1]]) == [([1, 2], [1, 2]), ([3], [3, 3])]


def gone_on(folder: str, sharded: bool, saves: bool) -> list[Tensor]:
    """Weights and moments as ``folder`` has them, on however many ranks."""
    import paradyse

    torch._dynamo.reset()
    with fresh_accelerate():
        accelerator = made([list(range(torch.distributed.get_world_size()))])
        model = make_model("llama", num_hidden_layers=1, seed=0 if saves else 1)
        if sharded:
            paradyse.shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        batch = make_batch("plain", 2, 9)
        for _ in range(1 if saves else 0):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if saves:
            accelerator.save_state(folder)
        else:
            accelerator.load_state(folder)
        states = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        return [whole(x.detach()).clone() for x in (*model.parameters(), *states)]


def test_what_several_ranks_saved_goes_on_with_whole_weights(
    pool1: RankPool, pool2: RankPool, tmp_path: Path
) -> None:
    """On one rank and on two; and what these save then has no shards any more."""
    (want, _) = pool2.run(gone_on, str(tmp_path), True, True, timeout_s=100)
    for pool in (pool1, pool2):
        for found in pool.run(gone_on, str(tmp_path), False, False, timeout_s=100):
            assert all(map(torch.equal, found, want))
    pool1.run(gone_on, str(tmp_path), False, True, timeout_s=100)
    with pytest.raises(Exception, match="leave paradyse.shard out to go on from it"):
        pool2.run(gone_on, str(tmp_path), True, False, timeout_s=100)


def hooked(folder: str) -> list[str]:
    """What is said of a hook of ``save_state`` beside a sharded model."""
    import paradyse

    said = list[str]()
    with fresh_accelerate(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("paradyse.accelerator.log.warning", lambda text, *args: said.append(text))
        accelerator = made([[0, 1]])
        model = accelerator.prepare(paradyse.shard(make_model("llama", num_hidden_layers=1)))
        accelerator.save_state(folder + "/plain")
        accelerator.register_save_state_pre_hook(lambda models, weights, at: None)
        accelerator.save_state(folder + "/hooked")
        del model
    return said


def test_hooks_that_are_given_no_sharded_model_are_told_of(pool2: RankPool, tmp_path: Path) -> None:
    for said in pool2.run(hooked, str(tmp_path)):
        assert len(said) == 1 and "are given no sharded models" in said[0]
