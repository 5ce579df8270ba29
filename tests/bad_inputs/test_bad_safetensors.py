"""Safetensors checkpoints that are refused, with their words; model and files stay as they are.

One checkpoint of two files and their index is written; each case spoils a copy of it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input import Words, refused
from safetensors.torch import save_file
from torch import Tensor, nn

import paradyse
from paradyse.checkpoint.load_safetensors import FILE, INDEX

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
DEEP = "[" * 100_000


def make_model() -> nn.Module:
    """Two linears, one of them in half precision, and a buffer."""
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2).half())
    model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    return model


def write(folder: Path) -> None:
    tensors = {n: x.contiguous() for n, x in make_model().state_dict().items()}
    halves = {n: FIRST if n.startswith("0.") else SECOND for n in tensors}
    for file in (FIRST, SECOND):
        save_file({n: x for n, x in tensors.items() if halves[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": halves}))


def index(folder: Path, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps({"weight_map": content})
    (folder / INDEX).write_text(text)


def renamed(folder: Path, changes: dict[str, Any]) -> None:
    """An index with other files for some names; a name without a file goes."""
    names = json.loads((folder / INDEX).read_text())["weight_map"] | changes
    index(folder, {n: f for n, f in names.items() if f is not ...})


def with_header(folder: Path, header: Any, size: int | None = None, rest: int = 100) -> None:
    """The first file with another header, said to be so many bytes long."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if size is None else size
    (folder / FIRST).write_bytes(struct.pack("<Q", length) + text + bytes(rest))


def cut(folder: Path, num_bytes: int) -> None:
    os.truncate(folder / FIRST, num_bytes)


def alone(folder: Path, tensors: dict[str, Tensor]) -> None:
    """One file with these tensors in the place of all."""
    for name in (FIRST, SECOND, INDEX):
        (folder / name).unlink()
    save_file(make_model().state_dict() | tensors, folder / FILE)


def without(folder: Path, name: str) -> None:
    tensors = make_model().state_dict()
    del tensors[name]
    for file in (FIRST, SECOND, INDEX):
        (folder / file).unlink()
    save_file(tensors, folder / FILE)


BROKEN = (FIRST, "is not a whole safetensors file", "copy or download it again")
NO_INDEX = (INDEX, "is not an index of safetensors files")
OUTSIDE = (INDEX, "names files outside its folder", "beside it alone")
ABSENT = ("of the 2 files", "are missing", "Copy or download them again; nothing was changed")
STRANGE = ("its files do not have", "Index and files are of different checkpoints")
WEIGHT = {"0.weight": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}}

