"""Random states of Trainer's and accelerate's checkpoints, on other numbers of ranks; saves into
folders that have others; optimizers of several models."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import RankPool
from models import make_model, whole
from test_trainer import arguments, fresh_accelerate
from torch import nn

import paradyse
from paradyse.checkpoint.folder import next_step
from paradyse.checkpoint.save import save_checkpoint
from paradyse.planned_program import random_states


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def mesh_of(shape: tuple[int, int]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))


def rank_here() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def accelerator_of(mesh: Any = None) -> Any:
    import accelerate

    class Accelerator(paradyse.AcceleratorMixin, accelerate.Accelerator):  # type: ignore[misc]
        pass

    return Accelerator(mesh=mesh, backend_options={"inner": "eager"}, cpu=True)


# Random states


def through_trainer(folder: str, shape: tuple[int, int] | None, saves: bool) -> Any:
    import transformers

    class Trainer(paradyse.TrainerMixin, transformers.Trainer):  # type: ignore[misc]
        pass

    mesh = None if shape is None else mesh_of(shape)
    with fresh_accelerate():
        args = arguments(folder, eval_strategy="no")
        trainer = Trainer(model=nn.Linear(2, 2), args=args, mesh=mesh)
        seed(5 if saves else 50 + rank_here())
        if saves:
            trainer._save_rng_state(folder)
        else:
            trainer._load_rng_state(folder)
        return drawn()


def through_accelerate(folder: str, shape: tuple[int, int] | None, saves: bool) -> Any:
    with fresh_accelerate():
        accelerator = accelerator_of(None if shape is None else mesh_of(shape))
        seed(5 if saves else 50 + rank_here())
        if saves:
            accelerator.step = 3
            accelerator.save_state(folder)
        else:
            accelerator.load_state(folder)
        assert accelerator.step == 3
        return drawn()


@pytest.mark.parametrize("through", [through_trainer, through_accelerate])
def test_from_one_rank_to_several_and_back(
    through: Callable[..., Any], tmp_path: Path, pool2: RankPool
) -> None:
    """All ranks, of one group and of two, draw what the one that saved drew next."""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    want = through(one, None, True)
    assert through(one, None, False) == want
    for shape in ((1, 2), (2, 1)):
        assert pool2.run(through, one, shape, False, timeout_s=100) == [want] * 2
    assert pool2.run(through, two, (1, 2), True, timeout_s=100) == [want] * 2
    assert pool2.run(through, two, (1, 2), False, timeout_s=100) == [want] * 2
    assert through(two, None, False) == want


# Saves into folders that have others


def save_over(folder: str) -> tuple[list[str], bool]:
    with fresh_accelerate():
        accelerator = accelerator_of()
        model = accelerator.prepare(paradyse.shard(nn.Linear(3, 2)))
        values = []
        save_checkpoint(Path(folder, "shards_0"), model, step=7)
        for _ in range(2):
            with torch.no_grad():
                model.weight.add_(1)
            values.append(whole(model.weight))
            accelerator.save_state(folder)
            with torch.no_grad():
                model.weight.zero_()
            accelerator.load_state(folder)
            if not torch.equal(whole(model.weight), values[-1]):
                return [], False
        return sorted(p.name for p in Path(folder, "shards_0").iterdir()), True


def test_a_save_takes_the_place_of_one_of_a_higher_step(tmp_path: Path, pool2: RankPool) -> None:
    """As of a run that numbered saves by accelerate's steps."""
    for found in pool2.run(save_over, str(tmp_path), timeout_s=100):
        assert found == (["step-00000009"], True)


def test_steps_above_all_that_are_complete(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert next_step(folder) == 0
    path = save_checkpoint(folder, nn.Linear(1, 1), step=3)
    shutil.copytree(path, folder / "step-00000012.tmp")
    (folder / "step-00000020").mkdir()
    assert next_step(folder) == 4


# Optimizers of several models


def two_models(folder: str) -> tuple[bool, list[str]]:
    """One optimizer of two sharded models and of one that is not, and another one of the first."""
    with fresh_accelerate():
        accelerator = accelerator_of()
        models = [make_model("llama_odd", seed=i, num_hidden_layers=1) for i in range(2)]
        models = [*map(paradyse.shard, models), nn.Linear(2, 3)]
        first, *others = models[0].parameters()
        others += [p for m in models[1:] for p in m.parameters()]
        optimizers = [torch.optim.SGD(of, lr=0.1, momentum=0.9) for of in ([first], others)]
        accelerator.prepare(*models, *optimizers)

        def held() -> list[torch.Tensor]:
            states = [s["momentum_buffer"] for o in optimizers for s in o.state.values()]
            return [whole(x).clone() for m in models for x in m.parameters()] + [
                whole(x).clone() for x in states
            ]

        def step() -> None:
            for p in (first, *others):
                p.grad = torch.ones_like(p)
            for optimizer in optimizers:
                optimizer.step()

        step()
        accelerator.save_state(folder)
        before = held()
        step()
        assert not any(map(torch.equal, before, held()))
        accelerator.load_state(folder)
        names = sorted(p.name for p in Path(folder).iterdir() if p.is_dir())
        return all(map(torch.equal, before, held())), names


def test_one_optimizer_of_several_models(tmp_path: Path, pool2: RankPool) -> None:
    for found in pool2.run(two_models, str(tmp_path), timeout_s=100):
        assert found == (True, ["shards_0", "shards_1"])


def test_ranks_compare_the_generator_of_the_device_that_draws(monkeypatch: Any) -> None:
    """Dropout's seeds come from that of the host."""
    device = SimpleNamespace(get_rng_state=lambda device: torch.tensor([7]))
    monkeypatch.setattr(torch, "get_device_module", lambda device: device_of[device.type])
    device_of = {"cuda": device}
    on_host = random_states(torch.device("cpu"))
    assert len(on_host) == 1 and torch.equal(on_host[0], torch.get_rng_state())
    assert [int(x) for x in random_states(torch.device("cuda"))[1:]] == [7]
