"""Weights that autograd has one gradient for: each has memory of its own for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from harness import RankPool
from models import relative
from own_models import WIDTH, Decoder, ids_of
from torch import Tensor, nn
from torch.nn import functional as F

import paradyse
from paradyse.weights.sharded_tensor import ShardedTensor


class ScaledTwice(Decoder):
    """One layer whose MLP is scaled by the sum of two vectors, and its tokens by that of two
    tables."""

    def __init__(self) -> None:
        super().__init__(num_layers=1)
        self.a, self.b = (nn.Parameter(torch.randn(4 * WIDTH)) for _ in range(2))
        self.c, self.d = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.is_turned = True

    def layers_of(self, x: Tensor, layers: Iterable[Any] | None = None) -> Tensor:
        (layer,) = self.layers
        y = layer["norm"](x)
        q, k, v = (z.unflatten(-1, (4, -1)).transpose(1, 2) for z in layer["qkv"](y).chunk(3, -1))
        x = x + layer["out"](self.attend(layer, y, q, k, v).transpose(1, 2).flatten(2))
        x = x + layer["down"](F.gelu(layer["up"](x)) * (self.a + self.b))
        return F.linear(x, self.c + self.d) if self.is_turned else x


def off_by(sharded: bool, plan: str, later: bool, once: bool = False) -> float:
    """How far gradients of two backwards and clipping are from those of one process, where the
    first does not read the tables if ``once``."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = ScaledTwice().double()
    model = ScaledTwice().double()
    model.load_state_dict(reference.state_dict())
    if sharded:
        paradyse.shard(model)
    options = {"plan": plan, "inner": "eager"}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    for run, of in ((reference, reference), (compiled, model)):
        for i, seq_len in enumerate((8, 13)):
            of.is_turned = not once or bool(i)
            with paradyse.no_sync(model) if later and not i else contextlib.nullcontext():
                run(ids_of(seq_len)).backward()
        torch.nn.utils.clip_grad_norm_(of.parameters(), 0.1)
        for p in of.parameters():
            if p.grad is not None:
                p.grad.mul_(2)
    want = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert want.keys() == grads.keys()
    whole = {n: g.full_tensor() if isinstance(g, ShardedTensor) else g for n, g in grads.items()}
    return max(relative(whole[n], g) for n, g in want.items())


@pytest.mark.parametrize(
    ("sharded", "plan", "later", "once"),
    [
        (True, "megatron_ts", False, False),
        (False, "replicated", True, False),
        (False, "replicated", True, True),
        (True, "megatron_ts", True, False),
    ],
    ids=["rows", "kept back", "kept back once", "rows kept back"],
)
def test_each_weight_has_a_gradient_of_its_own(
    sharded: bool, plan: str, later: bool, once: bool, pool2: RankPool
) -> None:
    assert max(pool2.run(off_by, sharded, plan, later, once, timeout_s=100)) < 1e-9
