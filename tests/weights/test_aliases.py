"""What shares memory with a sharded weight: ``.data``, averaged copies, calls in inference mode."""

from __future__ import annotations

import copy
from typing import Any

import torch
from harness import RankPool
from models import make_batch, make_model, whole

import paradyse


def trained_once() -> tuple[Any, Any, dict[str, Any]]:
    """A sharded model, an averaged copy made before its first call, which moves some weights to
    whole heads, and a batch."""
    torch._dynamo.reset()
    model = paradyse.shard(make_model("llama"))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    options = {"inner": "eager", "plan": "megatron_ts"}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    batch = make_batch("plain", 2, 9)
    compiled(**batch).loss.backward()
    return model, averaged, batch


def written() -> list[float]:
    model, averaged, _ = trained_once()
    off, moved = [], 0
    for w, v in zip(model.parameters(), averaged.module.parameters(), strict=True):
        before = v.full_tensor().detach()
        alias = v.data
        with torch.no_grad():
            apart = w.data - alias  # elementwise, with rows that lie elsewhere
        moved += w.placement != v.placement
        alias.add_(1.0)
        off.append((v.full_tensor() - before - 1).abs().max().item())
        whole = w.full_tensor() - before
        off.append((apart.full_tensor() - whole).abs().max().item())
    assert moved
    return off


def test_writes_through_data_reach_the_weight(pool2: RankPool) -> None:
    for off in pool2.run(written, timeout_s=100):
        assert max(off) < 1e-6


def taken_before() -> list[str]:
    """Weights of which not all sees a step that was taken before the first call moved some: what
    ``state_dict()`` gave, ``.data``, a detached one; and that do not see what is written there."""
    torch._dynamo.reset()
    model = paradyse.shard(make_model("llama"))
    named = dict(model.named_parameters())
    before = {n: w.placement for n, w in named.items()}
    views = [model.state_dict(), {n: w.data for n, w in named.items()}]
    views.append({n: w.detach() for n, w in named.items()})
    options = {"inner": "eager", "plan": "megatron_ts"}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    compiled(**make_batch("plain", 2, 9)).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert any(w.placement != before[n] for n, w in named.items())
    found = [n for v in views for n, w in named.items() if not torch.equal(whole(v[n]), whole(w))]
    for name, w in named.items():
        views[1][name].fill_(3.0)
        found += [name] if (whole(w) != 3).any() else []
    return found


def test_what_was_taken_before_the_first_call_moves_along(pool2: RankPool) -> None:
    assert pool2.run(taken_before, timeout_s=100) == [[], []]


def averages() -> list[float]:
    model, averaged, _ = trained_once()
    averaged.update_parameters(model)
    first = [p.full_tensor().detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    averaged.update_parameters(model)
    return [
        (v.full_tensor() - (w + 0.5)).abs().max().item()
        for v, w in zip(averaged.module.parameters(), first, strict=True)
    ]


def test_averaged_models_hold_the_average(pool2: RankPool) -> None:
    for off in pool2.run(averages, timeout_s=100):
        assert max(off) < 1e-6


def inferred() -> list[float]:
    torch._dynamo.reset()
    model = paradyse.shard(make_model("llama"))
    compiled: Any = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    batch = make_batch("plain", 2, 9)
    want = compiled(**batch).loss.item()
    with torch.inference_mode():
        weight = model.get_input_embeddings().weight
        kept = weight.detach().full_tensor().sum().item()
        got = compiled(**batch).loss.item()
        assert compiled(**batch).logits.shape[:2] == (2, 9)
    compiled(**batch).loss.backward()
    copied = copy.deepcopy(model).get_input_embeddings().weight
    return [got - want, copied.full_tensor().sum().item() - kept]


def test_calls_in_inference_mode_and_training_behind_them(pool2: RankPool) -> None:
    for off in pool2.run(inferred, timeout_s=100):
        assert max(map(abs, off)) < 1e-4
