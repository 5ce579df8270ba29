"""``paradyse.load_safetensors``: the files of a model read into the ranks' shards.

A safetensors file is a header, which says where each tensor lies, and the values. Each rank maps
the file and reads the rows that it holds.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paradyse.checkpoint.buffers import Held, held_tensors, remake
from paradyse.checkpoint.folder import listed
from paradyse.distributed.axis import SINGLE, Axis, device_of
from paradyse.distributed.checksums import checksum
from paradyse.distributed.facts import FILES
from paradyse.distributed.together import Together
from paradyse.torch_private import original_module
from paradyse.weights.copies_for_use import wait_for_copies
from paradyse.weights.shard import Model, check_module
from paradyse.weights.sharded_tensor import ShardedTensor
from paradyse.weights.versions import count_write

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""What ``save_pretrained`` writes: everything in one file, or several files and their index."""

MADE_ANEW = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Patterns of buffers that older checkpoints hold and models of today make themselves."""


@dataclass(frozen=True)
class LoadReport:
    """What ``load_safetensors`` did on this rank, in tensors and bytes; reading it never raises.

    Example:

        report = paradyse.load_safetensors(model, folder, strict=False)
        print(report.num_tensors, "tensors,", report.bytes_read, "bytes")
        print("no values in the files:", report.kept, "no place in the model:", report.skipped)
    """

    num_tensors: int
    """Parameters and buffers read, each tied one once."""
    bytes_read: int
    """Values read from the files, as they are stored; headers are not counted."""
    skipped: tuple[str, ...]
    """Names in the checkpoint that have no place in the model."""
    kept: tuple[str, ...]
    """Names in the model that the checkpoint lacks: they keep their values (``strict=False``)."""


@dataclass(frozen=True)
class _Entry:
    """A tensor as a file's header has it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """In the words of safetensors: "F32", "BF16", "I64"."""


def load_safetensors(
    model: Model,
    path: str | os.PathLike[str],
    device: torch.device | str | None = None,
    strict: bool = True,
) -> LoadReport:
    """Read the values of ``model`` from a checkpoint: each rank reads the rows that it holds.

    In the example below no rank reads or holds the whole model at any moment. Tensors on the meta
    device get memory; the others are written in place. Parameters stay the same objects, tied ones
    stay tied, values are cast to the parameter's dtype. Buffers that no checkpoint has are made by
    the model's own code. A model that is not sharded is read whole. Names may differ by the prefix
    of the base model (``LlamaModel`` and ``LlamaForCausalLM``); a tied parameter may have any one
    of its names. Ranks that share a sharded model compare the files that they read by their headers
    and a row of each tensor.

    Args:
        model: sharded or not, on the meta device or not.
        path: a ``.safetensors`` file, the ``.index.json`` of several, or the folder of either; on
            every rank the same, or a copy.
        device: where tensors on the meta device get their memory. None: the current CUDA device
            where the shards' group is not gloo, else torch's default device.
        strict: False skips what the model has no place for, and lets a parameter keep the values
            it has where the checkpoint has none. Skipped in any case: heads, where the model is the
            base of the one that was saved, and buffers that older versions saved.
    Returns:
        How many tensors and bytes this rank read, and what was skipped or kept.
    Raises:
        ValueError: a file is missing or broken; names, shapes or kinds of dtype do not fit; a
            buffer cannot be made; ranks have different files. Nothing is changed then. Where the
            model is sharded every rank raises what one of them finds.
        ImportError: the package safetensors is not installed.
        CollectiveError: another rank died or stalled.

    Example:

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        paradyse.shard(model)
        paradyse.load_safetensors(model, folder)
        optimizer = torch.optim.AdamW(model.parameters())
        model = torch.compile(model, backend="paradyse")
    """
    module = original_module(check_module(model))
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"give the path of a checkpoint, not {type(path).__name__} {path!r}")
    tensors = held_tensors(module)
    ranks = Together(_axis_of(tensors), "loading safetensors files")
    loading = ranks.all_of(lambda: _checked(module, tensors, Path(path), device, strict))
    if not ranks.alone:
        ranks.compare({FILES: ranks.all_of(lambda: _checksum(loading.entries))})
    num_bytes = ranks.all_of(loading.read)
    return LoadReport(len(loading.keys), num_bytes, loading.skipped, loading.kept)


@dataclass(frozen=True)
class _Loading:
    """What is about to be read, once everything is known to fit."""

    entries: Mapping[str, _Entry]
    keys: Mapping[Held, tuple[str, ...]]
    """The names of each tensor in the checkpoint."""
    made: Sequence[tuple[Held, Tensor]]
    """Buffers that no checkpoint has, and their values."""
    device: torch.device
    skipped: tuple[str, ...]
    kept: tuple[str, ...]

    def read(self) -> int:
        """Give the model its values; the number of bytes read."""
        for held, new in self.made:
            held.replace(new)
        num_bytes = 0
        for held, (key, *_) in self.keys.items():
            target = held.with_memory(self.device) if held.on_meta else held.tensor
            for rows, stored in _rows(self.entries[key], key, target.detach()):
                rows.copy_(stored)
                num_bytes += stored.numel() * stored.element_size()
            count_write([target])
            if held.on_meta:
                held.replace(target)
        return num_bytes