FOLDERS: dict[str, tuple[Callable[[Path], Any], Words]] = {
    # the index
    "an empty index": (lambda f: index(f, ""), NO_INDEX),
    "a cut index": (lambda f: os.truncate(f / INDEX, 30), NO_INDEX),
    "an index nested deeply": (lambda f: index(f, DEEP), NO_INDEX),
    "an index that is a list": (lambda f: index(f, "[1]"), NO_INDEX),
    "an index that is null": (lambda f: index(f, "null"), NO_INDEX),
    "an index without a map": (lambda f: index(f, '{"metadata": {}}'), NO_INDEX),
    "an index with a list": (lambda f: index(f, [FIRST]), NO_INDEX),
    "an index with a text": (lambda f: index(f, FIRST), NO_INDEX),
    "an index with numbers": (lambda f: index(f, {"0.weight": 3}), NO_INDEX),
    "an index of bytes": (lambda f: (f / INDEX).write_bytes(b"\xff\xfe\x00"), NO_INDEX),
    "an index of nothing": (lambda f: index(f, {}), "of the model's tensors are missing"),
    "a name above": (lambda f: renamed(f, {"0.weight": f"../{FIRST}"}), OUTSIDE),
    "a name far above": (lambda f: renamed(f, {"0.weight": "../../../etc/passwd"}), OUTSIDE),
    "an absolute name": (lambda f: renamed(f, {"0.weight": "/etc/passwd"}), OUTSIDE),
    "a name below": (lambda f: renamed(f, {"0.weight": f"sub/{FIRST}"}), OUTSIDE),
    "a name of a name": (lambda f: renamed(f, {"0.weight": f"sub/../{FIRST}"}), OUTSIDE),
    "the folder above": (lambda f: renamed(f, {"0.weight": ".."}), OUTSIDE),
    "the folder itself": (lambda f: renamed(f, {"0.weight": "."}), INDEX),
    "a name that is empty": (lambda f: renamed(f, {"0.weight": ""}), INDEX),
    "a name with a null": (lambda f: renamed(f, {"0.weight": "a\0b"}), INDEX),
    "names changed round": (
        lambda f: renamed(f, {"0.weight": SECOND, "1.weight": FIRST}),
        ("names 2 tensors", "0.weight", *STRANGE),
    ),
    "a name too many": (lambda f: renamed(f, {"2.weight": SECOND}), ("2.weight", *STRANGE)),
    "a name too few": (
        lambda f: renamed(f, {"0.weight": ...}),
        "1 of the model's tensors are missing: 0.weight",
    ),
    # the files
    "a file that is gone": (lambda f: (f / SECOND).unlink(), (SECOND, *ABSENT)),
    "a file that is a folder": (
        lambda f: [(f / SECOND).unlink(), (f / SECOND).mkdir()],
        (SECOND, *ABSENT),
    ),
    "a file that is a pipe": (
        lambda f: [(f / SECOND).unlink(), os.mkfifo(f / SECOND)],
        (SECOND, *ABSENT),
    ),
    "a link to nowhere": (
        lambda f: [(f / SECOND).unlink(), (f / SECOND).symlink_to("nowhere")],
        (SECOND, *ABSENT),
    ),
    "everything gone": (
        lambda f: [(f / name).unlink() for name in (FIRST, SECOND, INDEX)],
        (f"has neither {FILE} nor {INDEX}", "model.save_pretrained"),
    ),
    "an index alone gone": (
        lambda f: (f / INDEX).unlink(),
        (f"has neither {FILE} nor {INDEX}", "or give the file itself"),
    ),
    "an empty file": (lambda f: cut(f, 0), BROKEN),
    "three bytes": (lambda f: cut(f, 3), BROKEN),
    "a length alone": (lambda f: cut(f, 8), BROKEN),
    "half a header": (lambda f: cut(f, 40), BROKEN),
    "values cut": (lambda f: cut(f, (f / FIRST).stat().st_size - 1), BROKEN),
    "values besides": (
        lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes() + bytes(64)),
        BROKEN,
    ),
    "text": (lambda f: (f / FIRST).write_text("version https://git-lfs.github.com\n"), BROKEN),
    "a pickle": (lambda f: torch.save({"0.weight": torch.ones(1)}, f / FIRST), BROKEN),
    "zeros": (lambda f: (f / FIRST).write_bytes(bytes(10_000)), BROKEN),
    "a header beyond the file": (lambda f: with_header(f, WEIGHT, size=10**6), BROKEN),
    "a header beyond memory": (lambda f: with_header(f, WEIGHT, size=2**62), BROKEN),
    "a header of nothing": (lambda f: with_header(f, b"", size=0), BROKEN),
    "a header that is a list": (lambda f: with_header(f, [1]), BROKEN),
    "a header nested deeply": (lambda f: with_header(f, DEEP.encode()), BROKEN),
    "an unknown dtype": (
        lambda f: with_header(f, {"0.weight": WEIGHT["0.weight"] | {"dtype": "F99"}}, rest=60),
        BROKEN,
    ),
    "a shape of other bytes": (
        lambda f: with_header(f, {"0.weight": WEIGHT["0.weight"] | {"shape": [3, 6]}}, rest=60),
        BROKEN,
    ),
    "a shape below 0": (
        lambda f: with_header(f, {"0.weight": WEIGHT["0.weight"] | {"shape": [-3, 5]}}, rest=60),
        BROKEN,
    ),
    "values turned round": (
        lambda f: with_header(
            f, {"0.weight": WEIGHT["0.weight"] | {"data_offsets": [60, 0]}}, rest=60
        ),
        BROKEN,
    ),
    "values far away": (
        lambda f: with_header(
            f, {"0.weight": WEIGHT["0.weight"] | {"data_offsets": [10**9, 10**9 + 60]}}, rest=60
        ),
        BROKEN,
    ),
    # the tensors
    "a wider tensor": (
        lambda f: alone(f, {"0.weight": torch.ones(3, 6)}),
        "0.weight is [3, 6] there and [3, 5] in the model",
    ),
    "a tensor turned round": (
        lambda f: alone(f, {"0.weight": torch.ones(5, 3)}),
        "0.weight is [5, 3] there and [3, 5] in the model",
    ),
    "a tensor of one dim": (
        lambda f: alone(f, {"0.weight": torch.ones(15)}),
        "0.weight is [15] there and [3, 5] in the model",
    ),
    "a scalar": (lambda f: alone(f, {"0.bias": torch.ones(())}), "0.bias is [] there and [3] in"),
    "no rows": (lambda f: alone(f, {"0.bias": torch.ones(0)}), "0.bias is [0] there and [3] in"),
    "whole numbers": (
        lambda f: alone(f, {"0.weight": torch.ones(3, 5, dtype=torch.int8)}),
        "0.weight is I8 there and torch.float32 in the model",
    ),
    "a mask": (
        lambda f: alone(f, {"0.weight": torch.ones(3, 5, dtype=torch.bool)}),
        "0.weight is BOOL there and torch.float32 in the model",
    ),
    "complex numbers": (
        lambda f: alone(f, {"0.weight": torch.ones(3, 5, dtype=torch.complex64)}),
        "0.weight is C64 there and torch.float32 in the model",
    ),
    "fractions of a count": (
        lambda f: alone(f, {"count": torch.ones(2)}),
        "count is F32 there and torch.int64 in the model",
    ),
    "one name too many": (
        lambda f: alone(f, {"novel": torch.ones(2)}),
        ("1 have no place in the model: novel", "strict=False skips them"),
    ),
    "one name too few": (
        lambda f: without(f, "0.bias"),
        "1 of the model's tensors are missing: 0.bias",
    ),
    "another model": (
        lambda f: alone(f, {"0.weight": torch.ones(9, 9), "novel": torch.ones(2)}),
        ("does not fit the model; nothing was changed", "1 do not fit", "1 have no place"),
    ),
}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("name", FOLDERS)
def test_checkpoints_that_are_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path)
    spoil, words = FOLDERS[name]
    spoil(tmp_path)
    model = make_model()
    before = {n: x.clone() for n, x in model.state_dict().items()}
    with refused(tmp_path, words):
        paradyse.load_safetensors(model, tmp_path)
    assert same(before, model.state_dict())


