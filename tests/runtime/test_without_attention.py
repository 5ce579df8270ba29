"""Models without attention: what is done token by token is split, and what mixes them exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import TOLERANCE
from plans import blocks_of, choose
from without_attention import MODELS, batch_of

SIZES = [(2, 13), (3, 7), (2, 22), (3, 24), (2, 9)]


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
    for size in SIZES:
        loss = model(*batch_of(*size))
        wanted.append((loss.detach(), torch.autograd.grad(loss, weights, allow_unused=True)))
    if sharded:
        paradyse.shard(model)
        weights = list(model.parameters())
    current: list[Any] = ["colossal_z"]
    options = {"plan": lambda workload: current[0], "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    off, counts = {}, []
    for size, (want, grads) in zip(SIZES, wanted, strict=True):
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


GATHERED = {
    "ShortConv": "aten.conv1d.default runs on gathered tensors in L['self'].layers.*.conv: ",
    "Scan": "aten.conv1d.default runs on gathered tensors in L['self'].layers.*.conv: ",
    "Fourier": "aten.fft_fftn.default runs on gathered tensors: ",
    "Scored": "aten.matmul.default runs on gathered tensors: ",
}


@pytest.mark.parametrize(
    ("name", "nproc", "sharded"),
    [
        ("ShortConv", 2, False),
        ("ShortConv", 3, True),
        ("Scan", 2, False),
        pytest.param("Scan", 3, True, marks=pytest.mark.slow),
        ("Fourier", 2, False),
        pytest.param("Fourier", 3, False, marks=pytest.mark.slow),
        ("Scored", 2, False),
        pytest.param("Scored", 3, False, marks=pytest.mark.slow),
    ],
)
def test_exact_at_odd_lengths(name: str, nproc: int, sharded: bool, ranks: Any) -> None:
    plans = ("megatron_cz", "megatron_ts")
    for off, kinds, counts, notes, split in ranks(nproc).run(
        train, name, plans, sharded, timeout_s=300
    ):
        assert not off
        assert kinds == ["mlp", "mlp"]
        assert any(n.startswith(GATHERED[name]) for n in notes), notes
        assert {"aten.embedding.default", "aten.linear.default"} <= split
        if name != "Scan":  # the number of chunks is no dim's size
            assert counts == [1, 2, 2, 2, 2], "one program for all lengths"