def _checked(
    model: nn.Module,
    tensors: Sequence[Held],
    path: Path,
    device: torch.device | str | None,
    strict: bool,
) -> _Loading:
    _check_kinds(tensors)
    entries = _read_headers(path)
    keys, skipped, kept, problems = _match(model, tensors, entries, strict)
    if problems:
        raise ValueError(_described(path, problems))
    _check_tied(keys, entries)
    device = _default_device(tensors) if device is None else torch.device(device)
    made = remake(model, [h for h in tensors if h.on_meta and not h.stored], device)
    return _Loading(entries, keys, made, device, tuple(skipped), tuple(kept))


def _axis_of(tensors: Sequence[Held]) -> Axis:
    """The axis that the model is sharded over."""
    sharded = (h.tensor for h in tensors if isinstance(h.tensor, ShardedTensor))
    return next((x.placement.axis for x in sharded), SINGLE)


def _check_kinds(tensors: Sequence[Held]) -> None:
    for held in tensors:
        x = held.tensor
        if isinstance(x, nn.Parameter) and type(x) not in (nn.Parameter, ShardedTensor):
            raise ValueError(
                f"{held.names[0]} is a {type(x).__name__}, parallelized or quantized by something "
                "else; give a model with plain parameters, or one that paradyse.shard has spread"
            )


def _default_device(tensors: Sequence[Held]) -> torch.device:
    group = _axis_of(tensors).group
    device = torch.device("cpu") if group is None else device_of(group)
    return device if device.type == "cuda" else torch.get_default_device()


# Files


def _open(file: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as e:
        raise ImportError(
            "paradyse.load_safetensors reads files through the package safetensors: "
            "pip install safetensors"
        ) from e
    return safe_open(file, framework="pt")


def _files(path: Path) -> tuple[list[Path], Mapping[str, str] | None]:
    """The files of a checkpoint; with an index also name -> file."""
    if path.is_dir():
        found = next((path / n for n in (FILE, INDEX) if (path / n).is_file()), None)
        if found is None:
            raise ValueError(
                f"{path} has neither {FILE} nor {INDEX}; write one with model.save_pretrained, or "
                "give the file itself"
            )
        path = found
    if not path.is_file():
        raise ValueError(
            f"no file or folder {path}; give a .safetensors file, a .index.json, or the folder of "
            "either (a model of the hub must be downloaded first)"
        )
    if path.suffix != ".json":
        return [path], None
    try:
        names = json.loads(path.read_text())["weight_map"]
        files = [path.parent / f for f in sorted(set(names.values()))]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"{path} is not an index of safetensors files: {e!r}") from e
    outside = [f for f in files if f.parent != path.parent or f.name in ("", "..")]
    if outside:
        raise ValueError(
            f"{path} names files outside its folder: {listed(map(str, outside))}; an index "
            "may name files beside it alone"
        )
    absent = [f.name for f in files if not f.is_file()]
    if absent:
        raise ValueError(
            f"{len(absent)} of the {len(files)} files that {path} names are missing: "
            f"{listed(absent)}. Copy or download them again; nothing was changed"
        )
    return files, names


def _read_headers(path: Path) -> dict[str, _Entry]:
    """What the checkpoint has, from the headers alone."""
    files, names = _files(path)
    entries: dict[str, _Entry] = {}
    for file in files:
        try:
            with _open(file) as f:
                for key in f.keys():
                    if names is None or names.get(key) == file.name:
                        x = f.get_slice(key)
                        entries[key] = _Entry(file, tuple(x.get_shape()), x.get_dtype())
        except ImportError:
            raise
        except Exception as e:  # safetensors' own error is none of the common kinds
            raise ValueError(
                f"{file} is not a whole safetensors file ({e}); copy or download it again"
            ) from e
    absent = [n for n in names or () if n not in entries]
    if absent:
        raise ValueError(
            f"the index {path} names {len(absent)} tensors that its files do not have: "
            f"{listed(absent)}. Index and files are of different checkpoints; nothing was changed"
        )
    return entries


