"""HuggingFace's Trainer over ranks: losses, evaluation and checkpoints as in one process."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "trainer.py"
LONGEST = 301
"""Divides by no number of ranks; some files are shorter, so that batches are padded."""
EXACT = 1e-5
"""Relative, of float32 losses and norms after a few steps of AdamW; measured are 1e-7 to 4e-7."""


def example() -> Any:
    """The example as a module."""
    if str(SCRIPT.parent) not in sys.path:
        sys.path.append(str(SCRIPT.parent))  # what examples share lies beside them
    spec = importlib.util.spec_from_file_location("trainer_example", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its view of the world in the process, and reads what torchrun sets."""
    from accelerate.state import AcceleratorState, GradientState

    world = os.environ.get("WORLD_SIZE", "1")
    started = {"LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in started.items():
                patch.setenv(name, value)
            yield
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def arguments(folder: str, **options: Any) -> Any:
    from transformers import TrainingArguments

    defaults: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "no",
        "prediction_loss_only": True,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=folder, **(defaults | options))


History = list[Mapping[str, float]]


def losses(history: Any) -> list[float]:
    """Losses, norms and evaluation losses in order."""
    kept = ("loss", "grad_norm", "eval_loss")
    return [row[k] for row in history for k in kept if k in row]


def plain(folder: str, options: Mapping[str, Any], files: int = 16) -> tuple[list[float], Any]:
    """transformers' own Trainer, eager, on one process."""
    import transformers

    module = example()
    library = Path(os.__file__).parent
    with fresh_accelerate():
        transformers.set_seed(0)
        trainer = transformers.Trainer(
            model=module.make_model(LONGEST),
            args=arguments(folder, **options),
            train_dataset=module.Documents(library, 0, files, LONGEST),
            eval_dataset=module.Documents(library, 40, 5, LONGEST),
            data_collator=module.pad,
        )
        trainer.train()
        predicted = None
        if not trainer.args.prediction_loss_only:
            predicted = trainer.predict(trainer.eval_dataset).predictions
        return losses(trainer.state.log_history), predicted


def over_mesh(
    folder: str,
    shape: tuple[int, int],
    options: Mapping[str, Any],
    stream: bool = False,
    whole: bool = False,
    plan: Any = "auto",
) -> tuple[list[float], Any]:
    """The same with the mixin; weights sharded, or ``whole`` on every rank."""
    import transformers
    from torch.distributed.device_mesh import init_device_mesh

    import paradyse

    module = example()
    library = Path(os.__file__).parent
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))
    with fresh_accelerate():
        transformers.set_seed(0)
        model = module.make_model(LONGEST)
        if not whole:
            paradyse.shard(model, mesh)
        data: Any = module.Documents(library, 0, 16, LONGEST)
        trainer = module.Trainer(
            model=model,
            args=arguments(folder, **options),
            train_dataset=Stream(data) if stream else data,
            eval_dataset=module.Documents(library, 40, 5, LONGEST),
            data_collator=module.pad,
            mesh=mesh,
            backend_options={"inner": "eager", "plan": plan},
        )
        trainer.train()
        predicted = None
        if not trainer.args.prediction_loss_only:
            predicted = trainer.predict(trainer.eval_dataset).predictions
        return losses(trainer.state.log_history), predicted


WAY = [{"degree": 1, "fixed_s": 0.0, "max_tokens": 99, "lengths": (99,), "times_s": (1.0,)}]


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ({"batches": [1]}, {}, "give a paradyse.MixedBatches, not list"),
        ({"train_dataset": [1]}, {}, "train_dataset: leave it out with batches of mixed lengths"),
        ({}, {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2: leave it out"),
        ({}, {"max_steps": -1}, "max_steps=-1: give TrainingArguments max_steps"),
        (
            {"model": None, "model_init": lambda: example().make_model(9)},
            {},
            "model_init makes another model for each training",
        ),
    ],
)
def test_what_does_not_go_with_batches_of_mixed_lengths(
    given: Mapping[str, Any], options: Mapping[str, Any], words: str, tmp_path: Path
) -> None:
    import paradyse

    module = example()
    data = [{"input_ids": torch.arange(9)}]
    batches = paradyse.MixedBatches(
        data, tokens_per_step=50, ways=[paradyse.Way(**way) for way in WAY]
    )
    with fresh_accelerate(), pytest.raises(ValueError, match=re.escape(words)):
        args = arguments(str(tmp_path), eval_strategy="no", **options)
        module.Trainer(**{"model": module.make_model(9), "args": args, "batches": batches, **given})


