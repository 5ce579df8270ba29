"""Batches of mixed lengths go on where a run ended, by themselves and by HuggingFace's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool
from models import make_model, relative, whole
from test_trainer import fresh_accelerate
from test_training import dataset_of, ways_for

import paradyse
from paradyse.distributed.axis import resolve_axis

LENGTHS = [23, 9, 7, 5, 3, 11, 13, 17, 5, 6, 5, 21]

Given = tuple[tuple[int, ...], tuple[int, ...]]
"""A batch's sequences, and seeds of this rank's calls."""


def made(**given: Any) -> Any:
    options = {"tokens_per_step": 45, "ways": ways_for(resolve_axis().size), "learn": False}
    return paradyse.MixedBatches(dataset_of(LENGTHS), **{**options, **given})


def of_loader() -> Any:
    data = dataset_of(LENGTHS)
    loader = [data[i : i + 3] for i in range(0, len(data), 3)]
    return paradyse.MixedBatches(loader, ways=ways_for(resolve_axis().size), learn=False)


def taken(batches: Any, num: int) -> list[Given]:
    """The next ``num``, over as many epochs as it takes."""
    found: list[Given] = []
    while len(found) < num:
        for step in batches:
            found.append((step.indices, tuple(x for share in step.shares for x in share.seeds)))
            if len(found) == num:
                break
    return found


def goes_on(make: Any, behind: tuple[int, ...]) -> tuple[list[Given], list[list[Given]]]:
    """Ten batches at once, and the rest of them ``behind`` so many batches."""
    at_once, rests = taken(make(), 10), []
    for num in behind:
        first, again = make(), make()
        taken(first, num)
        again.load_state_dict(first.state_dict())
        rests.append(taken(again, 10 - num))
    return at_once, rests


@pytest.mark.parametrize("make", [made, of_loader])
def test_the_rest_is_what_comes_behind(make: Any) -> None:
    behind = 0, 3, 5
    at_once, rests = goes_on(make, behind)
    assert len(at_once) > len([*make()])  # of two epochs at least
    for num, rest in zip(behind, rests, strict=True):
        assert rest == at_once[num:], num


@pytest.mark.broad
@pytest.mark.parametrize("make", [made, of_loader])
def test_so_it_is_on_several_ranks(make: Any, pool2: RankPool) -> None:
    for at_once, (rest,) in pool2.run(goes_on, make, (6,), timeout_s=100):
        assert len(rest) == 4 and rest == at_once[6:]


def test_a_state_of_an_epoch_that_is_over_is_the_beginning_of_the_next() -> None:
    batches = made()
    assert batches.state_dict()["batch"] == 0
    num = len([*batches])
    state = batches.state_dict()
    assert num > 2 and (state["epoch"], state["batch"]) == (1, 0)
    other = made()
    other.load_state_dict(state)
    assert [step.indices for step in other] == [step.indices for step in batches]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch": -1}, "batch=-1: give what state_dict"),
        ({"epoch": "one"}, "epoch='one': give what state_dict"),
        ({"seed": 3}, "seed=0, but the state is of batches of seed=3"),
        ({"sequences": 99}, "sequences=12, but the state is of batches of sequences=99"),
    ],
)
def test_other_states_are_refused(change: dict[str, Any], words: str) -> None:
    batches = made()
    taken(batches, 2)
    with pytest.raises(ValueError, match=words):
        made().load_state_dict({**batches.state_dict(), **change})


def test_a_loader_with_fewer_batches_is_told_of() -> None:
    batches = of_loader()
    batches.load_state_dict({"epoch": 0, "batch": 9})
    with pytest.raises(ValueError, match="4 batches in this epoch, but the state is of 9 batches"):
        next(iter(batches))


def loaded_differently() -> str:
    batches = made()
    batches.load_state_dict({**batches.state_dict(), "batch": resolve_axis().rank})
    try:
        next(iter(batches))
    except ValueError as e:
        return str(e)
    return ""


def test_ranks_that_load_different_states_are_told(pool2: RankPool) -> None:
    for words in pool2.run(loaded_differently):
        assert "the first batch" in words and "rank 1: 1" in words, words


def trained(folder: str, sharded: bool, steps: int, goes_on: bool) -> dict[str, torch.Tensor]:
    """Weights after ``steps`` of Trainer, which saves every third."""
    import transformers

    torch._dynamo.reset()

    class Trainer(paradyse.TrainerMixin, transformers.Trainer):  # type: ignore[misc]
        pass

    with fresh_accelerate():
        transformers.set_seed(0)
        model = make_model("llama", num_hidden_layers=1)
        if sharded:
            paradyse.shard(model)
        args = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            save_steps=3,
            lr_scheduler_type="constant",
            optim="sgd",
            learning_rate=0.1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        options = {"inner": "eager", "plan": "ulysses_z"}
        trainer = Trainer(model=model, args=args, batches=made(), backend_options=options)
        trainer.train(resume_from_checkpoint=goes_on)
        return {n: whole(p.detach()).clone() for n, p in model.named_parameters()}


@pytest.mark.broad
@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trainer_goes_on_behind_the_batches_of_before(
    sharded: bool, pool2: RankPool, tmp_path: Path
) -> None:
    """Eight steps are more than an epoch has, three fewer. Batches may be planned otherwise."""
    at_once, folder = str(tmp_path / "at once"), str(tmp_path / "in parts")
    want = pool2.run(trained, at_once, sharded, 8, False, timeout_s=120)
    pool2.run(trained, folder, sharded, 3, False, timeout_s=120)
    found = pool2.run(trained, folder, sharded, 8, True, timeout_s=120)
    for one, other in zip(found, want, strict=True):
        assert max(relative(one[n], w) for n, w in other.items()) < 1e-5


def test_a_checkpoint_that_does_not_say_what_comes_next(tmp_path: Path) -> None:
    trained(str(tmp_path), False, 3, False)
    Path(tmp_path, "checkpoint-3", "mixed_batches.json").unlink()
    with pytest.raises(ValueError, match="mixed_batches.json is missing.*ignore_data_skip=True"):
        trained(str(tmp_path), False, 4, True)
