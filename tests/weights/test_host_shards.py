"""Weights that lie on the host: where rows, gradients, states and whole tensors are; checkpoints.

Training with them is in ``test_shard_training``. Where the device is another memory is shown with
the meta device in its place, which takes no copies back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool
from models import relative
from tiny import Tiny, tokens
from torch import Tensor, nn

import paradyse
from paradyse.distributed.axis import SINGLE
from paradyse.planning.machine import agreed_capacity
from paradyse.runtime.registry import captures_of
from paradyse.weights.cast_shard import CastShard
from paradyse.weights.layout import even_layout
from paradyse.weights.optimizer_state import OptimizersSeen
from paradyse.weights.sharded_tensor import (
    ShardedTensor,
    lies_on_host,
    rows_here,
    used_on,
)

META = torch.device("meta")


@pytest.fixture
def weight() -> Any:
    """A parameter of 3 x 4 on the host, for another device."""
    rows = torch.arange(12.0).view(3, 4)
    shard = ShardedTensor(rows, even_layout(SINGLE, 3), (3, 4), used_on=META)
    return nn.Parameter(shard)


def test_rows_lie_on_the_host_and_whole_tensors_on_the_device(weight: Any) -> None:
    assert weight.device.type == "cpu" and used_on(weight) == META and lies_on_host(weight)
    assert not rows_here(weight).is_meta
    assert weight.for_use.is_meta and weight.new_whole().is_meta
    cast = CastShard(weight, torch.bfloat16)
    assert cast.for_use.is_meta and cast.for_use.dtype == torch.bfloat16
    assert cast.new_whole().is_meta and cast.new_whole().dtype == torch.bfloat16
    plain = ShardedTensor(torch.ones(3, 4), even_layout(SINGLE, 3), (3, 4))
    assert not lies_on_host(plain) and used_on(plain) == plain.device


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_gradients_and_states_lie_where_the_rows_do(weight: Any, options: Any) -> None:
    weight.grad = weight.detach().with_rows(torch.ones(3, 4))
    optimizer = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0, **options)
    optimizer.step()
    held = [weight.grad, *(x for x in optimizer.state[weight].values() if x.ndim)]
    assert len(held) == 3
    for x in held:
        assert isinstance(x, ShardedTensor) and lies_on_host(x) and x.device.type == "cpu"
    assert torch.allclose(rows_here(weight), torch.arange(12.0).view(3, 4) - 0.5)


def test_what_lies_on_the_host_is_counted_apart() -> None:
    model = Tiny()
    size = sum(w.nbytes for w in model.parameters())
    paradyse.shard(model, offload="optimizer")
    seen = OptimizersSeen(list(model.parameters()))
    assert (seen.static_bytes(), seen.static_bytes(on_host=True)) == (0, 4 * size)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    assert seen.add(optimizer)
    assert (seen.static_bytes(), seen.static_bytes(on_host=True)) == (0, 2 * size)


def step(run: tuple[Any, Any, Any], seed: int) -> float:
    _, call, optimizer = run
    optimizer.zero_grad()
    loss = call(tokens(2, 9, seed), tokens(2, 9, seed))
    loss.backward()
    optimizer.step()
    return loss.item()


def new_run(offload: str) -> tuple[Any, Any, Any]:
    torch.manual_seed(len(offload))
    model = paradyse.shard(Tiny(layers=1).double(), offload=offload)
    call: Any = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    return model, call, torch.optim.AdamW(model.parameters(), lr=1e-2)


def saved_and_loaded(folder: str) -> tuple[int, int, list[float], float]:
    """Bytes that plans count on the device, and bytes of the host that weights leave to blocks less
    those that it has; losses after a checkpoint of weights on the host, which weights on the device
    load, less those of going on; the distance of the weights then."""
    there = new_run("optimizer")
    for seed in range(2):
        step(there, seed)
    choice = next(g.choice for c in captures_of(there[1]) for g in c.graphs.values())
    _, has = agreed_capacity(choice.axis)
    left = choice.planner.host_limit(torch.float64) - has
    here = new_run("")
    paradyse.save_checkpoint(folder, there[0], there[2], step=2)
    paradyse.load_checkpoint(folder, here[0], here[2])
    losses = [step(there, seed) - step(here, seed) for seed in (2, 3)]
    a, b = (paradyse.full_state_dict(run[0]) for run in (there, here))
    off = max(relative(a[n], b[n]) for n in a)
    return choice.planner.static_bytes, int(left), losses, off


@pytest.mark.broad
def test_a_checkpoint_is_the_same_wherever_weights_lie(pool2: RankPool, tmp_path: Path) -> None:
    whole = sum(w.numel() * 8 for w in Tiny(layers=1).parameters())
    found = pool2.run(saved_and_loaded, str(tmp_path))
    for static, _, losses, off in found:
        assert static == 0
        assert max(map(abs, losses)) < 1e-12 and off < 1e-12
    held = -sum(left for _, left, _, _ in found)
    assert 4 * whole <= held < 4.1 * whole  # and Adam's counts of steps


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="offload='weights': give one of '', 'optimizer'"):
        paradyse.shard(Tiny(), offload="weights")


@pytest.mark.gpu
def test_on_a_gpu_rows_are_pinned_and_the_optimizer_steps_on_the_host() -> None:
    torch.manual_seed(0)
    reference, model = Tiny().cuda(), Tiny().cuda()
    model.load_state_dict(reference.state_dict())
    paradyse.shard(model, offload="optimizer")
    compiled: Any = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    ids = tokens(2, 13).cuda()
    grads: list[list[Tensor]] = []
    for call, of in ((reference, reference), (compiled, model)):
        optimizer = torch.optim.AdamW(of.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            call(ids, ids).backward()
            nn.utils.clip_grad_norm_(of.parameters(), 1.0)
            optimizer.step()
        grads.append([p.grad for p in of.parameters() if p.grad is not None])
    for p, want, got in zip(model.parameters(), *grads, strict=True):
        assert rows_here(p).is_pinned() and got.device.type == "cpu"
        assert relative(rows_here(got), want.cpu()) < 1e-4


@pytest.mark.parametrize("name", ["inductor", "aot_eager"])
def test_other_backends_are_refused(name: str) -> None:
    """They would compute with memory that nobody has written."""
    torch._dynamo.reset()
    model = paradyse.shard(torch.nn.Linear(4, 3), offload="optimizer")
    x = torch.ones(2, 4)
    for fn in model, lambda x: x @ model.weight.T:
        with pytest.raises(Exception, match="cannot compile sharded weights.*backend=.paradyse."):
            torch.compile(fn, backend=name)(x)


def test_backends_that_compile_nothing_take_shards() -> None:
    torch._dynamo.reset()
    model = paradyse.shard(torch.nn.Linear(4, 3), offload="optimizer")
    x = torch.ones(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))