def test_a_loss_of_ones_own_does_not_go_with_batches_of_mixed_lengths(tmp_path: Path) -> None:
    """It would not be called."""
    import paradyse

    module = example()

    class Weighted(module.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 3 * super().compute_loss(*args, **kwargs)

    data, ways = [{"input_ids": torch.arange(9)}], [paradyse.Way(**way) for way in WAY]
    batches = paradyse.MixedBatches(data, tokens_per_step=50, ways=ways)
    words = "compute_loss of Weighted: leave it out with batches of mixed lengths"
    with fresh_accelerate(), pytest.raises(ValueError, match=words):
        args = arguments(str(tmp_path), eval_strategy="no")
        Weighted(model=module.make_model(9), args=args, batches=batches)


class Stream(torch.utils.data.IterableDataset[Any]):
    """A dataset without a length."""

    def __init__(self, rows: Any):
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[i] for i in range(len(self.rows)))


def assert_equal_runs(got: Any, want: Any, tolerance: float = EXACT) -> None:
    assert len(got[0]) == len(want[0]) and len(want[0]) >= 9
    assert got[0] == pytest.approx(want[0], rel=tolerance)
    if want[1] is not None:
        assert got[1].shape == want[1].shape
        torch.testing.assert_close(torch.tensor(got[1]), torch.tensor(want[1]), rtol=0, atol=1e-3)