def _rows(entry: _Entry, key: str, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's rows of ``target``, stretch by stretch: where they go, and what is stored.

    The second of each pair lies in the mapped file: pages are read as they are copied. The file is
    open for one tensor at a time, as pages count as this process's memory until it is closed.
    """
    with _open(entry.file) as f:
        stored = f.get_slice(key)
        if not isinstance(target, ShardedTensor):
            yield target, stored[...]
            return
        layout = target.placement
        wait_for_copies([target])
        for start, n, at in layout.stretches(layout.axis.rank):
            index = (slice(None),) * layout.dim + (slice(start, start + n),)
            yield target.local.narrow(layout.dim, at, n), stored[index]


def _checksum(entries: Mapping[str, _Entry]) -> str:
    """Of names, shapes and dtypes, and of a row of each tensor: equal files have equal ones."""
    headers = [(key, e.shape, e.dtype) for key, e in sorted(entries.items())]
    rows = []
    for key, shape, _ in headers:
        with _open(entries[key].file) as f:
            first = (*(slice(0, 1) for _ in shape[:-1]), slice(None))
            rows.append(checksum([f.get_slice(key)[first] if shape else f.get_tensor(key)]))
    return f"{zlib.crc32(repr((headers, rows)).encode()):08x}"


# Names


def _match(
    model: nn.Module, tensors: Sequence[Held], entries: Mapping[str, _Entry], strict: bool
) -> tuple[dict[Held, tuple[str, ...]], list[str], list[str], list[str]]:
    """Which of ``entries`` each of the model's tensors takes its values from.

    Returns:
        Tensor -> its names in the checkpoint (several where it has a tied parameter under several
        names), names without a place in the model, names in the model that the checkpoint lacks,
        and what does not fit, a line each.
    """
    wanted = [h for h in tensors if h.stored]
    spell, base = _spelling(model, [n for h in wanted for n in h.names], entries)
    named = {h: [k for k in dict.fromkeys(map(spell, h.names)) if k in entries] for h in wanted}
    keys = {held: tuple(found) for held, found in named.items() if found}
    lacking = [held for held in wanted if held not in keys]
    missing = [held.names[0] for held in lacking if strict or held.on_meta]
    kept = [held.names[0] for held in lacking if not (strict or held.on_meta)]
    pairs = [(held, k) for held, found in keys.items() for k in found]
    misfits = [m for held, k in pairs if (m := _misfit(held, k, entries[k]))]
    used = {k for _, k in pairs}
    skipped = [k for k in entries if k not in used]
    patterns = (*MADE_ANEW, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()))
    known = {spell(n) for h in tensors for n in h.names}
    odd = [k for k in skipped if k.startswith(base) and k not in known]
    extra = [k for k in odd if not any(re.search(p, k) for p in patterns)]
    found_wrong = (
        (missing, "of the model's tensors are missing", ""),
        (misfits, "do not fit", ""),
        (extra if strict else [], "have no place in the model", " (strict=False skips them)"),
    )
    problems = [f"{len(of)} {what}: {listed(of)}{hint}" for of, what, hint in found_wrong if of]
    return keys, skipped, kept, problems


def _spelling(
    model: nn.Module, names: Sequence[str], entries: Mapping[str, _Entry]
) -> tuple[Callable[[str], str], str]:
    """How the checkpoint spells the model's names, and what its names of this model begin with."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    ways: list[tuple[Callable[[str], str], str]] = [(lambda name: name, "")]
    if prefix != ".":
        ways.append((lambda name: name.removeprefix(prefix), ""))  # of the base model alone
        ways.append((lambda name: prefix + name, prefix))  # of a model around this one
    return max(ways, key=lambda way: sum(way[0](n) in entries for n in names))


def _misfit(held: Held, key: str, entry: _Entry) -> str | None:
    x = held.tensor
    if tuple(x.shape) != entry.shape:
        return f"{key} is {list(entry.shape)} there and {list(x.shape)} in the model"
    kind = "real" if x.is_floating_point() else "complex" if x.is_complex() else "integer"
    stored = {"F": "real", "B": "real", "C": "complex"}.get(entry.dtype[0], "integer")
    if kind != ("integer" if entry.dtype == "BOOL" else stored):
        return f"{key} is {entry.dtype} there and {x.dtype} in the model"
    return None


def _check_tied(keys: Mapping[Held, tuple[str, ...]], entries: Mapping[str, _Entry]) -> None:
    """Raises ValueError where the names of a tied parameter have values that differ, in the rows
    that this rank reads."""
    for held, (first, *others) in keys.items():
        like = held.with_memory(torch.device("meta"))
        for key in others:
            pairs = zip(_rows(entries[first], first, like), _rows(entries[key], key, like))
            if not all(torch.equal(a, b) for (_, a), (_, b) in pairs):
                raise ValueError(
                    f"{first} and {key} differ in the checkpoint and are one parameter in the "
                    "model: make the model with tie_word_embeddings=False in its configuration. "
                    "Nothing was changed"
                )


def _described(path: Path, problems: Sequence[str]) -> str:
    lines = "\n".join(f"- {p}" for p in problems)
    return (
        f"the checkpoint {path} does not fit the model; nothing was changed\n{lines}\n"
        "Give the checkpoint of this model and configuration. Where transformers converts a format "
        "while it loads (the experts of Mixtral, the head of GPT-NeoX), load with from_pretrained "
        "and call paradyse.shard(model) then"
    )
