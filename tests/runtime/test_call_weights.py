"""Models of equal code share a graph: each call goes by the weights that it is given."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from harness import RankPool
from models import make_batch, make_model, relative, whole
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import paradyse
from paradyse.runtime import call_weights
from paradyse.runtime.call_weights import CallWeights


def test_who_calls_is_known_by_the_weights() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    mixed = (one.weight, two.bias)
    of = CallWeights([None, one.weight, torch.zeros(2), one.bias])
    assert of.are_of([None, one.weight, None, one.bias])
    assert not of.are_of([None, one.weight, None, two.bias])
    assert of.take([None, two.weight, None, two.bias]), "these are new"
    assert not of.take([None, mixed[0], None, mixed[1]]), "each was seen, of one or the other"
    assert [w is m for w, m in zip(of.held(), mixed, strict=True)] == [True, True]
    assert of.have(one.parameters()) and of.have(two.parameters()) and not of.have([torch.ones(1)])
    del one, mixed
    gc.collect()
    assert len(of.held()) == 1, "weights live no longer for it"


def two_models(sharded: bool) -> dict[str, Any]:
    models = [make_model("llama_odd", torch.float64, num_hidden_layers=1) for _ in range(2)]
    with torch.no_grad():
        for p in models[1].parameters():
            p.mul_(1.5)
    batch = make_batch("plain", 2, 13)
    eager = [copy.deepcopy(m) for m in models]
    for m in eager:
        m(**batch).loss.backward()
    compiled, reports = [], [[], []]  # type: ignore[var-annotated]
    for model, seen in zip(models, reports, strict=True):
        if sharded:
            paradyse.shard(model)
        options = {"plan": "megatron_ts", "inner": "eager"}
        compiled.append(torch.compile(model, backend="paradyse", options=options))
        paradyse.on_step(model, seen.append)
    errors = []
    for i in (0, 1, 1, 0):
        models[i].zero_grad()
        with paradyse.no_sync(models[i]):
            compiled[i](**batch).loss.backward()
        compiled[i](**batch).loss.backward()
        want = {n: 2 * p.grad for n, p in eager[i].named_parameters()}
        got = {n: whole(p.grad) for n, p in models[i].named_parameters()}
        errors.append(max(relative(got[n], want[n]) for n in want))
    stats = [paradyse.stats(m) for m in compiled]
    return {
        "error": max(errors),
        "calls": [len(seen) for seen in reports],
        "captures": [s.captures for s in stats],
        "last": [s.last is seen[-1] for s, seen in zip(stats, reports, strict=True)],
    }


@pytest.mark.broad(but="False")
@pytest.mark.parametrize("sharded", [False, True])
def test_models_of_equal_code(sharded: bool, pool2: RankPool) -> None:
    for found in pool2.run(two_models, sharded, timeout_s=100):
        assert found["error"] < 1e-12
        assert found["calls"] == [4, 4] and found["last"] == [True, True]
        assert found["captures"] == [1, 1], "one graph serves both"


def test_imaginary_parts_are_compared() -> None:
    made = torch.ones(3, dtype=torch.complex64)
    one, two = (nn.Parameter(made + 1j * k) for k in range(2))
    assert CallWeights([one]).checksum(True) != CallWeights([two]).checksum(True)


class _Widened(TorchDispatchMode):
    """Elements of the largest tensor that was made in float64."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float64:
            self.most = max(self.most, out.numel())
        return out


def test_large_weights_are_added_up_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of all of one in float64 would not fit beside it."""
    w = nn.Parameter(torch.randint(-9, 9, (5, 7)).float())
    of = CallWeights([w])
    at_once = of.checksum(True)
    monkeypatch.setattr(call_weights, "_PIECE", 8)
    with _Widened() as widened:
        assert of.checksum(True) == at_once
    assert widened.most == 8
