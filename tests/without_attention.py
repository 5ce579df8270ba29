"""Small models whose tokens are mixed by something else than attention that is understood."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, HIDDEN, HEADS, WIDTH, CHUNK = 50, 20, 5, 4, 4


class Mixing(nn.Module):
    """Token ids [B, S] to a loss; each layer has ``mix``, and an MLP."""

    columns = HIDDEN
    """Of the projection that ``mix`` takes."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(HIDDEN),
                    "into": nn.Linear(HIDDEN, self.columns),
                    "conv": nn.Conv1d(HIDDEN, HIDDEN, 3, padding=2, groups=HIDDEN),
                    "decay": nn.Linear(HEADS, 1),
                    "out": nn.Linear(HIDDEN, HIDDEN),
                    "norm2": nn.LayerNorm(HIDDEN),
                    "up": nn.Linear(HIDDEN, 2 * HIDDEN),
                    "down": nn.Linear(2 * HIDDEN, HIDDEN),
                }
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(HIDDEN, VOCAB)

    def mix(self, layer: Any, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer["out"](self.mix(layer, layer["into"](layer["norm"](x))))
            x = x + layer["down"](F.gelu(layer["up"](layer["norm2"](x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def causal_conv(layer: Any, x: Tensor) -> Tensor:
    """Of ``x`` [B, S, C], each channel by itself; 0 stands before the first token."""
    return layer["conv"](x.transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2)


class ShortConv(Mixing):
    """A gate, a causal convolution of each channel, another gate (LFM2)."""

    columns = 3 * HIDDEN

    def mix(self, layer: Any, x: Tensor) -> Tensor:
        first, second, x = x.transpose(1, 2).chunk(3, 1)
        y = layer["conv"](first * x)[:, :, : x.shape[2]]
        return (second * y).transpose(1, 2)


class Bare(ShortConv):
    """Without any MLP: nothing is a block."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer["out"](self.mix(layer, layer["into"](layer["norm"](x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Scan(Mixing):
    """A state by head that fades, in chunks: the last is filled up with zeros (Mamba-2)."""

    columns = 2 * HIDDEN + HEADS

    def mix(self, layer: Any, x: Tensor) -> Tensor:
        gate, x, step = x.split([HIDDEN, HIDDEN, HEADS], -1)
        x = F.silu(causal_conv(layer, x)).unflatten(-1, (HEADS, WIDTH))
        b, s = x.shape[:2]
        more = -s % CHUNK
        fade = F.pad(-F.softplus(step + layer["decay"].weight[0]), (0, 0, 0, more))
        y = F.pad(x, (0, 0, 0, 0, 0, more)).reshape(b, -1, CHUNK, HEADS, WIDTH)
        fade = fade.reshape(b, -1, CHUNK, HEADS).cumsum(2)
        seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).tril()
        pairs = (fade[:, :, :, None] - fade[:, :, None]).masked_fill(~seen[..., None], -torch.inf)
        own = torch.einsum("bcijh,bcjhd->bcihd", pairs.exp(), y)
        left = fade[:, :, -1:] - fade
        sums = torch.einsum("bcjh,bcjhd->bchd", left.exp(), y)
        state, before = torch.zeros_like(sums[:, 0]), []
        for i in range(sums.shape[1]):
            before.append(state)
            state = state * fade[:, i, -1, :, None].exp() + sums[:, i]
        y = own + fade.exp()[..., None] * torch.stack(before, 1)[:, :, None]
        y = y.reshape(b, -1, HEADS, WIDTH)[:, :s]
        return (y + x * layer["decay"].weight[0, :, None]).flatten(2) * F.silu(gate)


class Fourier(Mixing):
    """The real part of a transform over tokens and columns (FNet)."""

    def mix(self, layer: Any, x: Tensor) -> Tensor:
        return torch.fft.fftn(x, dim=(1, 2)).real / 5


class Scored(Mixing):
    """Scores that are weighed by another product of hidden states, by head."""

    columns = 3 * HIDDEN

    def mix(self, layer: Any, x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(2, 3)) * torch.sigmoid(q @ v.transpose(2, 3))
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


MODELS = {cls.__name__: cls for cls in (ShortConv, Bare, Scan, Fourier, Scored)}


def batch_of(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Ids and labels [B, S], of which some are ignored."""
    generator = torch.Generator().manual_seed(100 * length + batch)
    ids = torch.randint(VOCAB, (batch, length), generator=generator)
    return ids, torch.where(ids % 7 == 0, -100, ids)
