"""HuggingFace's Trainer over sequence-parallel ranks.

``Trainer`` splits data over all ranks and wraps the model in DistributedDataParallel; the mixin
makes it split data over replicas only and leave gradients to the backend. It imports nothing of
transformers, as it precedes whichever trainer class is used.

It was tried with transformers 5.23 and accelerate 1.15 (``tests/test_trainer.py``), and with TRL
1.16 (``tests/test_trl.py``). Overridden methods that begin with an underscore are not public; each
calls the original.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paradyse.accelerator import (
    SHARDS,
    axes_of_all,
    check_no_mesh,
    compile_unless_compiled,
    plain_optimizer,
    remove_shards,
    share_random_states,
)
from paradyse.checkpoint.save import load_checkpoint, save_checkpoint
from paradyse.distributed.axis import lacks_group
from paradyse.mixed.batches import MixedBatches, MixedStep
from paradyse.mixed.training import MixedModel
from paradyse.over_replicas import lies_on, over_replicas
from paradyse.profiling.step_reports import calls_of
from paradyse.runtime.registry import check_compiled
from paradyse.token_scores import score_in_graph
from paradyse.torch_private import original_module
from paradyse.weights.shard import full_state_dict, is_sharded

WHOLE_OPTIMIZER = ("optimizer.pt", "optimizer.bin")
"""Files in a checkpoint of Trainer's with the state of an optimizer of replicated weights."""

SCHEDULER = "scheduler.pt"
"""File in a checkpoint of Trainer's with the state of the scheduler."""

BATCHES = "mixed_batches.json"
"""File in a checkpoint with the state of batches of mixed lengths."""

_Trainer: Any = object
"""For the type checker: the class that the mixin precedes is the user's choice."""


