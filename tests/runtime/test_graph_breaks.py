"""A head behind a break of the model's graph, and a whole step that is compiled."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankFailure, RankPool
from models import make_batch, make_model, relative
from own_models import Decoder, ids_of
from torch import Tensor
from torch.nn import functional as F

import paradyse


class BreakAhead(Decoder):
    """Its head is behind a break of the graph."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def broken(replicas: int, sharded: bool, frozen: bool = False) -> list[float]:
    """How far gradients of each weight are off those of one process, on all replicas' batches;
    ``frozen``: the head has none."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = BreakAhead().double()
    plain.head.requires_grad_(not frozen)
    each = dist.get_world_size() // replicas
    batches = [ids_of(13).roll(i, 1) for i in range(replicas)]
    torch.stack([plain(ids) for ids in batches]).mean().backward()
    torch.manual_seed(0)
    model: Any = BreakAhead().double()
    model.head.requires_grad_(not frozen)
    mesh = dist.init_device_mesh("cpu", (replicas, each), mesh_dim_names=("data", "sequence"))
    if sharded:
        paradyse.shard(model, mesh)
    options = {"inner": "eager", "mesh": mesh, "plan": "megatron_cz"}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    compiled(batches[dist.get_rank() // each]).backward()
    off = []
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            got = p.grad.full_tensor() if sharded else p.grad
            off.append(relative(got, q.grad))
    return off


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_a_head_behind_a_graph_break(sharded: bool, pool2: RankPool) -> None:
    for off in pool2.run(broken, 1, sharded, timeout_s=100):
        assert max(off) < 1e-8


def test_a_frozen_head_behind_a_graph_break(pool2: RankPool) -> None:
    for off in pool2.run(broken, 1, True, True, timeout_s=100):
        assert max(off) < 1e-8


@pytest.mark.broad
def test_a_head_behind_a_graph_break_of_replicas(pool4: RankPool) -> None:
    for off in pool4.run(broken, 2, True, timeout_s=100):
        assert max(off) < 1e-8
    with pytest.raises(RankFailure, match="With a data-parallel axis it cannot be trained"):
        pool4.run(broken, 2, False, timeout_s=100)


def whole_step() -> str:
    torch._dynamo.reset()
    model, batch = make_model("llama"), make_batch("plain", 2, 9)

    def step() -> None:
        model(**batch).loss.backward()

    options = {"inner": "eager", "plan": "megatron_cz"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Dynamo cannot trace on its way
        try:
            torch.compile(step, backend="paradyse", options=options)()
        except Exception as e:
            return str(e)
    return "no error"


def test_backward_inside_what_was_compiled_is_refused(pool1: RankPool, pool2: RankPool) -> None:
    assert pool1.run(whole_step, timeout_s=100) == ["no error"]
    for said in pool2.run(whole_step, timeout_s=100):
        assert "backward() was called inside a function compiled by this backend" in said
