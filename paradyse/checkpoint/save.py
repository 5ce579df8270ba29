"""Checkpoints of a run: the model, its optimizer and where the run stood, for any number of ranks.

Each rank writes its own rows (``storage.py``), in the form of PyTorch's ``get_state_dict``: the
entries are "model" and "optimizer", and "run" and "containers" besides.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paradyse.checkpoint import folder as files
from paradyse.checkpoint import storage
from paradyse.checkpoint.containers import filled, outline_of, values_in
from paradyse.checkpoint.folder import listed
from paradyse.distributed.axis import Axis, axis_of, resolve_axis
from paradyse.distributed.together import Together
from paradyse.torch_private import unflatten_state_dict
from paradyse.weights.shard import Model, check_module, name_before_compile


@dataclass(frozen=True)
class Checkpoint:
    """What ``load_checkpoint`` found besides weights and optimizer state."""

    path: Path
    """The folder of this step."""
    step: int
    extra: Any
    """As it was given to ``save_checkpoint``."""


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: Any = None,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Write ``folder/step-00000020`` (for step 20); call it on every rank.

    A save that is killed at any moment leaves all earlier checkpoints as they were, and nothing
    that ``load_checkpoint`` would take for complete. The call returns once everything is on the
    disk. It replaces an earlier checkpoint of the same step and what a killed save left of one.

    Args:
        folder: on a file system that all ranks share, the same on all; made if need be. One run at
            a time.
        model: sharded or not, compiled or not. What its modules' ``get_extra_state`` give is saved
            too: numbers, text, tensors, and lists and dicts of them.
        optimizer: of (some of) the model's parameters. Dicts in its state may have any keys of
            which no two are the same text.
        extra: anything small of numbers, text, tensors, lists and dicts: a scheduler's state, the
            position in the data, generator states. Rank 0's is written. Classes have to be named
            to ``torch.serialization.add_safe_globals``, as loading runs no code of the file.
        step: how many steps are done; it names the checkpoint.
        keep: how many checkpoints of steps up to this one may stay; the others are removed once
            this one is complete. None: all.
        process_group: the ranks that call this; None: all.
    Returns:
        The folder of this step.
    Raises:
        ValueError: step or keep is no count, ``extra``, an extra state or the optimizer's state
            holds what could not be loaded again, the optimizer has a parameter that the model
            lacks, or rank 0 does not see what another rank wrote. All ranks raise it.
        RuntimeError: a rank could not write; all ranks raise it. Earlier checkpoints are as they
            were.
        CollectiveError: another rank died or stalled; it is named where that is known.

    Example:

        extra = {"epoch": 1, "scheduler": scheduler.state_dict()}
        paradyse.save_checkpoint("run", model, optimizer, step=20, extra=extra, keep=3)
    """
    ranks = Together(_axis(process_group), f"saving checkpoint {step} to {folder}")

    def prepare() -> Path:
        files.check_counts(step, keep)
        return files.make_room(Path(folder), step)

    path = ranks.first(prepare)
    entries = ranks.all_of(lambda: _entries(model, optimizer))
    containers = entries.pop("containers")
    if ranks.is_first:
        entries["containers"] = (containers,)
        entries["run"] = step, optimizer and type(optimizer).__name__, extra
    unfinished = path.with_name(path.name + ".tmp")
    storage.write(ranks, unfinished, entries)

    def finish() -> None:
        files.finish(unfinished, path, storage.read_metadata(unfinished), step, keep)

    ranks.first(finish)
    return path


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> Checkpoint:
    """Load what ``save_checkpoint`` wrote, in place; call it on every rank.

    The number of ranks, the mesh and the layout may differ from those that saved it. Weights go
    into the model's own tensors (cast where the dtype differs), so the model may be compiled,
    and have been run, or not; the optimizer need not have made a step. Each rank reads what it
    holds, and compares the checksum of every stretch that it reads before anything changes; a
    checkpoint that was saved without checksums loads with a note in the log. No code of the files
    is run: values are read with ``weights_only``, and of the metadata only what PyTorch writes
    there is unpickled.

    Args:
        folder: with checkpoints in it, of which the one of the highest step is taken, or the
            folder of one step; the same on all ranks.
        model: of the class and configuration that was saved.
        optimizer: of the kind and with the parameter groups of the one that was saved; None loads
            the weights alone.
        process_group: the ranks that call this; None: all.
    Returns:
        The checkpoint's folder, its step, and ``extra``.
    Raises:
        FileNotFoundError: there is no complete checkpoint in ``folder``.
        ValueError: it is of another model or another optimizer, files of it are missing, too
            short or not as they were saved, or a value names a class that is not trusted. Nothing
            is changed then, on any rank.
        RuntimeError: a file could not be read. Weights may be loaded in part.
        CollectiveError: another rank died or stalled; it is named where that is known.

    Example:

        found = paradyse.load_checkpoint("run", model, optimizer)
        scheduler.load_state_dict(found.extra["scheduler"])
        first_step = found.step + 1
    """
    ranks = Together(_axis(process_group), f"loading checkpoint {folder}")
    path = ranks.first(lambda: files.newest(Path(folder)))
    mine, module = _weights(model), check_module(model)
    saved = ranks.all_of(lambda: _checked(path, mine))
    if ranks.is_first:
        storage.warn_without_checksums(path, saved)
    wanted: tuple[str, ...] = ("run", "containers")
    wanted += ("optimizer.param_groups.",) * (optimizer is not None)
    present = saved.state_dict_metadata.items()
    values: dict[str, Any] = {k: _blank(x) for k, x in present if k.startswith(wanted)}
    storage.read(ranks, path, saved, values)
    step, kind, extra = values.pop("run")
    (containers,) = values.pop("containers", None) or (_containers_by_name(saved),)
    with_optimizer = optimizer is not None
    ranks.all_of(lambda: _check_model(path, saved, module, mine, containers, with_optimizer))
    state: dict[str, Any] = {}
    if optimizer is not None:
        groups = filled(containers["optimizer"]["param_groups"], values)
        ranks.all_of(partial(_check_optimizer, path, kind, groups, optimizer, module))
        state = _blank_state(saved, module)
    apart = {n: containers["model"][n] for n, x in mine.items() if _is_apart(n, x)}
    entries = {f"model.{n}": x for n, x in mine.items() if n not in apart} | state
    for name, outline in apart.items():
        for key, here in values_in(mine[name], outline):
            entries[key] = _blank(saved.state_dict_metadata[key], here)
    storage.read(ranks, path, saved, entries)
    if apart:
        found = {n: filled(outline, entries) for n, outline in apart.items()}
        ranks.all_of(partial(_give_apart, module, found))
    if optimizer is not None:
        read = filled(containers["optimizer"], values | {k: entries[k] for k in state})
        _give_state(optimizer, read.get("state", {}), groups, module)
    return Checkpoint(path, step, extra)


