"""accelerate's Accelerator over sequence-parallel ranks.

``Accelerator`` takes every process for a replica of its own: it splits batches over all of them,
wraps models in DistributedDataParallel and steps schedulers once for each. Behind the mixin a
sequence group is one process of it. Nothing of accelerate is imported but by methods that it calls.

It was tried with accelerate 1.15 (``tests/test_accelerator.py``).
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paradyse.checkpoint.folder import next_step
from paradyse.checkpoint.save import load_checkpoint, save_checkpoint
from paradyse.distributed.agreement import agreement_of
from paradyse.distributed.axis import Axis, resolve_axis, resolve_replicas
from paradyse.distributed.together import Together
from paradyse.over_replicas import OverReplicas, over_replicas
from paradyse.runtime.registry import check_compiled
from paradyse.torch_private import compiled_call_of, original_module
from paradyse.weights.shard import full_state_dict, is_sharded

log = logging.getLogger(__name__)

_COMPILED: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
"""Models by ``compile_unless_compiled``, which may see them again -> their options."""

SHARDS = "shards"
"""Folders in a checkpoint with sharded models and their optimizers are named so, or begin so."""

StrPath = str | os.PathLike[str]


class AcceleratorMixin(OverReplicas):
    """Put before accelerate's Accelerator, it trains over a mesh of sequence-parallel ranks.

    ``prepare`` compiles models in place with this backend, unless they are compiled already, splits
    batches over replicas, and steps schedulers once for each replica. ``accumulate``,
    ``clip_grad_norm_``, autocast, ``gather``, ``gather_for_metrics``, ``reduce``,
    ``get_state_dict``, ``save_state`` and ``load_state`` do what they do in one process for each
    replica.

    Args:
        mesh: as the option of the backend; it must hold every rank. None: one sequence group.
        backend_options: ``options`` of ``torch.compile(..., backend="paradyse")`` besides ``mesh``.
        dynamo_backend: "paradyse" or None, which mean the same here. ``accelerate launch`` and its
            YAML know none but their own list: leave ``dynamo_config`` out there.
    Raises:
        ValueError: a mesh without some of the ranks, or one in ``backend_options``; another
            ``dynamo_backend``, also of ``accelerate launch``; a plugin that splits models or
            batches by itself.

    Example:

        class Accelerator(paradyse.AcceleratorMixin, accelerate.Accelerator):
            pass

        accelerator = Accelerator(mesh=mesh, gradient_accumulation_steps=4)
        paradyse.shard(model, mesh)  # optional
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(
        self,
        *args: Any,
        mesh: DeviceMesh | None = None,
        backend_options: Mapping[str, Any] | None = None,
        dynamo_backend: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_no_mesh(self, backend_options)
        self._backend_options = {"mesh": mesh, **(backend_options or {})}
        self._checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        if str(dynamo_backend).lower() not in ("none", "no", "paradyse"):
            raise ValueError(_other_backend(dynamo_backend))
        super().__init__(*args, **kwargs)
        told = self.state.dynamo_plugin.backend.value.lower()
        if told != "no":
            raise ValueError(_other_backend(told))
        kind = self.distributed_type.value
        if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            raise ValueError(
                f"accelerate is told to train by {kind}, which splits models or batches by itself; "
                "leave its plugin out, also of accelerate's YAML, and give "
                "paradyse.AcceleratorMixin a mesh"
            )
        if self.dataloader_config.dispatch_batches or self.dataloader_config.split_batches:
            raise ValueError(
                "dataloader_config sets dispatch_batches or split_batches, which deals batches to "
                "processes; leave them out: ranks of a sequence group share each batch"
            )
        over_replicas(self, *axes_of_all(mesh, "Accelerator"))

    @property
    def num_processes(self) -> int:
        """Sequence groups; ranks until they are known."""
        known = "replica_axis" in vars(self)
        return self.replica_axis.size if known else self.state.num_processes

    @property
    def process_index(self) -> int:
        """Number of this rank's sequence group; of the rank until they are known."""
        known = "replica_axis" in vars(self)
        return self.replica_axis.rank if known else self.state.process_index

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, **kwargs: Any
    ) -> nn.Module:
        """``model``, compiled in place; ``device_placement`` and ``kwargs`` as accelerate's."""
        model = super().prepare_model(model, device_placement, **kwargs)
        compile_unless_compiled(self, model, self._backend_options)
        return model

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """accelerate's, of ``loss`` and ``kwargs``.

        Raises:
            ValueError: a model was compiled with another backend, so that nothing sums gradients.
        """
        super().backward(loss, **kwargs)
        for model in self._models if dist.is_initialized() else ():
            if model not in self._checked and any(p.grad is not None for p in model.parameters()):
                check_compiled(model)
                self._checked.add(model)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """accelerate's ``scheduler``; one that steps with optimizers does so once for each replica,
        not for each rank."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True  # one step of its own for each call
        times, step = self.replica_axis.size, prepared.step
        if not prepared.step_with_optimizer:
            return prepared  # it steps as often as it is told

        def step_for_each_replica(*args: Any, **kwargs: Any) -> None:
            for _ in range(times):
                total = getattr(prepared.scheduler, "total_steps", None)
                if total is None or prepared.scheduler.last_epoch < total:
                    step(*args, **kwargs)

        prepared.step = step_for_each_replica
        return prepared

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """``paradyse.full_state_dict`` of a sharded ``model``, whole on every rank; any other as
        accelerate gives it, with ``unwrap`` as there."""
        if is_sharded(model):
            return full_state_dict(model, cpu=True)
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: StrPath | None = None, *args: Any, **kwargs: Any) -> str:
        """accelerate's, of ``output_dir``; of sharded models and their optimizers each rank writes
        its rows, as ``paradyse.save_checkpoint`` does. ``args`` and ``kwargs`` as accelerate's.
        """
        with self._without_sharded() as sharded:
            self._tell_hooks("_save_model_state_pre_hook", sharded)
            folder = super().save_state(output_dir, *args, **kwargs)
        if not sharded and self.is_main_process:
            for at in Path(folder).glob(f"{SHARDS}_*"):
                remove_shards(at)
        for i, (model, optimizer) in enumerate(sharded):
            at = Path(folder, f"{SHARDS}_{i}")
            # accelerate counts steps of an epoch alone, and each save takes the place of the last
            ranks = Together(resolve_axis(), f"saving {at}")
            step = ranks.first(partial(next_step, at))
            save_checkpoint(at, model, optimizer, step=step, keep=1)
        return folder

    def load_state(self, input_dir: StrPath | None = None, *args: Any, **kwargs: Any) -> None:
        """What ``save_state`` wrote to ``input_dir``, on any number of ranks; ``args`` and
        ``kwargs`` as accelerate's.

        accelerate saves the random states of Python, NumPy and PyTorch, and its count of steps, for
        each rank. All ranks of a sequence group go on with those of its first; a group whose first
        rank had none, as there were fewer ranks then, goes on with those of the first rank of all.

        Raises:
            ValueError: no folder is named, and models are sharded; or they were not when it was
                written.
        """
        folders: list[Any] = []
        with self._without_sharded(input_dir) as sharded:
            if sharded and input_dir is None:
                raise ValueError(
                    "load_state() of a sharded model needs the folder: give what save_state gave"
                )
            self._tell_hooks("_load_model_state_pre_hook", sharded)
            hook = self.register_load_state_pre_hook(lambda _, folder: folders.append(folder))
            try:
                super().load_state(input_dir, *args, **kwargs)
            finally:
                hook.remove()
        own = Path(folders[-1], f"random_states_{self.state.process_index}.pkl")
        mesh, steps = self._backend_options.get("mesh"), self.step
        self.step: int = share_random_states(self.sequence_axis, mesh, own.is_file(), steps)
        for i, (model, optimizer) in enumerate(sharded):
            load_checkpoint(Path(folders[-1], f"{SHARDS}_{i}"), model, optimizer)

    def _tell_hooks(self, name: str, sharded: Sequence[Any]) -> None:
        """Warn if there are hooks of that ``name``, which are not given the models ``sharded``."""
        if sharded and getattr(self, name, None):
            log.warning(
                "hooks of save_state and load_state are given no sharded models (of which there "
                "are %d): each rank saves its rows. Write others' formats beside save_state, from "
                "paradyse.full_state_dict(model)",
                len(sharded),
            )

    @contextmanager
    def _without_sharded(
        self, folder: StrPath | None = None
    ) -> Iterator[list[tuple[nn.Module, Any]]]:
        """Sharded models with their optimizers, of which accelerate knows nothing meanwhile. Models
        that one optimizer steps are one, with their numbers before names. Whole ones are among them
        where models were sharded when ``folder`` was written.

        Raises:
            ValueError: models are sharded, and were not then.
        """
        models, optimizers = self._models, self._optimizers
        groups = _stepped_together(models, optimizers)
        joined = [g[0] if len(g) == 1 else nn.ModuleList(g) for g in groups]
        sharded = [m for m in joined if is_sharded(m)]
        at = None if folder is None else Path(folder).expanduser()
        written = at is not None and (at / f"{SHARDS}_0").is_dir()
        if sharded and at is not None and at.is_dir() and not written:
            raise ValueError(
                f"{folder} was written by a run whose weights were whole on every rank; leave "
                "paradyse.shard out to go on from it"
            )
        if written and not sharded:
            sharded = joined
        pairs = [(m, o) for m in sharded for o in _optimizers_of(m, optimizers) or [None]]
        theirs = {id(o) for _, o in pairs}
        apart = {id(p) for m in sharded for p in m.parameters()}
        self._models = [m for m in models if not any(id(p) in apart for p in m.parameters())]
        self._optimizers = [o for o in optimizers if id(plain_optimizer(o)) not in theirs]
        try:
            yield pairs
        finally:
            self._models, self._optimizers = models, optimizers


def compile_unless_compiled(owner: Any, model: nn.Module, options: Mapping[str, Any]) -> None:
    """Compile ``model`` in place for ``owner`` by ``options``, unless it is compiled already."""
    if compiled_call_of(model) is None and original_module(model) is model:
        model.compile(backend="paradyse", options=dict(options))
        _COMPILED[model] = dict(options)
    elif set(options) - {"mesh"} and _COMPILED.get(model) != options:
        log.warning(
            "%s was compiled before it was given to %s: it keeps the options that it was compiled "
            "with, and backend_options are not used for it",
            type(model).__name__,
            type(owner).__name__,
        )


def axes_of_all(mesh: DeviceMesh | None, doing: str) -> tuple[Axis, Axis]:
    """The sequence axis and the data-parallel axis of ``mesh``, which hold every rank, as ``doing``
    runs on all of them.

    Raises:
        ValueError: ``mesh`` is without some of the ranks.
    """
    sequence, replicas = resolve_axis(mesh), resolve_replicas(mesh)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if sequence.size * replicas.size != world:
        raise ValueError(
            f"the mesh holds {sequence.size * replicas.size} of {world} ranks; {doing} runs on all "
            "of them: give a mesh over the world"
        )
    return sequence, replicas


def check_no_mesh(of: Any, backend_options: Mapping[str, Any] | None) -> None:
    """A mesh that ``of``, a Trainer or an Accelerator, does not know deals no batches to replicas.

    Raises:
        ValueError: ``backend_options`` have one.
    """
    if backend_options and backend_options.get("mesh") is not None:
        raise ValueError(
            "backend_options have a mesh, by which batches would not be dealt to replicas: give it "
            f"to {type(of).__name__} as mesh="
        )


def remove_shards(folder: Path) -> None:
    """Remove ``folder`` if it has checkpoints by ``paradyse.save_checkpoint``: those of another
    run, in a place where this one saves weights that are whole."""
    if any(folder.glob("step-*")):
        shutil.rmtree(folder)


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The one inside accelerate's ``optimizer``."""
    return getattr(optimizer, "optimizer", optimizer)