@pytest.mark.slow
def test_predictions_and_accumulation(pool1: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    """Evaluation on five samples in batches of two gives five predictions, whatever the ranks."""
    options = {"prediction_loss_only": False, "gradient_accumulation_steps": 2}
    (want,) = pool1.run(plain, str(tmp_path / "plain"), options, timeout_s=100)
    for got in pool2.run(over_mesh, str(tmp_path / "two"), (1, 2), options, timeout_s=200):
        assert_equal_runs(got, want)


@pytest.mark.slow
def test_two_replicas_of_two_ranks(pool1: RankPool, pool4: RankPool, tmp_path: Path) -> None:
    """Batches of one sequence on two replicas are batches of two: losses weigh tokens."""
    (want,) = pool1.run(plain, str(tmp_path / "plain"), {}, timeout_s=100)
    options = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
    for got in pool4.run(over_mesh, str(tmp_path / "four"), (2, 2), options, timeout_s=250):
        assert_equal_runs(got, want)


@pytest.mark.slow
def test_data_without_a_length(pool1: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    """Two replicas of one rank: samples of a stream go round, as in batches of two."""
    options = {"train_sampling_strategy": "sequential"}
    (want,) = pool1.run(plain, str(tmp_path / "plain"), options, timeout_s=100)
    options = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
    args = (str(tmp_path / "two"), (2, 1), options, True)
    for got in pool2.run(over_mesh, *args, timeout_s=200):
        assert_equal_runs(got, want)


@pytest.mark.slow
def test_accumulation_by_tiles(pool1: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    """Sums over the tokens of two batches, of logits that exist by tiles alone."""
    options = {"gradient_accumulation_steps": 2}
    plan = {"attention": "metp", "mlp": "megatron_cz", "head": "tiled"}
    (want,) = pool1.run(plain, str(tmp_path / "plain"), options, timeout_s=100)
    args = (str(tmp_path / "two"), (1, 2), options, False, False, plan)
    for got in pool2.run(over_mesh, *args, timeout_s=200):
        assert_equal_runs(got, want)


def accumulated(folder: str, each: bool) -> tuple[list[str], list[float]]:
    """What became of the gradients of each call, and losses and norms."""
    from paradyse.weights.no_sync import GradientSync

    states: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        begin = GradientSync.begin

        def note(self: Any, *given: Any) -> str:
            states.append(begin(self, *given).split(" with ")[0])
            return states[-1]

        patch.setattr(GradientSync, "begin", note)
        how = {"gradient_accumulation_kwargs": {"sync_each_batch": each}}
        options = {"gradient_accumulation_steps": 3, "max_steps": 2, "accelerator_config": how}
        options |= {"eval_strategy": "no"}
        return states, over_mesh(folder, (1, 2), options, plan="megatron_cz")[0]


@pytest.mark.broad
def test_gradients_are_sent_once_a_step(pool2: RankPool, tmp_path: Path) -> None:
    at_once = pool2.run(accumulated, str(tmp_path / "each"), True, timeout_s=200)
    later = pool2.run(accumulated, str(tmp_path / "once"), False, timeout_s=200)
    for (each, want), (once, got) in zip(at_once, later, strict=True):
        assert set(each) == {"sent at once"} and len(each) >= len(once) >= 4
        assert once[:3] == ["kept back", "kept back", "sent"] and len(got) == 4
        assert got == pytest.approx(want, rel=EXACT)


def as_in_readme(folder: str, alone: bool) -> list[float]:
    """README's first script of a trainer, or its equal of plain transformers."""
    import transformers
    from torch.distributed.device_mesh import init_device_mesh

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = next(block for block in blocks if "transformers.Trainer" in block)
    module, library = example(), Path(os.__file__).parent
    with fresh_accelerate():
        transformers.set_seed(0)
        names = {"model": module.make_model(65), "args": arguments(folder, eval_strategy="no")}
        names["dataset"] = module.Documents(library, 0, 16, 65)
        if alone:
            names["train_dataset"] = names.pop("dataset")
            trainer = transformers.Trainer(**names)
            trainer.train()
            return losses(trainer.state.log_history)
        names["mesh"] = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "sequence"))
        names["model"].compile(
            backend="paradyse", options={"inner": "eager", "mesh": names["mesh"]}
        )
        exec(script, names)
        return losses(names["trainer"].state.log_history)


@pytest.mark.slow
def test_the_script_in_readme(pool1: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    (want,) = pool1.run(as_in_readme, str(tmp_path / "plain"), True, timeout_s=100)
    assert len(want) == 8
    for got in pool2.run(as_in_readme, str(tmp_path / "two"), False, timeout_s=200):
        assert got == pytest.approx(want, rel=EXACT)


@pytest.mark.slow
def test_bfloat16(pool1: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    """bf16=True: accelerate's autocast. Losses are off by bfloat16's rounding (2^-8) of logits."""
    (want,) = pool1.run(plain, str(tmp_path / "plain"), {"bf16": True}, timeout_s=100)
    args = (str(tmp_path / "two"), (1, 2), {"bf16": True}, False, True)
    for got in pool2.run(over_mesh, *args, timeout_s=200):
        assert got[0] == pytest.approx(want[0], rel=2**-8)


def refuse(folder: str) -> list[str]:
    import transformers
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    import paradyse

    module = example()
    texts = []

    def ask(compiled: str = "", mesh: Any = None, **options: Any) -> None:
        model = module.make_model(LONGEST)
        if compiled:
            model.compile(backend=compiled)
        with fresh_accelerate(), pytest.raises(ValueError) as error:
            data = module.Documents(Path(os.__file__).parent, 0, 4, LONGEST)
            trainer = module.Trainer(
                model=model,
                args=arguments(folder, **options),
                train_dataset=data,
                eval_dataset=data,
                data_collator=module.pad,
                mesh=mesh,
            )
            trainer.train()
        texts.append(str(error.value))

    assert issubclass(module.Trainer, transformers.Trainer | paradyse.TrainerMixin)
    part = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("data", "sequence"))["sequence"]
    ask(mesh=part)
    ask(mesh=init_device_mesh("cpu", (2,)), train_sampling_strategy="batch_rebalance")
    ask(compiled="eager")
    return texts


def test_what_is_refused(pool2: RankPool, tmp_path: Path) -> None:
    for part, rebalance, other in pool2.run(refuse, str(tmp_path), timeout_s=100):
        assert "the mesh holds 1 of 2 ranks" in part
        assert "batch_rebalance" in rebalance and "leave it out" in rebalance
        assert "another backend than paradyse" in other


def test_operations_of_a_batch_are_counted_once() -> None:
    """Trainer adds them up over ranks."""
    from paradyse.distributed.axis import Axis
    from paradyse.trainer import TrainerMixin

    class Counting:
        def floating_point_ops(self, inputs: Any) -> int:
            return 96

    class Both(TrainerMixin, Counting):
        def __init__(self) -> None:
            self._sequence = Axis("of a test of operations", 2, 0)

    assert Both().floating_point_ops({}) == 48


def seeds_of_workers(folder: str) -> int:
    """The process that workers of this rank's loader take their seeds for."""
    module = example()
    with fresh_accelerate():
        data = module.Documents(Path(os.__file__).parent, 0, 4, LONGEST)
        args = arguments(folder, dataloader_num_workers=1)
        trainer = module.Trainer(
            model=module.make_model(LONGEST),
            args=args,
            train_dataset=data,
            eval_dataset=data,
            data_collator=module.pad,
        )
        return int(trainer.get_train_dataloader().worker_init_fn.keywords["rank"])


def test_workers_of_one_group_draw_the_same(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(seeds_of_workers, str(tmp_path), timeout_s=100) == [0, 0]


def saved_slowly(folder: str) -> int:
    """Steps that are done where the first rank writes a model for longer than ranks wait for one
    another in a call."""
    import paradyse

    module = example()
    with fresh_accelerate(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARADYSE_COLLECTIVE_TIMEOUT_S", "4")
        torch._dynamo.reset()
        trainer = module.Trainer(
            model=paradyse.shard(module.make_model(LONGEST)),
            args=arguments(
                folder, eval_strategy="no", max_steps=2, save_steps=1, save_strategy="steps"
            ),
            train_dataset=module.Documents(Path(os.__file__).parent, 0, 8, LONGEST),
            data_collator=module.pad,
            backend_options={"inner": "eager"},
        )
        save = trainer._save

        def slowly(*args: Any, **kwargs: Any) -> None:
            time.sleep(6 * trainer.args.should_save)
            save(*args, **kwargs)

        patch.setattr(trainer, "_save", slowly)
        trainer.train()
        return int(trainer.state.global_step)


@pytest.mark.broad
def test_a_save_may_take_longer_than_ranks_wait_in_a_call(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(saved_slowly, str(tmp_path), timeout_s=100) == [2, 2]


def test_what_another_run_left_in_a_checkpoint_is_no_part_of_it(tmp_path: Path) -> None:
    """One of several ranks, with sharded weights, in the folder of one that has them whole."""
    from paradyse.accelerator import SHARDS

    module = example()
    stale = tmp_path / "checkpoint-1" / SHARDS
    (stale / "step-00000001").mkdir(parents=True)
    with fresh_accelerate():
        trainer = module.Trainer(
            model=module.make_model(LONGEST),
            args=arguments(str(tmp_path), eval_strategy="no", max_steps=1, save_strategy="steps"),
            train_dataset=module.Documents(Path(os.__file__).parent, 0, 4, LONGEST),
            data_collator=module.pad,
            backend_options={"inner": "eager"},
        )
        trainer.train()
    assert (tmp_path / "checkpoint-1" / "optimizer.pt").is_file() and not stale.exists()


def start(folder: Path, num_ranks: int, *options: str) -> History:
    """Run the example as a user does; its losses."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--standalone", str(SCRIPT), "--out", str(folder), "--longest", str(LONGEST)]
    command += ["--steps", "4", "--save-every", "2", "--inner", "eager", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    history: History = json.loads((folder / "losses.json").read_text())
    return history


@pytest.mark.slow
def test_example_trains_saves_and_resumes(pool1: RankPool, tmp_path: Path) -> None:
    """The example on two ranks: losses of one plain process, also after going on from a save."""
    import transformers

    options = {"eval_steps": 2, "prediction_loss_only": True}
    folder = tmp_path / "two"
    fixed = ("--plan", "ulysses_z")  # two starts of auto may plan, and round, differently
    history = start(folder, 2, *fixed)
    ((want, _),) = pool1.run(plain, str(tmp_path / "plain"), options, 40, timeout_s=100)
    assert losses(history) == pytest.approx(want, rel=EXACT)

    last = transformers.AutoModelForCausalLM.from_pretrained(folder / "checkpoint-4")
    shutil.rmtree(folder / "checkpoint-4")
    again = start(folder, 2, *fixed, "--resume")
    assert losses(again) == pytest.approx(want, rel=EXACT)
    resumed = transformers.AutoModelForCausalLM.from_pretrained(folder / "final")
    for (name, a), b in zip(resumed.named_parameters(), last.parameters(), strict=True):
        assert torch.equal(a, b), name
