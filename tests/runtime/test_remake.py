"""An MLP behind an attention that runs again does not keep its input, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Tiny, tokens
from torch.utils.checkpoint import checkpoint

from paradyse.profiling.steps import Steps
from paradyse.runtime.remake import not_kept, remade

LENGTH, LAYERS = 53, 3
KEEPS = {"attention": "megatron_cz", "mlp": "megatron_cz+tiled"}
REMAKES = {"attention": "megatron_cz+recompute", "mlp": "megatron_cz+tiled"}
SELECTIVE = {"attention": "megatron_ts+recompute", "mlp": "megatron_ts+selective"}
AGAIN = {"attention": "megatron_cz+recompute", "mlp": "megatron_cz+recompute"}


def test_what_is_remade_is_made_once_and_not_kept() -> None:
    runs = []

    def first(x: torch.Tensor) -> torch.Tensor:
        runs.append(None)
        return remade((x * 3).exp())

    x = torch.linspace(0, 1, 5, dtype=torch.float64, requires_grad=True)
    y = checkpoint(first, x, use_reentrant=False)
    with not_kept(y, y.grad_fn):
        z = y.sin().sum()
    memory = y.untyped_storage()
    before = memory.nbytes()
    memory.resize_(0)  # whoever reads it now reads nothing
    z.backward()
    value = (x.detach() * 3).exp()
    assert before and len(runs) == 2
    torch.testing.assert_close(x.grad, 3 * value * value.cos())


def make_batch(batch: int, length: int) -> dict[str, Any]:
    ids = tokens(batch, length)
    return {"ids": ids, "labels": ids}


def gradients(model: torch.nn.Module, call: Any) -> list[torch.Tensor]:
    model.zero_grad()
    ids = tokens(2, LENGTH)
    call(ids, ids).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def train(sharded: bool) -> dict[str, list[int]]:
    """Gradients of all plans against the model as it is; what MLPs save."""
    import paradyse

    torch.manual_seed(0)
    model, plain = Tiny(layers=LAYERS).double(), Tiny(layers=LAYERS).double()
    plain.load_state_dict(model.state_dict())
    want = gradients(plain, plain)
    if sharded:
        paradyse.shard(model)
    current: list[Any] = [KEEPS]
    options = {"inner": "eager", "plan": lambda workload: current[0]}
    compiled = torch.compile(model, backend="paradyse", options=options)
    steps = Steps(model, {"inner": "eager"}, 2, True, make_batch)
    found = {}
    with steps.prepared():
        steps.find_blocks(LENGTH)
        for name, plan in (("keeps", KEEPS), ("remakes", REMAKES), ("again", AGAIN)):
            steps.run(LENGTH, plan)
            saved = steps.memory(LENGTH, plan).saved_bytes
            of = {i: b for i, b in steps.part_of.items() if getattr(b, "kind", "") == "mlp"}
            found[name] = [saved[i] for i in of if i in saved]
    for current[0] in (KEEPS, REMAKES, SELECTIVE, AGAIN, REMAKES):
        got = gradients(model, compiled)
        for a, b in zip(got, want, strict=True):
            whole = a.full_tensor() if hasattr(a, "full_tensor") else a
            torch.testing.assert_close(whole, b, rtol=1e-9, atol=1e-12)
    return found


@pytest.mark.broad
@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_mlp_does_not_keep_what_attention_makes_again(nproc: int, ranks: Any) -> None:
    for found in ranks(nproc).run(train, False, timeout_s=100):
        tokens_here = 2 * (-(-LENGTH // nproc))
        input_bytes = tokens_here * 32 * 8
        assert len(found["keeps"]) == len(found["remakes"]) == LAYERS
        for keeps, remakes, again in zip(*(found[n] for n in ("keeps", "remakes", "again"))):
            assert keeps >= input_bytes * 0.9 and again >= input_bytes * 0.9
            assert keeps - remakes >= input_bytes * 0.9


@pytest.mark.parametrize("plan", [REMAKES, SELECTIVE])
def test_behind_attention_without_gradients_the_input_is_kept(plan: Any) -> None:
    """What nothing is trained of, or ahead of, does not run again."""
    frozen = ("embed", "layers.0.norm.", "layers.0.qkv", "layers.0.proj")
    model = Tiny(layers=2).double()
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    torch._dynamo.reset()
    options = {"inner": "eager", "plan": plan}
    compiled = torch.compile(model, backend="paradyse", options=options)
    for got, want in zip(gradients(model, compiled), gradients(model, model), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_the_same_of_sharded_weights(ranks: Any) -> None:
    ranks(2).run(train, True, timeout_s=100)
