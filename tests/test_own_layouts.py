"""Small models as people write them that read memory as it lies, or write values with their dims in
another order: each as without the backend, on one rank and on two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness import RankPool
from own_models import HEADS, Decoder, check_on_ranks, compared, in_tiers
from torch import Tensor
from torch.nn import functional as F


class OverlappingFrames(Decoder):
    """Frames of three tokens as they lie in memory, of values that are laid out anew."""

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.layers_of(self.embed(ids))
        y = x.transpose(1, 2).contiguous()
        b, h, s = y.shape
        frames = y.as_strided((b, h, s - 2, 3), (h * s, s, 1, 1))
        return x + frames.mean((2, 3))[:, None]


class FramesOfAnInput(Decoder):
    """The same of token ids that lie with the batch last."""

    def hidden(self, ids: Tensor) -> Tensor:
        b, s = ids.shape
        pairs = ids.t().contiguous().as_strided((s - 1, b), (b, 1))
        return self.layers_of(self.embed(ids)) + self.embed(pairs).mean((0, 1))


class HalvesAsComplex(Decoder):
    """Rotary angles by complex numbers, of which queries hold all real parts first."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], dtype=x.dtype)
        turn = torch.polar(torch.ones_like(places), places)[:, None]

        def turned(z: Tensor) -> Tensor:
            halves = z.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous()
            return torch.view_as_real(torch.view_as_complex(halves) * turn).flatten(-2)

        return F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)


class TokensFirst(Decoder):
    """Attention of one sequence as Megatron has it: tokens lie before batch and heads."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (b, heads, s, d), angles = q.shape, torch.arange(q.shape[2], dtype=q.dtype).cos()
        first = (z.permute(2, 0, 1, 3) * angles[:, None, None, None] for z in (q, k, v))
        q, k, v = (z.reshape(s, b * heads, d).transpose(0, 1) for z in first)
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) / d**0.5, -1)
        return torch.bmm(weights, v).view(b, heads, s, d)


class OneOfTokensFirst(TokensFirst):
    """The same of the first sequence alone."""

    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids[:1])


class BiasOfSequences(Decoder):
    """Each sequence has its own bias, which heads share; as many sequences as heads."""

    def forward(self, ids: Tensor) -> Any:
        ids = torch.cat([ids, ids.flip(0).roll(1, 1)])
        assert len(ids) == HEADS
        self.places = (ids % 3).cumsum(1)
        return super().forward(ids)

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        bias = -0.1 * (self.places[:, :, None] - self.places[:, None]).abs().to(x.dtype)
        causal = torch.where(at[None] <= at[:, None], 0.0, float("-inf")).to(x.dtype)
        mask = (bias + causal)[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class ViewsInPlace(Decoder):
    """Dims are added and taken away in place."""

    def hidden(self, ids: Tensor) -> Tensor:
        self.seen = ids.ne(0)
        self.seen.unsqueeze_(1)
        x = self.layers_of(self.embed(ids))
        means = x.mean(-1)
        means.unsqueeze_(-1)
        again = means.squeeze_(-1).unsqueeze_(-1)
        again.add_(1)
        return x * means

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = self.seen[:, None] | torch.eye(x.shape[1], dtype=torch.bool)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


MODELS = {
    make.__name__: make
    for make in (
        OverlappingFrames,
        FramesOfAnInput,
        HalvesAsComplex,
        TokensFirst,
        OneOfTokensFirst,
        BiasOfSequences,
        ViewsInPlace,
    )
}


QUICK = ("OverlappingFrames", "OneOfTokensFirst", "ViewsInPlace")


def compare(name: str, strategies: Sequence[str]) -> list[str]:
    return compared(MODELS[name], (8, 13), strategies)


@pytest.mark.parametrize("name", in_tiers(MODELS, QUICK))
def test_models_are_as_without_the_backend(name: str, pool1: RankPool, pool2: RankPool) -> None:
    check_on_ranks(compare, name, pool1, pool2)