def test_the_checkpoint_that_is_spoilt_is_whole(tmp_path: Path) -> None:
    write(tmp_path)
    assert paradyse.load_safetensors(make_model(), tmp_path).num_tensors == 5


CALLS: dict[str, tuple[Callable[[Path], Any], Words]] = {
    "no such folder": (
        lambda f: paradyse.load_safetensors(make_model(), f / "nowhere"),
        ("no file or folder", "nowhere; give a .safetensors file", "downloaded first"),
    ),
    "a name of the hub": (
        lambda f: paradyse.load_safetensors(make_model(), "meta-llama/Llama-3.1-8B"),
        ("no file or folder meta-llama/Llama-3.1-8B", "downloaded first"),
    ),
    "a device": (
        lambda f: paradyse.load_safetensors(make_model(), "/dev/null"),
        "no file or folder /dev/null",
    ),
    "a number as path": (
        lambda f: paradyse.load_safetensors(make_model(), 3),
        "give the path of a checkpoint, not int 3",
    ),
    "no path": (
        lambda f: paradyse.load_safetensors(make_model(), None),
        "give the path of a checkpoint, not NoneType None",
    ),
    "a dict as model": (
        lambda f: paradyse.load_safetensors({}, f),
        "give a torch.nn.Module, not dict",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path)
    call, words = CALLS[name]
    with refused(tmp_path, words):
        call(tmp_path)
