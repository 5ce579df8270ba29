"""Checkpoints that fit in part or not at all, and tensors that no checkpoint has."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool
from models import make_model, redraw
from test_loading import assert_same, checkpoints, copied, on_meta, state
from torch import nn


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return checkpoints(tmp_path_factory)


# Names


def test_names_of_the_base_model(tmp_path: Path) -> None:
    """A checkpoint of the base for the whole, and the other way round."""
    import paradyse

    reference = make_model("gpt2")
    reference.transformer.save_pretrained(tmp_path)  # the head is tied to the embedding
    model = on_meta("gpt2")
    paradyse.load_safetensors(model, tmp_path)
    assert_same(model.state_dict(), reference.state_dict())

    reference = make_model("llama")
    reference.save_pretrained(tmp_path)
    base = on_meta("llama").model
    report = paradyse.load_safetensors(base, tmp_path)
    assert report.skipped == ("lm_head.weight",)
    assert_same(base.state_dict(), reference.model.state_dict())

    reference.model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"1 of the model's tensors are missing: lm_head"):
        paradyse.load_safetensors(on_meta("llama"), tmp_path)


def test_not_strict(tmp_path: Path) -> None:
    """What the model lacks is skipped, what the checkpoint lacks keeps values but needs some."""
    from safetensors.torch import save_file

    import paradyse

    tensors = make_model("llama").state_dict()
    save_file(tensors | {"novel": torch.zeros(2)}, tmp_path / "more.safetensors")
    with pytest.raises(ValueError, match=r"1 have no place in the model: novel \(strict=False"):
        paradyse.load_safetensors(on_meta("llama"), tmp_path / "more.safetensors")
    model = on_meta("llama")
    report = paradyse.load_safetensors(model, tmp_path / "more.safetensors", strict=False)
    assert report.skipped == ("novel",)
    assert_same(model.state_dict(), tensors)

    head = tensors.pop("lm_head.weight")
    save_file(tensors, tmp_path / "less.safetensors")
    model = redraw(make_model("llama"), seed=1)
    own = model.lm_head.weight.detach().clone()
    assert not torch.equal(own, head)
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        paradyse.load_safetensors(model, tmp_path / "less.safetensors")
    report = paradyse.load_safetensors(model, tmp_path / "less.safetensors", strict=False)
    assert report.kept == ("lm_head.weight",)
    assert_same(model.state_dict(), tensors | {"lm_head.weight": own})
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        paradyse.load_safetensors(on_meta("llama"), tmp_path / "less.safetensors", strict=False)


def test_names_that_older_checkpoints_have(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    import paradyse

    for family, old in (
        ("gpt2", "transformer.h.0.attn.bias"),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("bert", "bert.embeddings.position_ids"),
    ):
        tensors = {n: x.clone() for n, x in make_model(family).state_dict().items()}
        save_file(tensors | {old: torch.zeros(2)}, tmp_path / "old.safetensors")
        report = paradyse.load_safetensors(on_meta(family), tmp_path / "old.safetensors")
        assert report.skipped == (old,)


# Refused


def _no_folder(folder: Path) -> Path:
    return folder / "nowhere"


def _no_checkpoint(folder: Path) -> Path:
    for file in folder.glob("model*"):
        file.unlink()
    return folder


def _cut_short(folder: Path) -> Path:
    file = sorted(folder.glob("*.safetensors"))[2]
    file.write_bytes(file.read_bytes()[:-10])
    return folder


def _another_index(folder: Path) -> Path:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    names = index["weight_map"]
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    names[head], names[table] = names[table], names[head]
    file.write_text(json.dumps(index))
    return folder


def _no_index(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text('["weight_map"]')
    return folder


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_no_folder, "no file or folder .*nowhere; give a .safetensors file"),
        (_no_checkpoint, "has neither model.safetensors nor model.safetensors.index.json"),
        (_cut_short, r"model-00003-of-.*is not a whole safetensors file .*download it again"),
        (_another_index, r"names 2 tensors that its files do not have: .*lm_head.weight"),
        (_no_index, r"index.json is not an index of safetensors files"),
    ],
)
def test_broken_checkpoints(
    spoil: Callable[[Path], Path], text: str, saved: Any, tmp_path: Path
) -> None:
    import paradyse

    path = spoil(copied(saved("llama", "several"), tmp_path / "copy"))
    for model in (on_meta("llama"), redraw(make_model("llama"), seed=1)):
        before = state(model)
        with pytest.raises(ValueError, match=text):
            paradyse.load_safetensors(model, path)
        assert state(model) == before


@pytest.mark.parametrize(
    ("family", "config", "text"),
    [
        ("llama", {"intermediate_size": 90}, r"6 do not fit: .*up_proj.weight is \[88, 64\] there"),
        ("llama", {"num_hidden_layers": 3}, "9 of the model's tensors are missing"),
        ("llama", {"num_hidden_layers": 1}, r"9 have no place in the model: model\.layers\.1"),
        ("mixtral", {}, "load with from_pretrained and call paradyse.shard"),
        ("neox", {}, "load with from_pretrained and call paradyse.shard"),
    ],
)
def test_another_model(family: str, config: dict[str, Any], text: str, saved: Any) -> None:
    import paradyse

    model = on_meta(family, **config)
    before = state(model)
    with pytest.raises(ValueError, match=text):
        paradyse.load_safetensors(model, saved(family))
    assert state(model) == before


def test_other_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    import paradyse

    file = tmp_path / "quantized.safetensors"
    save_file({"weight": torch.zeros(3, 5, dtype=torch.uint8), "bias": torch.zeros(3)}, file)
    with pytest.raises(ValueError, match=r"weight is U8 there and torch.float32 in the model"):
        paradyse.load_safetensors(nn.Linear(5, 3), file)

    class Quantized(nn.Parameter):
        pass

    model = nn.Linear(5, 3)
    model.weight = Quantized(model.weight.detach())
    with pytest.raises(ValueError, match="weight is a Quantized"):
        paradyse.load_safetensors(model, file)
    with pytest.raises(ValueError, match="give a torch.nn.Module, not dict"):
        paradyse.load_safetensors({}, file)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        paradyse.load_safetensors(nn.Linear(5, 3), file)


def load_a_file_of_its_own(folder: str) -> list[str]:
    """What this rank hears where only its own file is not that of the others."""
    import torch.distributed as dist

    import paradyse

    heard = []
    model = paradyse.shard(nn.Linear(5, 3))
    before = state(model)
    for other in ("values", "shape", "nowhere"):
        name = other if dist.get_rank() == 1 else "right"
        with pytest.raises(ValueError) as error:
            paradyse.load_safetensors(model, Path(folder) / f"{name}.safetensors")
        heard.append(str(error.value))
        assert state(model) == before
    paradyse.load_safetensors(model, Path(folder) / f"right{dist.get_rank()}.safetensors")
    assert torch.equal(paradyse.full_state_dict(model)["weight"], torch.ones(3, 5))
    return heard


def test_ranks_with_different_files(tmp_path: Path, pool2: RankPool) -> None:
    """Other values under equal names and shapes, another shape, no file; copies are fine."""
    from safetensors.torch import save_file

    right = {"weight": torch.ones(3, 5), "bias": torch.zeros(3)}
    for name in ("right", "right0", "right1"):
        save_file(right, tmp_path / f"{name}.safetensors")
    save_file({**right, "weight": torch.full((3, 5), 2.0)}, tmp_path / "values.safetensors")
    save_file({**right, "bias": torch.zeros(4)}, tmp_path / "shape.safetensors")
    one, two = pool2.run(load_a_file_of_its_own, str(tmp_path), timeout_s=60)
    assert one[0] == two[0] and "disagree on the files (checksum): rank 0: " in one[0]
    assert "give every rank the same files, or a copy of them" in one[0]
    for text, part in zip(two[1:], ("bias is [4] there", "no file or folder"), strict=True):
        assert part in text
    assert one[1:] == [f"on rank 1: {text}" for text in two[1:]]


def test_tensors_without_values(tmp_path: Path, pool2: RankPool) -> None:
    """No rows, no dims: nothing to compare, and no error."""
    from safetensors.torch import save_file

    save_file({"empty": torch.zeros(0, 4), "one": torch.tensor(3)}, tmp_path / "a.safetensors")
    assert pool2.run(load_odd_tensors, str(tmp_path / "a.safetensors")) == [3, 3]


def load_odd_tensors(file: str) -> int:
    import paradyse

    model = nn.Module()
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 4)))
    model.register_buffer("one", torch.tensor(2))
    paradyse.load_safetensors(paradyse.shard(model), file)
    return int(model.one)


# Buffers


class Table(nn.Module):
    """A weight, a buffer that is saved, two that are not, and a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)
        self.alias = self.table
        self.constant = torch.arange(2)