def share_random_states(sequence: Axis, mesh: Any, is_own: bool, number: int = 0) -> int:
    """Have all ranks of ``sequence`` go on with the random states of its first: those of Python,
    NumPy, PyTorch and, if it is in use, the CUDA device.

    Args:
        sequence: this rank's sequence group, of the option ``mesh``.
        mesh: as the option of the backend.
        is_own: whether this rank's states are those that were saved for it. Where they are not on
            the first rank of ``sequence``, the states of the first rank of all are taken.
        number: shared with the states.
    Returns:
        The number of the rank whose states are taken.
    """
    import numpy as np

    on_cuda = torch.cuda.is_initialized()
    cuda = torch.cuda.get_rng_state() if on_cuda else None
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda, number
    group, world = agreement_of(sequence, mesh), agreement_of(resolve_axis())
    if group is not None:
        is_own, states = group.first_has((is_own, states))
    if world is not None:
        of_first = world.first_has(states)
        states = states if is_own else of_first
    of_python, of_numpy, of_torch, of_cuda, number = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    if on_cuda and of_cuda is not None:
        torch.cuda.set_rng_state(of_cuda)
    return number


def _stepped_together(models: Sequence[nn.Module], optimizers: Any) -> list[list[nn.Module]]:
    """``models``, each once, those beside each other that one of ``optimizers`` steps."""
    groups = [[m] for m in dict.fromkeys(models)]
    for optimizer in optimizers:
        mine = [g for g in groups if any(_optimizers_of(m, [optimizer]) for m in g)]
        if len(mine) > 1:
            joined = [m for g in mine for m in g]
            groups = [joined if g is mine[0] else g for g in groups if g not in mine[1:]]
    return groups


def _optimizers_of(model: nn.Module, optimizers: Any) -> list[torch.optim.Optimizer]:
    """Those of ``optimizers`` that step some of its parameters."""
    mine = {id(p) for p in model.parameters()}
    groups = {o: o.param_groups for o in map(plain_optimizer, optimizers)}
    return [o for o, of in groups.items() if any(id(p) in mine for g in of for p in g["params"])]


def _other_backend(told: Any) -> str:
    return (
        f"accelerate is told to compile with dynamo_backend={told!r}; behind "
        'paradyse.AcceleratorMixin models are compiled with "paradyse": leave it out, also of '
        "accelerate's YAML and of ACCELERATE_DYNAMO_BACKEND"
    )
