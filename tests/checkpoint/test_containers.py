"""What modules and optimizers keep in dicts, lists and tensors of their own, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool
from models import whole
from torch import Tensor, nn

import paradyse
from paradyse.checkpoint import storage
from paradyse.checkpoint.containers import filled, outline_of, values_in


class Keeps(nn.Module):
    """A weight, and an extra state that is a copy of what the module keeps."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(15.0).view(5, 3))
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def get_extra_state(self) -> Any:
        return self.kept.clone() if isinstance(self.kept, Tensor) else self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class Mute(Keeps):
    set_extra_state = nn.Module.set_extra_state


KEPT: dict[str, Any] = {
    "a tensor": torch.tensor([2.0, 3.0]),
    "no dims": torch.tensor(7),
    "a dict": {"scale": torch.tensor([0.5, 0.25]), "count": 3, "none": None, "empty": {}},
    "numbers as keys": {0: {"sum": torch.ones(2), 1: "text"}, "0.5": [1, 2], 2: []},
    "a list": [torch.ones(1), {"a": torch.zeros(2)}, [torch.tensor(2)]],
    "nothing in it": {},
    "no state": None,
    "a number": 4,
    "bytes": (b"fp8", {"a": 1}),
}


def models(kept: dict[str, Any]) -> Any:
    return paradyse.shard(nn.ModuleList([Keeps(x) for x in kept.values()]))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        keys = [*a] == [*b] and list(map(type, a)) == list(map(type, b))
        return keys and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Counts(torch.optim.Optimizer):
    """Keeps something of each dim under its number, as Shampoo does, and some beside weights."""

    def step(self, closure: Any = None) -> None:
        self.state["of all"] = {"steps": 1, "largest": torch.tensor([5.0])}  # type: ignore[index]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            for dim in range(p.ndim):
                state.setdefault(dim, torch.zeros(p.shape[dim])).add_(dim + 1)
            state["parts"] = {0: torch.ones_like(p), "1": {2: 3.5, "none": {}}}


def optimizer_of(model: Any, made: bool = False) -> Counts:
    optimizer = Counts(model.parameters(), {"decay": {1: 0.5, None: []}} if made else {})
    if made:
        optimizer.step()
    return optimizer


def save(folder: str) -> None:
    model = models(KEPT)
    paradyse.save_checkpoint(folder, model, optimizer_of(model, True), step=1)


def load(folder: str, compiled: bool) -> list[str]:
    """What is not as it was saved: nothing."""
    model = models(dict.fromkeys(KEPT, torch.zeros(3)))
    with torch.no_grad():
        model[0].weight.zero_()
    if compiled:
        model[2] = torch.compile(model[2], backend="eager")
    optimizer = optimizer_of(model)
    paradyse.load_checkpoint(folder, model, optimizer)
    wrong = [n for m, (n, x) in zip(model, KEPT.items(), strict=True) if not same(x, m.kept)]
    assert torch.equal(whole(model[0].weight), torch.arange(15.0).view(5, 3))
    for p in model.parameters():
        state = optimizer.state[p]
        found = {k: {**x, 0: whole(x[0])} if k == "parts" else x for k, x in state.items()}
        want = {0: torch.ones(5), 1: torch.full((3,), 2.0)}
        want["parts"] = {0: torch.ones(5, 3), "1": {2: 3.5, "none": {}}}
        wrong += [] if same(want, found) else ["the optimizer's state"]
    beside = optimizer.state["of all"]  # type: ignore[index]
    wrong += (
        [] if same({"steps": 1, "largest": torch.tensor([5.0])}, beside) else ["beside weights"]
    )
    kept = optimizer.param_groups[0]["decay"]
    return wrong + ([] if same({1: 0.5, None: []}, kept) else ["the optimizer's group"])


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("kept"))
    ranks(3).run(save, folder, timeout_s=60)
    return folder


@pytest.mark.parametrize("compiled", [False, True])
def test_all_is_as_it_was_on_other_ranks(saved: str, compiled: bool, pool2: RankPool) -> None:
    """Tensors, of another shape than here too, and dicts of any keys, also empty ones."""
    assert pool2.run(load, saved, compiled, timeout_s=60) == [[], []]
    assert load(saved, compiled) == []


def test_extra_states_are_not_read_into_what_is_there(saved: str) -> None:
    """Who holds the tensor that get_extra_state gave still has its values."""
    model = models(dict.fromkeys(KEPT, torch.zeros(2)))
    before = [m.kept for m in model]
    paradyse.load_checkpoint(saved, model)
    assert all(torch.equal(x, torch.zeros(2)) for x in before)


def test_checkpoints_of_before_containers_were_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = storage.write

    def without(ranks: Any, path: Path, entries: dict[str, Any]) -> None:
        write(ranks, path, {k: x for k, x in entries.items() if k != "containers"})

    kept = {n: KEPT[n] for n in ("a tensor", "a list", "a number")}
    model = models(kept)
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write", without)
        paradyse.save_checkpoint(tmp_path, model, optimizer, step=1)
    other = models(dict.fromkeys(kept, 0))
    theirs = torch.optim.Adam(other.parameters())
    paradyse.load_checkpoint(tmp_path, other, theirs)
    assert all(same(m.kept, x) for m, x in zip(other, kept.values(), strict=True))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert same(dict(optimizer.state[p]), dict(theirs.state[q]))


def test_what_cannot_be_saved_or_given_is_refused(tmp_path: Path) -> None:
    model = Keeps({1: 2, "1": 3})
    with pytest.raises(ValueError, match=r"model\._extra_state has keys .* apart: 1, '1'; give"):
        paradyse.save_checkpoint(tmp_path, model, step=1)
    with pytest.raises(ValueError, match=r"names? .*test_containers\.Keeps|holds .*Keeps"):
        paradyse.save_checkpoint(tmp_path, Keeps({Keeps: 1}), step=1)
    paradyse.save_checkpoint(tmp_path, Mute({1: 2}), step=1)
    mute = Mute(None)
    with torch.no_grad():
        mute.weight.zero_()
    with pytest.raises(ValueError, match="Mute has get_extra_state and no set_extra_state"):
        paradyse.load_checkpoint(tmp_path, mute)
    assert not mute.weight.any()


def test_an_entry_beside_parameters_may_not_have_the_name_of_one(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["weight"] = {"steps": 1}  # type: ignore[index]
    with pytest.raises(ValueError, match="an entry 'weight' beside those of parameters"):
        paradyse.save_checkpoint(tmp_path / "run", model, optimizer, step=1)
    assert not any((tmp_path / "run").iterdir())


def test_an_outline_has_all_but_the_values() -> None:
    value = {"a": [1, [torch.ones(1)]], 3: ({},), "b": [], 4: {}}
    outline = outline_of(value, "x")
    assert outline == {"a": ["x.a.0", ["x.a.1.0"]], 3: "x.3", "b": "x.b", 4: {}}
    assert filled(outline, dict(values_in(value, outline))) == value
    assert dict(values_in({"a": 1}, outline)) == dict.fromkeys(["x.a.0", "x.a.1.0", "x.3", "x.b"])