def _axis(process_group: dist.ProcessGroup | None) -> Axis:
    return resolve_axis() if process_group is None else axis_of(process_group)


# Entries, and whether a checkpoint has them


def _weights(model: Model) -> dict[str, Any]:
    state = check_module(model).state_dict()
    return {name_before_compile(n): x for n, x in state.items()}


def _is_extra(name: str) -> bool:
    """Whether ``name`` in a state dict is of what ``get_extra_state`` gave."""
    return name.rpartition(".")[2] == "_extra_state"


def _is_apart(name: str, x: Any) -> bool:
    """Whether ``x``, ``name`` in a state dict, is given to the model by ``load_state_dict``: no
    tensor, or an extra state, which may be a copy and of another shape than the saved one."""
    return _is_extra(name) or not isinstance(x, Tensor)


def _entries(model: Model, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    entries: dict[str, Any] = {"model": _weights(model)}
    apart = {n: x for n, x in entries["model"].items() if _is_apart(n, x)}
    containers = {"model": {n: outline_of(x, f"model.{n}") for n, x in apart.items()}}
    if optimizer is not None:
        names = [n for group in _group_names(optimizer, check_module(model)) for n in group]
        state = optimizer.state_dict()
        entries["optimizer"] = {
            "state": {_named(i, names): values for i, values in state["state"].items()},
            "param_groups": [
                {**group, "params": [names[i] for i in group["params"]]}
                for group in state["param_groups"]
            ],
        }
        containers["optimizer"] = outline_of(entries["optimizer"], "optimizer")
    return entries | {"containers": containers}


def _named(key: Any, names: Sequence[str]) -> Any:
    """The name of the parameter that an optimizer's state has as number ``key``; what it has of its
    own, beside parameters, is as it is."""
    if key in names:
        raise ValueError(
            f"the optimizer's state has an entry {key!r} beside those of parameters, and the model "
            "a parameter of that name: give the entry another one"
        )
    return names[key] if isinstance(key, int) else key


def _containers_by_name(metadata: Any) -> Any:
    """As names tell: of a checkpoint that was saved before containers were."""
    names = {k: k for k in metadata.state_dict_metadata if k != "run"}
    return {"model": {}, **unflatten_state_dict(names, metadata.planner_data)}


def _group_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Names of the parameters of each group."""
    names = {id(p): name_before_compile(n) for n, p in model.named_parameters()}
    groups = [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
    unknown = sum(n is None for group in groups for n in group)
    if unknown:
        raise ValueError(
            f"the optimizer has {unknown} parameters that the model has not; make it from "
            "model.parameters(), after paradyse.shard(model)"
        )
    return [[n for n in group if n is not None] for group in groups]


def _checked(path: Path, mine: Mapping[str, Any]) -> Any:
    """The checkpoint's metadata, once it is known to be whole and one of ours.

    Args:
        mine: the model's state by name.
    """
    metadata = storage.read_metadata(path)
    entries = metadata.state_dict_metadata
    empty = [n for n, x in mine.items() if getattr(getattr(x, "local", x), "is_meta", False)]
    if empty:
        raise ValueError(
            f"{listed(empty)}: on the meta device, where nothing can be read to; call "
            "paradyse.load_safetensors(model, folder) first, or make the model with memory"
        )
    damage = files.damage_of(path, metadata)
    if damage:
        raise ValueError(f"{path} is damaged: {damage}. {files.way_out(path)}")
    if "run" not in entries:
        raise ValueError(
            f"{path} was not written by paradyse.save_checkpoint; load it with "
            "torch.distributed.checkpoint.load, which takes sharded models too"
        )
    return metadata


def _check_model(
    path: Path,
    metadata: Any,
    model: nn.Module,
    mine: Mapping[str, Any],
    containers: Any,
    with_optimizer: bool,
) -> None:
    """Refuse a checkpoint that does not fit ``model``.

    Args:
        mine: the model's state by name.
        containers: of the checkpoint.
    """
    entries, apart = metadata.state_dict_metadata, containers["model"]
    inside = {key for outline in apart.values() for key, _ in values_in(None, outline)}
    saved = {
        k.removeprefix("model."): md
        for k, md in entries.items()
        if k.startswith("model.") and k not in inside
    }
    saved |= {n: entries[at] if isinstance(at, str) else None for n, at in apart.items()}
    differences = _differences(saved, mine)
    if differences:
        raise ValueError(
            f"{path} is of another model: {'; '.join(differences)}. Give a model of the class and "
            "configuration that was saved"
        )
    if with_optimizer and not any(k.startswith("optimizer.") for k in entries):
        raise ValueError(f"{path} holds no optimizer; leave it out to load the weights alone")
    for kind in {type(m) for m in model.modules()}:
        gives = kind.get_extra_state is not nn.Module.get_extra_state
        if gives and kind.set_extra_state is nn.Module.set_extra_state:
            raise ValueError(
                f"{kind.__name__} has get_extra_state and no set_extra_state, so that its part of "
                f"{path} cannot be given to it: write one"
            )


def _differences(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """How the entries of a checkpoint differ from the model's, in words; empty if they agree."""
    missing = [n for n in mine if n not in saved]
    unknown = [n for n in saved if n not in mine]
    shapes = []
    for name in sorted(n for n in mine.keys() & saved.keys() if not _is_extra(n)):
        there, here = getattr(saved[name], "size", None), getattr(mine[name], "shape", None)
        if there != here:
            text = ["no tensor" if s is None else str(list(s)) for s in (there, here)]
            shapes.append(f"{name} ({text[0]} there, {text[1]} here)")
    out = [f"it lacks {listed(missing)}"] * bool(missing)
    out += [f"it has {listed(unknown)} besides"] * bool(unknown)
    return out + [f"shapes differ: {listed(shapes)}"] * bool(shapes)


# Reading


def _blank(entry: Any, like: Any = None) -> Tensor | None:
    """A tensor that an entry of the metadata can be read into, where ``like`` lies if that is one;
    None for a value."""
    size = getattr(entry, "size", None)
    has_memory = isinstance(like, Tensor) and not like.is_meta
    device = like.device if has_memory else torch.device("cpu")
    return None if size is None else torch.empty(size, dtype=entry.properties.dtype, device=device)


def _check_optimizer(
    path: Path,
    kind: str,
    groups: list[dict[str, Any]],
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
) -> None:
    here = type(optimizer).__name__
    if here != kind:
        raise ValueError(
            f"{path} holds the state of {kind}, this optimizer is {here}; give one of that kind, "
            "or none to load the weights alone"
        )
    mine, saved = _group_names(optimizer, model), [group["params"] for group in groups]
    if mine != saved:
        counts = [[len(group) for group in side] for side in (saved, mine)]
        raise ValueError(
            f"{path} holds an optimizer with other parameter groups: of {counts[0]} parameters "
            f"there, of {counts[1]} here, by name or order not the same; make the groups as they "
            "were when it was saved, or give no optimizer to load the weights alone"
        )


def _blank_state(metadata: Any, model: nn.Module) -> dict[str, Any]:
    """The entries of the optimizer's state to read into, laid out like the parameters."""
    parameters = {name_before_compile(n): p for n, p in model.named_parameters()}
    out: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith("optimizer.state."):
            like = parameters.get(metadata.planner_data[key][2])
            if like is not None and getattr(entry, "size", None) == like.shape and like.ndim:
                out[key] = torch.empty_like(like.detach(), dtype=entry.properties.dtype)
            else:
                out[key] = _blank(entry)
    return out


def _give_apart(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Give ``model`` what no tensor of it holds.

    Args:
        values: by name before compile.
    """
    own = {name_before_compile(n): n for n in model.state_dict()}
    model.load_state_dict({own[n]: x for n, x in values.items()}, strict=False)


def _give_state(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    groups: list[dict[str, Any]],
    model: nn.Module,
) -> None:
    """Give ``optimizer`` what was read, with names in place of parameters."""
    names = [n for group in _group_names(optimizer, model) for n in group]
    index = {name: i for i, name in enumerate(names)}
    numbered = [{**g, "params": [index[n] for n in g["params"]]} for g in groups]
    by_index = {index.get(name, name): values for name, values in state.items()}
    optimizer.load_state_dict({"state": by_index, "param_groups": numbered})