class Remade(Table):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(7)
            self.mean.fill_(7)
            self.table = torch.arange(4.0)  # another tensor is as good as other values
            self.mask.fill_(True)
            self.constant.copy_(torch.arange(2))


class Half(Table):
    def reset_parameters(self) -> None:
        self.table[:2] = 0
        self.mask.fill_(True)


class Failing(Table):
    def reset_parameters(self) -> None:
        raise KeyError("no table")


def test_buffers_that_are_not_saved(tmp_path: Path) -> None:
    """Made by the module, whose other tensors are not touched by that."""
    from safetensors.torch import save_file

    import paradyse

    with torch.device("meta"):
        model = nn.Sequential(Remade())
    model[0].weight = nn.Parameter(torch.full((3,), 5.0))
    save_file({"0.mean": torch.full((3,), 2.0)}, tmp_path / "a.safetensors")
    report = paradyse.load_safetensors(model, tmp_path / "a.safetensors", strict=False)
    (made,) = model
    assert report.kept == ("0.weight",) and report.num_tensors == 1
    assert made.weight.tolist() == [5, 5, 5] and made.mean.tolist() == [2, 2, 2]
    assert made.table.tolist() == [0, 1, 2, 3] and made.mask.tolist() == [True] * 4
    assert made.alias is made.table and made.constant.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Table, "'0.table' is on the meta device.*nothing makes its values. Give Table a reset"),
        (Half, "'0.table' is on the meta device.*nothing makes its values"),
        (Failing, "the model's own code to make it fails .KeyError: 'no table'."),
    ],
)
def test_buffers_that_nothing_makes(kind: Any, text: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    import paradyse

    with torch.device("meta"):
        model = nn.Sequential(kind())
    tensors = {"0.mean": torch.zeros(3), "0.weight": torch.zeros(3)}
    save_file(tensors, tmp_path / "a.safetensors")
    before = state(model)
    with pytest.raises(ValueError, match=text):
        paradyse.load_safetensors(model, tmp_path / "a.safetensors")
    assert state(model) == before and model[0].alias is model[0].table and model[0].constant.is_meta
    with torch.device("cpu"):
        model[0].table, model[0].mask = torch.arange(4.0), torch.ones(4, dtype=torch.bool)
        model[0].alias, model[0].constant = model[0].table, torch.arange(2)
    paradyse.load_safetensors(model, tmp_path / "a.safetensors")
    assert model[0].weight.tolist() == [0, 0, 0] and model[0].table.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "sub/../x", ".."])
def test_an_index_names_no_file_outside_its_folder(tmp_path: Path, name: str) -> None:
    import paradyse

    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(ValueError, match="names files outside its folder"):
        paradyse.load_safetensors(on_meta("llama"), tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"weight_map": {"a": 3}}', '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    import paradyse

    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="is not an index of safetensors files"):
        paradyse.load_safetensors(on_meta("llama"), tmp_path)
