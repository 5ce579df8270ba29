"""Models without attention: what is done token by token is split, and what mixes them exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import TOLERANCE
from plans import blocks_of, choose
from without_attention import MODELS, batch_of

SIZES = {name: [(2, 13), (3, 7), (2, 22), (3, 24), (2, 9)] for name in MODELS}
SIZES["Scan"] = [(2, 13), (3, 24)]  # each has a program of its own; one fills its chunks


def train(name: str, plans: tuple[str, ...], sharded: bool) -> tuple[Any, ...]:
    """Errors above the tolerance, kinds of blocks, programs after each call, notes, and operators
    on split tokens."""
    import paradyse
    from paradyse.runtime.registry import captures_of

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[name]().double()
    weights = list(model.parameters())
    wanted = []
    for size in SIZES[name]:
        loss = model(*batch_of(*size))
        wanted.append((loss.detach(), torch.autograd.grad(loss, weights, allow_unused=True)))
    if sharded:
        paradyse.shard(model)
        weights = list(model.parameters())
    current: list[Any] = ["colossal_z"]
    options = {"plan": lambda workload: current[0], "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    off, counts = {}, []
    for size, (want, grads) in zip(SIZES[name], wanted, strict=True):
        for plan in plans:
            loss = compiled(*batch_of(*size))
            got = torch.autograd.grad(loss, weights, allow_unused=True)
            pairs = [(loss.detach(), want), *zip(got, grads, strict=True)]
            for i, (x, y) in enumerate(pairs):
                if x is None or y is None:
                    assert x is y
                    continue
                x = getattr(x, "full_tensor", lambda x=x: x)()
                error = ((x - y).norm() / y.norm().clamp(min=1e-12)).item()
                if not error < TOLERANCE[torch.float64]:
                    off[plan, size, i] = error
            current[0] = choose(plan, blocks_of(compiled))
        found = list(captures_of(compiled))
        counts.append(sum(len(c.graphs) for c in found))
        assert not list(captures_of(compiled, whole=True))
    graphs = [g for c in found for g in c.graphs.values()]
    split = {str(n.target) for n in graphs[-1].program.ctx.split if n.op == "call_function"}
    kinds = [b.kind for b in blocks_of(compiled)]
    return off, kinds, counts, [n for c in found for n in c.notes], split


NOTES = {
    "ShortConv": "aten.conv1d.default and 1 more operators in L['self'].layers.*.conv: all tokens, "
    "for a part of the 20 heads or channels",
    "Bare": "aten.conv1d.default and 1 more operators in L['self'].layers.*.conv: all tokens, "
    "for a part of the 20 heads or channels",
    "Scan": "aten.pad.default and 44 more operators: all tokens, for a part of the 5 heads or "
    "channels",
    "Fourier": "aten.fft_fftn.default runs on gathered tensors: no rule for aten.fft_fftn.default",
    "Scored": "aten.matmul.default and 5 more operators: all tokens, for a part of the 5 heads or "
    "channels",
}


@pytest.mark.broad(but="Fourier-2-False")
@pytest.mark.parametrize(
    ("name", "nproc", "sharded"),
    [
        ("ShortConv", 2, False),
        ("ShortConv", 3, True),
        ("Bare", 2, False),
        ("Scan", 2, False),
        pytest.param("Scan", 3, True, marks=pytest.mark.slow),
        ("Fourier", 2, False),
        pytest.param("Fourier", 3, False, marks=pytest.mark.slow),
        ("Scored", 2, False),
        pytest.param("Scored", 3, False, marks=pytest.mark.slow),
        pytest.param("Scored", 4, True, marks=pytest.mark.slow),
    ],
)
def test_exact_at_odd_lengths(name: str, nproc: int, sharded: bool, ranks: Any) -> None:
    plans = ("megatron_ts",) if name in ("Scan", "Bare") else ("megatron_cz", "megatron_ts")
    for off, kinds, counts, notes, split in ranks(nproc).run(
        train, name, plans, sharded, timeout_s=300
    ):
        assert not off
        assert kinds == ([] if name == "Bare" else ["mlp", "mlp"])
        assert NOTES[name] in notes
        assert name == "Fourier" or not any("gathered" in n for n in notes), notes
        assert {"aten.embedding.default", "aten.linear.default"} <= split
        if name != "Scan":  # the number of chunks is no dim's size
            assert counts == [1, 2, 2, 2, 2], "one program for all lengths"


def train_replicas(name: str, ranks_per_group: int) -> list[float]:
    """Errors of the loss and of all gradients against those of the joined batch."""
    torch._dynamo.reset()
    mesh = dist.init_device_mesh(
        "cpu",
        (dist.get_world_size() // ranks_per_group, ranks_per_group),
        mesh_dim_names=("data", "sequence"),
    )
    torch.manual_seed(0)
    model = MODELS[name]().double()
    weights, (ids, labels) = list(model.parameters()), batch_of(4, 13)
    want = model(ids, labels)
    grads = torch.autograd.grad(want, weights, allow_unused=True)
    options = {"plan": "megatron_cz", "inner": "eager", "mesh": mesh}
    compiled = torch.compile(model, backend="paradyse", options=options)
    mine = slice(2 * mesh.get_local_rank("data"), 2 * mesh.get_local_rank("data") + 2)
    loss = compiled(ids[mine], labels[mine])
    loss.backward()
    pairs = [(loss.detach(), want.detach())]
    pairs += [(w.grad, g) for w, g in zip(weights, grads, strict=True) if g is not None]
    return [((x - y).norm() / y.norm().clamp(min=1e-12)).item() for x, y in pairs]


@pytest.mark.parametrize(
    ("name", "nproc", "ranks_per_group"),
    [
        ("ShortConv", 2, 1),
        pytest.param("Scan", 4, 2, marks=pytest.mark.slow),
        pytest.param("Fourier", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_replicas_have_the_gradients_of_the_joined_batch(
    name: str, nproc: int, ranks_per_group: int, ranks: Any
) -> None:
    for errors in ranks(nproc).run(train_replicas, name, ranks_per_group, timeout_s=200):
        assert max(errors) < TOLERANCE[torch.float64]
