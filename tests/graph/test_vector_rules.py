"""Rules of norms, statistics and products of vectors. That they are right is tested with all rules'
samples; here that what tokens have by themselves stays with their ranks, in one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankPool
from models import relative
from own_models import VOCAB, WIDTH, Decoder, ids_of, in_tiers
from torch import Tensor
from torch.nn import functional as F

from paradyse.runtime.registry import captures_of


def rotated(x: Tensor) -> Tensor:
    """By angles that are made of the length, as rotary embeddings are."""
    angles = torch.outer(torch.arange(x.shape[1]).to(x), torch.linspace(0, 1, WIDTH // 2).to(x))
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2)


def triples(x: Tensor) -> Tensor:
    y = x[..., : WIDTH // 3 * 3].unflatten(-1, (-1, 3))
    return F.pad(torch.linalg.cross(y, y.roll(1, -1)).flatten(-2), (0, WIDTH % 3))


OF_TOKENS: dict[str, Callable[[Tensor], Tensor]] = {
    "rotated": rotated,
    "normalize": lambda x: F.normalize(x, dim=-1),
    "norm": lambda x: x * x.norm(dim=-1, keepdim=True),
    "cosine": lambda x: x * F.cosine_similarity(x, x.roll(1, -1), dim=-1)[..., None],
    "standardized": lambda x: (x - x.mean(-1, True)) / torch.std_mean(x, -1, keepdim=True)[0],
    "gated": lambda x: F.glu(x.repeat(1, 1, 2), -1),
    "leaky": lambda x: F.prelu(x, torch.full((1,), 0.2).to(x)),
    "products": lambda x: x.sigmoid().cumprod(-1),
    "apart": lambda x: x * F.pairwise_distance(x, x.roll(1, -1))[..., None],
    "counted": lambda x: x + F.one_hot(torch.arange(x.shape[1]) % WIDTH, WIDTH).to(x),
    "tiled": lambda x: x.tile(2)[..., :WIDTH] * 2,
    "middle": lambda x: x - x.median(-1, keepdim=True).values,
    "crossed": triples,
    "lgamma": lambda x: torch.lgamma(x.abs() + 1),
    "buckets": lambda x: x + torch.bucketize(x.detach(), torch.tensor([0.0, 1.0]).to(x)),
    "grid": lambda x: (
        x * torch.meshgrid(torch.arange(x.shape[1]), torch.arange(WIDTH), indexing="ij")[0].to(x)
    ),
}


class Own(Decoder):
    """Has ``function`` of each token behind its layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x + self.function(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten() % VOCAB)


def trained(name: str) -> tuple[float, int, list[str]]:
    """How far gradients are off, the programs, and what runs on gathered tokens."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, off = Own(OF_TOKENS[name]).double(), 0.0
    options = {"inner": "eager", "plan": "megatron_cz"}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    for seq_len in (13, 22, 31):
        want, got = (
            torch.autograd.grad(run(ids_of(seq_len)), [model.embed.weight, model.head.weight])
            for run in (model, compiled)
        )
        off = max(off, *(relative(a, b) for a, b in zip(got, want, strict=True)))
    graphs = [g for c in captures_of(compiled) for g in c.graphs.values()]
    return off, len(graphs), [str(n) for g in graphs for n, _ in g.program.ctx.gathered]


@pytest.mark.parametrize("name", in_tiers(OF_TOKENS, ("rotated", "normalize", "gated")))
def test_tokens_stay_with_their_ranks(name: str, pool2: RankPool) -> None:
    for off, programs, gathered in pool2.run(trained, name, timeout_s=100):
        assert off < 1e-9 and programs == 2 and not gathered, (off, programs, gathered)
