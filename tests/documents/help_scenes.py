"""How the examples in public docstrings are run: on one rank, with a small model.

``model`` is a Llama of one layer, ``compiled`` the same compiled and run once, ``batch`` the
keyword arguments of a call; ``dataset`` has sequences of mixed lengths, for which ``ways`` are.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from models import make_batch
from scenes import Names, Scene, Sequences, on_disk, same_weights, small_llama

LENGTHS = (60, 12, 9, 11)
"""Tokens of the sequences of ``dataset``."""


def imported() -> Names:
    from torch.distributed.device_mesh import init_device_mesh

    import paradyse

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "sequence"))
    names = {"paradyse": paradyse, "torch": torch, "dist": torch.distributed, "mesh": mesh}
    return {**names, "DataLoader": torch.utils.data.DataLoader, "itertools": itertools}


def a_model() -> Names:
    """With what trains it."""
    model = small_llama(num_hidden_layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    batches = [make_batch("plain", 2, 13 + i) for i in range(3)]
    names = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches}
    plain = small_llama(num_hidden_layers=1)
    return {**imported(), **names, "plain": plain, "batch": batches[0]}


def compiled() -> Names:
    names = a_model()
    made = torch.compile(names["model"], backend="paradyse")
    made(**names["batch"]).loss.backward()
    names["model"].zero_grad()
    return {**names, "compiled": made}


def mixed() -> Names:
    """A step of ``batches``, under way in ``groups``."""
    names = a_model()
    paradyse = names["paradyse"]
    data = [{"input_ids": make_batch("plain", 1, n)["input_ids"][0]} for n in LENGTHS]
    ways = [paradyse.Way(1, 1e-4, 100, (100,), (1.0,))]
    batches = paradyse.MixedBatches(data, tokens_per_step=100, ways=ways)
    groups = paradyse.MixedModel(names["model"])
    return {**names, "dataset": data, "ways": ways, "batches": batches, "groups": groups}


def a_step() -> Names:
    names = mixed()
    (names["step"],) = names["batches"]
    for loss in names["groups"].losses(names["step"]):
        loss.backward()
    return names


def has_moved(names: Names) -> None:
    """The optimizer had gradients of every weight."""
    pairs = zip(names["model"].parameters(), names["plain"].parameters(), strict=True)
    assert not any(torch.equal(p, q) for p, q in pairs)


def written(names: Names) -> None:
    found = torch.load("weights.pt", weights_only=True)
    assert {*found} == {*names["model"].state_dict()}


def added_up(names: Names) -> None:
    """Gradients are those of all batches."""
    for batch in names["batches"]:
        names["plain"](**batch).loss.backward()
    pairs = zip(names["model"].parameters(), names["plain"].parameters(), strict=True)
    for p, q in pairs:
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def saved_before() -> Names:
    names = a_model()
    names["scheduler"].last_epoch = 7
    extra = {"scheduler": names["scheduler"].state_dict()}
    names["paradyse"].save_checkpoint(
        "run", names["model"], names["optimizer"], step=4, extra=extra
    )
    return names | {"scheduler": a_model()["scheduler"]}


def goes_on(names: Names) -> None:
    assert names["first_step"] == 5 and names["scheduler"].last_epoch == 7


def with_files() -> Names:
    from transformers import AutoModelForCausalLM

    return {
        **imported(),
        **on_disk(),
        "folder": "path/to/folder",
        "AutoModelForCausalLM": AutoModelForCausalLM,
    }


def read_from_files(names: Names) -> None:
    same_weights(getattr(names["model"], "_orig_mod", names["model"]), names["plain"])


def to_load() -> Names:
    names = with_files()
    return {**names, "model": small_llama(seed=5)}


def reported(names: Names) -> None:
    read_from_files(names)
    report = names["report"]
    assert report.num_tensors > 10 and report.kept == report.skipped == ()


def with_logger() -> Names:
    names, kept = a_model(), list[tuple[Names, int]]()
    names["wandb"] = SimpleNamespace(log=lambda scalars, step: kept.append((scalars, step)))
    model = torch.compile(names["model"], backend="paradyse")
    return {**names, "model": model, "kept": kept}


def was_told(names: Names) -> None:
    names["model"](**names["batch"]).loss.backward()
    ((scalars, step),) = names["kept"]
    assert step == 1 and scalars["paradyse/seq_len"] == 13


def has_trained(names: Names) -> None:
    """``compiled`` gave every weight the gradient that it has without."""
    names["plain"](**names["batch"]).loss.backward()
    for p, q in zip(names["model"].parameters(), names["plain"].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def profiled(names: Names) -> None:
    assert Path("h100.jsonl").is_file()
    names["compiled"] = names["model"]
    names["model"] = names["model"]._orig_mod
    names["compiled"](**names["batch"]).loss.backward()
    has_trained(names)


def in_trainer() -> Names:
    import transformers
    from test_trainer import arguments, fresh_accelerate

    from paradyse.mixed.ways_file import write_ways

    world = contextlib.ExitStack()
    world.enter_context(fresh_accelerate())
    names = mixed()
    Path("plans").mkdir()
    write_ways(Path("plans/ways.json"), names["ways"], "replicated")
    args = arguments(".", eval_strategy="no", max_steps=2)
    return {**names, "world": world, "transformers": transformers, "args": args}


def on_rows() -> Names:
    return {**in_trainer(), "dataset": Sequences()}


def on_mixed() -> Names:
    import transformers

    import paradyse

    class Trainer(paradyse.TrainerMixin, transformers.Trainer):  # type: ignore[misc]
        pass

    return {**in_trainer(), "Trainer": Trainer}


def trainer_has_trained(names: Names) -> None:
    names["world"].close()
    assert names["trainer"].state.global_step == 2
    has_moved(names)


def to_accelerate() -> Names:
    import accelerate
    from test_trainer import fresh_accelerate

    world = contextlib.ExitStack()
    world.enter_context(fresh_accelerate())
    loader = torch.utils.data.DataLoader(Sequences(), batch_size=2)
    return {**a_model(), "world": world, "accelerate": accelerate, "loader": loader}


def accelerated(names: Names) -> None:
    names["world"].close()
    has_moved(names)


def with_replicas() -> Names:
    return {**a_model(), "dataset": Sequences(), "stream": iter(range(9)), "num_epochs": 1}


def holds(check: Callable[[Names], bool]) -> Callable[[Names], None]:
    """An ``after`` that asserts what ``check`` says of the names that an example left."""

    def after(names: Names) -> None:
        assert check(names), {n: v for n, v in names.items() if n != "__builtins__"}

    return after


def scene(
    name: str, has: str, before: Callable[[], Names], after: Callable[[Names], Any], *puts: Any
) -> Scene:
    return Scene(f"help(paradyse.{name})", has, before, after, ranks=1, slow=False, puts=puts)


HELP_SCENES = (
    scene("shard", "optimizer.step()", a_model, has_moved),
    scene("full_state_dict", "rank0_only=True", a_model, written),
    scene("no_sync", "batches[:-1]", compiled, added_up),
    scene(
        "save_checkpoint", "step=20", a_model, holds(lambda n: Path("run/step-00000020").is_dir())
    ),
    scene("load_checkpoint", "found.step", saved_before, goes_on),
    scene("load_safetensors", '"meta"', with_files, read_from_files),
    scene("LoadReport", "bytes_read", to_load, reported),
    scene("explain", "print(", a_model, has_trained),
    scene("stats", "print(", compiled, holds(lambda n: n["stats"].steps == 1)),
    scene("Stats", "plan_switches", compiled, holds(lambda n: n["stats"].last.seq_len == 13)),
    scene("PlanReport", "block.chosen", compiled, holds(lambda n: len(n["report"].blocks) >= 2)),
    scene("on_step", "wandb", with_logger, was_told),
    scene("StepReport", "tokens_per_s", compiled, holds(lambda n: n["step"].number == 2)),
    scene("verify", "torch.randint", a_model, holds(lambda n: n["report"].ok)),
    scene("VerifyReport", "row.plan", a_model, holds(lambda n: len(n["report"].rows) > 0)),
    scene("profile", "h100", a_model, profiled, ("[2048, 16384]", "[8, 16]")),
    scene("Plan", "of_key", a_model, has_trained),
    scene("Workload", "def plan", a_model, has_trained),
    scene("TrainerMixin", "train_dataset=dataset", on_rows, trainer_has_trained),
    scene("TrainerMixin", "batches=batches", on_mixed, trainer_has_trained),
    scene("AcceleratorMixin", "accumulate(model)", to_accelerate, accelerated),
    scene("replica_of", "islice", with_replicas, holds(lambda n: len([*n["mine"]]) == 9)),
    scene("replica_sampler", "set_epoch", with_replicas, holds(lambda n: len(n["sampler"]) == 16)),
    scene("MixedBatches", "1 << 20", mixed, has_moved),
    scene("MixedModel", "step.loss", mixed, has_moved),
    scene(
        "measure_ways",
        "1 << 15",
        mixed,
        holds(lambda n: n["ways"][0].degree == 1),
        ("1 << 15", "128"),
    ),
    scene("sequences_of", "mask", imported, holds(lambda n: "labels" in n["sequences"][1])),
    scene("Way", "group_s", mixed, holds(lambda n: math.isclose(n["seconds"], 0.021))),
    scene(
        "MixedReport", "static_s", a_step, holds(lambda n: n["report"].num_tokens == sum(LENGTHS))
    ),
    scene("GroupReport", "slowest", a_step, holds(lambda n: n["slowest"].taken_s > 0)),
)
"""Of every example in the docstrings of public names."""
