"""A transformer of a few lines, for tests that need a graph and not a HuggingFace model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Tiny(nn.Module):
    """Token ids [B, S] to logits, or to a loss. ``extra`` changes the stream before the head."""

    def __init__(self, hidden: int = 32, heads: int = 4, layers: int = 2, vocab: int = 50) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(hidden),
                    "qkv": nn.Linear(hidden, 3 * hidden),
                    "proj": nn.Linear(hidden, hidden),
                    "norm2": nn.LayerNorm(hidden),
                    "up": nn.Linear(hidden, 4 * hidden),
                    "down": nn.Linear(4 * hidden, hidden),
                }
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, vocab)

    def extra(self, x: Tensor) -> Tensor:
        return x

    def scale(self, x: Tensor) -> Any:
        return None

    def forward(self, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        x = self.embed(ids)
        b, s, h = x.shape
        for layer in self.layers:
            qkv = layer["qkv"](layer["norm"](x)).view(b, s, 3, self.heads, h // self.heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            o = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale(x)
            )
            x = x + layer["proj"](o.transpose(1, 2).reshape(b, s, h))
            x = x + layer["down"](F.gelu(layer["up"](layer["norm2"](x))))
        logits = self.head(self.extra(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Mixer(Tiny):
    """Mixes tokens between the blocks and the head, by an operator without a rule."""

    def extra(self, x: Tensor) -> Tensor:
        return x + torch.fft.fft(x, dim=1).real


class LengthScaled(Tiny):
    """Scales scores by a number computed from the length, which no dim of a tensor shows."""

    def scale(self, x: Tensor) -> Any:
        return 1.0 / (8 + x.shape[1])


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50, (batch, length), generator=generator)