class TrainerMixin(_Trainer):
    """Put before a trainer class of transformers, it trains over a mesh of sequence-parallel ranks.

    The model is compiled in place (``nn.Module.compile``), unless it is compiled already; so is the
    reference model of TRL's DPOTrainer and its like.
    ``per_device_train_batch_size`` is the batch of one sequence group. Losses, evaluation and
    checkpoints are those of one process per replica; model files are whole and load in plain
    transformers, at any number of ranks. All ranks of a sequence group go on from a checkpoint with
    the random states (Python's, NumPy's, PyTorch's) of the group's first, or of the first rank of
    all where there were fewer ranks, or one, when it was saved. CUDA's goes from one rank to
    several, or back, in no file of Trainer's, which logs so. Of ``gradient_accumulation_steps``
    calls all but the last run inside ``paradyse.no_sync``, unless accelerate is told to
    ``sync_each_batch``.

    With ``batches`` every step is a batch of mixed lengths, in groups of ranks of different degree
    (``paradyse.MixedBatches``), in place of ``train_dataset`` and a collator. Then a step is one of
    ``batches``, of which ``max_steps`` says how many there are, and evaluation computes each of its
    batches on every rank.

    Args:
        mesh: as the option of the backend; it must hold every rank. None: one sequence group.
        backend_options: ``options`` of ``torch.compile(..., backend="paradyse")`` besides ``mesh``.
        batches: a ``MixedBatches`` to train on; None: ``train_dataset``.
        log_steps: add the latest call's length, plan and speed (``StepReport.scalars``) to what
            Trainer logs, and so to TensorBoard, wandb or whatever it reports to.
    Raises:
        ValueError: a mesh without some of the ranks, or one in ``backend_options``; what
            ``torch.compile`` returned as the model; one process with several GPUs; arguments of
            Trainer's that split data or wrap the model in a way of their own, or that do not go
            with ``batches``; one of TRL's trainers that sample (GRPOTrainer, RLOOTrainer, ..), on
            several ranks.

    Example:

        class Trainer(paradyse.TrainerMixin, transformers.Trainer):
            pass

        paradyse.shard(model, mesh)  # optional
        trainer = Trainer(model=model, args=args, train_dataset=dataset, mesh=mesh)
        trainer.train()

    Example of mixed lengths:

        batches = paradyse.MixedBatches(dataset, tokens_per_step=1 << 20, ways="plans/ways.json")
        trainer = Trainer(model=model, args=args, batches=batches)
        trainer.train()
    """

    def __init__(
        self,
        *args: Any,
        mesh: DeviceMesh | None = None,
        backend_options: Mapping[str, Any] | None = None,
        batches: MixedBatches | None = None,
        log_steps: bool = False,
        **kwargs: Any,
    ) -> None:
        self._log_steps, self._batches = log_steps, batches
        self._mixed: MixedModel | None = None
        self._mesh = mesh
        self._whole_state: dict[str, Any] | None = None
        self._ran = False
        self._num_evaluated = 0
        num_ranks = dist.get_world_size() if dist.is_initialized() else lacks_group()
        if num_ranks > 1 and hasattr(type(self), "_generate_and_score_completions"):  # TRL's
            raise ValueError(
                f"{type(self).__name__} deals prompts, random seeds and rewards to single ranks, "
                "where the ranks of a sequence group are to have the same: on several ranks write "
                "the loop yourself, as examples/grpo_loop.py does"
            )
        check_no_mesh(self, backend_options)
        given = kwargs.get("model", args[0] if args else None)
        if original_module(given) is not given:
            raise ValueError(
                "the model is what torch.compile returned, by whose names of weights nothing that "
                "is saved could be loaded: give the model itself, which TrainerMixin compiles with "
                'backend_options, or call model.compile(backend="paradyse", ...)'
            )
        super().__init__(*args, **kwargs)
        if self.model_init is not None:
            raise ValueError(
                "model_init makes another model for each training, of which only the first would "
                "be compiled: give model=model_init(), and a Trainer for each training"
            )
        _check(self.args, self._sequence.size * self._replicas.size)
        model = self.model
        if batches is not None:
            _check_mixed(self, batches, mesh)
            self._mixed = MixedModel(model, backend_options)
            return
        reference = getattr(self, "ref_model", None)  # TRL's: what the model is compared with
        for one in (model,) if reference is None else (model, reference):
            score_in_graph(one)
            compile_unless_compiled(self, one, {"mesh": mesh, **(backend_options or {})})

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if not lies_on(model, device):
            super()._move_model_to_device(model, device)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return super()._load_rng_state(checkpoint)
        index = self.args.process_index
        own = Path(checkpoint, "rng_state.pth" if self.args.world_size == 1 else _rng_file(index))
        others = (Path(checkpoint, name) for name in (_rng_file(0), "rng_state.pth"))
        found = own if own.is_file() else next((p for p in others if p.is_file()), None)
        if index == 0 and found is not None and found != own:
            with TemporaryDirectory() as folder:  # Trainer's own reads the name that it would write
                Path(folder, own.name).symlink_to(found.absolute())
                super()._load_rng_state(folder)
        else:
            super()._load_rng_state(checkpoint)
        share_random_states(self._sequence, self._mesh, own.is_file())

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's own; the Accelerator takes each sequence group for one process.

        Raises:
            ValueError: of a mesh, as of the class.
        """
        super().create_accelerator_and_postprocess()  # ranks are joined now
        self._sequence, self._replicas = axes_of_all(self._mesh, "Trainer")
        over_replicas(self.accelerator, self._sequence, self._replicas)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples that all replicas together take in one step with ``args``."""
        return self._train_batch_size * args.gradient_accumulation_steps * self._replicas.size

    def get_train_dataloader(self) -> Any:
        """The batches of mixed lengths, or Trainer's own loader."""
        return super().get_train_dataloader() if self._batches is None else self._batches

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's own, whose workers draw the same numbers on all ranks of a group, as these are
        to have the same batches; Trainer has each rank's draw others."""
        loader = super()._get_dataloader(*args, **kwargs)
        init = getattr(loader, "worker_init_fn", None)
        if isinstance(init, partial) and "rank" in init.keywords:
            loader.worker_init_fn = partial(init, rank=self._replicas.rank)
        return loader

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer's own of ``epoch_iterator``, ``args`` and ``kwargs``; of mixed lengths the next
        batch, whose loss is a mean over its labels already."""
        if self._mixed is None:
            return super().get_batch_samples(epoch_iterator, *args, **kwargs)
        return list(islice(epoch_iterator, 1)), None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One step, after which the model is known to be compiled with this backend.

        Raises:
            ValueError: the model was compiled with another one.
        """
        if self._mixed is not None:
            return self._mixed_step(*args, **kwargs)
        loss = super().training_step(*args, **kwargs)
        if not self._ran and dist.is_initialized():
            check_compiled(self.model)
        self._ran = True
        return loss

    def _mixed_step(self, model: Any, inputs: MixedStep, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert self._mixed is not None
        model.train()
        if callable(train := getattr(self.optimizer, "train", None)):
            train()
        for loss in self._mixed.losses(inputs):
            self.accelerator.backward(loss)
        assert inputs.loss is not None
        return inputs.loss.to(self.args.device, torch.float32)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's own, of ``args`` and ``kwargs``."""
        found = super().evaluation_loop(*args, **kwargs)
        self._num_evaluated = found.num_samples
        return found

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's own, of ``args`` and ``kwargs``."""
        found = super().predict(*args, **kwargs)
        self._count_steps_of_groups(found.metrics)
        return found

    def _count_steps_of_groups(self, metrics: dict[str, Any]) -> None:
        """Steps of evaluation a second, for which Trainer takes ranks for replicas."""
        end, batch = "_steps_per_second", self.args.eval_batch_size * self._replicas.size
        for name in [n.removesuffix(end) for n in metrics if n.endswith(end)]:
            if name != "train" and (seconds := metrics.get(f"{name}_runtime")):
                metrics[name + end] = round(math.ceil(self._num_evaluated / batch) / seconds, 3)

    def floating_point_ops(self, inputs: Any) -> int:
        """Trainer's own of ``inputs``, of which it adds up those of all ranks: this rank's part. A
        batch of mixed lengths is not counted."""
        of = super().floating_point_ops
        return 0 if isinstance(inputs, MixedStep) else int(of(inputs)) // self._sequence.size

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        num_done = kwargs.get("steps_trained_in_current_epoch", 0)
        folder = kwargs.get("resume_from_checkpoint")
        if self._batches is not None and num_done and folder and kwargs["epoch"] == 0:
            file = Path(folder, BATCHES)
            if not file.is_file():
                raise ValueError(
                    f"{file} is missing, which says what batches of mixed lengths come next: give "
                    "TrainingArguments ignore_data_skip=True, and MixedBatches another seed"
                )
            self._batches.load_state_dict(json.loads(file.read_text()))
            rest = _Rest(self._batches, num_done)
            kwargs["train_dataloader"] = torch.utils.data.DataLoader(rest, batch_size=None)
        return super()._run_epoch(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's own, of ``logs`` of training with the latest call's, where they are wanted."""
        self._count_steps_of_groups(logs)
        calls = calls_of(list(self.model.parameters())) if self._log_steps else None
        if "loss" in logs and calls is not None and calls.last is not None:
            logs = logs | calls.last.scalars()
        report = self._mixed.last if self._mixed is not None else None
        if "loss" in logs and report is not None and report.taken_s:
            logs = logs | {"tokens_per_s": report.num_tokens / report.taken_s}
        super().log(logs, *args, **kwargs)

    # Checkpoints: model files are whole; the optimizer's state of a sharded model is not.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a whole model to ``output_dir``; Trainer itself sets ``_internal_call``."""
        sharded = is_sharded(self.model)
        keeps = sharded and not self.args.save_only_model
        if _internal_call and output_dir is not None and self.args.should_save and not keeps:
            remove_shards(Path(output_dir, SHARDS))
        if sharded:
            one = not self.args.save_on_each_node
            self._whole_state = full_state_dict(self.model, cpu=True, rank0_only=one)
        super().save_model(output_dir, _internal_call)
        self._whole_state = None
        if _internal_call:
            _wait_for_writer()

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        _wait_for_writer()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, self._whole_state if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._batches is not None and self.args.should_save:
            Path(output_dir, BATCHES).write_text(json.dumps(self._batches.state_dict()))
        if not is_sharded(self.model):
            return super()._save_optimizer_and_scheduler(output_dir)
        step = self.state.global_step
        save_checkpoint(
            Path(output_dir, SHARDS), self.model, plain_optimizer(self.optimizer), step=step
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER))
            for name in WHOLE_OPTIMIZER:  # another run's
                Path(output_dir, name).unlink(missing_ok=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # What is trained on comes with the optimizer; a checkpoint without one has weights alone.
        if not Path(resume_from_checkpoint, SHARDS).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not Path(checkpoint, SHARDS).is_dir():
            files = [Path(checkpoint, n) for n in WHOLE_OPTIMIZER] if checkpoint else []
            whole = [file for file in files if file.exists()]
            if whole and is_sharded(self.model):
                raise ValueError(
                    f"{whole[0]} was written by a run whose weights were whole on every rank; "
                    "leave paradyse.shard out to go on from it"
                )
            return super()._load_optimizer_and_scheduler(checkpoint)
        load_checkpoint(Path(checkpoint, SHARDS), self.model, plain_optimizer(self.optimizer))
        saved = torch.load(Path(checkpoint, SCHEDULER), weights_only=True)
        self.lr_scheduler.load_state_dict(saved)


def _wait_for_writer() -> None:
    """Whole files are written by one rank alone, which may take longer than the others wait for it
    in a call: here they do as long as the process group has it."""
    if dist.is_initialized():
        dist.barrier()


class _Rest(torch.utils.data.IterableDataset[Any]):
    """What is left of batches of mixed lengths, behind as many items as Trainer passes over."""

    def __init__(self, batches: MixedBatches, num_passed_over: int) -> None:
        super().__init__()
        self._batches, self._num_passed_over = batches, num_passed_over

    def __iter__(self) -> Iterator[MixedStep | None]:
        yield from [None] * self._num_passed_over
        yield from self._batches


def _rng_file(rank: int) -> str:
    """Trainer's file with the random states of ``rank`` of several."""
    return f"rng_state_{rank}.pth"


def _check_mixed(trainer: Any, batches: Any, mesh: Any) -> None:
    """Refuse what does not go with ``batches`` of mixed lengths."""
    args = trainer.args
    if not isinstance(batches, MixedBatches):
        raise ValueError(f"batches: give a paradyse.MixedBatches, not {type(batches).__name__}")
    owner = next(c for c in type(trainer).__mro__ if "compute_loss" in vars(c))
    refused = {
        f"compute_loss of {owner.__name__}": not owner.__module__.startswith("transformers."),
        "mesh": mesh is not None,
        "train_dataset": trainer.train_dataset is not None,
        "compute_loss_func": trainer.compute_loss_func is not None,
        "label_smoothing_factor": bool(args.label_smoothing_factor),
        f"gradient_accumulation_steps={args.gradient_accumulation_steps}": (
            args.gradient_accumulation_steps != 1
        ),
        "include_num_input_tokens_seen": args.include_num_input_tokens_seen not in (False, "no"),
    }
    if found := [name for name, is_set in refused.items() if is_set]:
        raise ValueError(
            f"{', '.join(found)}: leave it out with batches of mixed lengths, whose groups have "
            "meshes of their own and whose micro-batches are planned"
        )
    if args.max_steps < 1:
        raise ValueError(
            f"max_steps={args.max_steps}: give TrainingArguments max_steps, as how many batches of "
            "mixed lengths an epoch has depends on its order"
        )


def _check(args: Any, world: int) -> None:
    """Refuse what would split data by rank, or wrap the model."""
    if args.n_gpu > 1:
        raise ValueError(
            f"one process sees {args.n_gpu} GPUs, over which Trainer copies the model: start a "
            "process for each with torchrun, or have it see one (CUDA_VISIBLE_DEVICES=0)"
        )
    if world == 1:
        return
    refused = {
        "fsdp": bool(args.fsdp),
        "deepspeed": bool(args.deepspeed),
        "parallelism_config": getattr(args, "parallelism_config", None) is not None,
        "train_sampling_strategy='batch_rebalance'": "batch_rebalance"
        == getattr(args, "train_sampling_strategy", None),
        "eval_use_gather_object": bool(args.eval_use_gather_object),
        "accelerator_config.dispatch_batches": bool(args.accelerator_config.dispatch_batches),
    }
    found = [name for name, is_set in refused.items() if is_set]
    if found:
        raise ValueError(
            f"TrainingArguments set {', '.join(found)}, which splits the batch or the model over "
            "ranks by itself; leave it out and give paradyse.TrainerMixin a mesh"
        )
