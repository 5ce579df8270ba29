"""Transformers over time and space in turn, for tests: attention over one dim of their tokens, then
over the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, CHANNELS, CLASSES = 16, 2, 3, 5


class SpaceTime(nn.Module):
    """Cells [B, T, S, C] and a label for each, [B, T, S], to a loss.

    Args:
        causal: attention over time sees no later time.
        positions: a table of places is added, with a row for each.
        dropout: of what blocks add to the stream.
        attention_dropout: of what attention weighs values with.
    """

    def __init__(
        self,
        layers: int = 2,
        causal: bool = False,
        places: int = 0,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.causal, self.dropout, self.attention_dropout = causal, dropout, attention_dropout
        self.into = nn.Linear(CHANNELS, WIDTH)
        self.places = nn.Parameter(torch.randn(places, WIDTH)) if places else None
        self.layers = nn.ModuleList(
            nn.ModuleDict({"time": _attention(), "space": _attention(), "mlp": _mlp()})
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.into(x)
        if self.places is not None:
            x = x + self.places
        for layer in self.layers:
            x = x + self.attend(layer["time"], x.transpose(1, 2), self.causal).transpose(1, 2)
            x = x + self.attend(layer["space"], x, False)
            mlp = layer["mlp"]
            x = x + mlp["down"](F.gelu(mlp["up"](mlp["norm"](x))))
        return F.cross_entropy(self.head(x).flatten(0, 2), labels.flatten())

    def attend(self, parts: nn.ModuleDict, x: Tensor, causal: bool) -> Tensor:
        """Attention over dim 2 of ``x`` [B, O, N, D]."""
        b, o, n, d = x.shape
        qkv = parts["qkv"](parts["norm"](x)).reshape(b * o, n, 3, HEADS, d // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = self.attention(q, k, v, causal)
        y = parts["proj"](y.transpose(1, 2).reshape(b, o, n, d))
        return F.dropout(y, self.dropout) if self.dropout else y

    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Of heads [N, H, tokens, D]."""
        p = self.attention_dropout
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=causal)


def _attention() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "norm": nn.LayerNorm(WIDTH),
            "qkv": nn.Linear(WIDTH, 3 * WIDTH),
            "proj": nn.Linear(WIDTH, WIDTH),
        }
    )


def _mlp() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "norm": nn.LayerNorm(WIDTH),
            "up": nn.Linear(WIDTH, 24),
            "down": nn.Linear(24, WIDTH),
        }
    )


def cells(batch: int, time: int, space: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A batch of so many, of these lengths, and its labels; float64."""
    g = torch.Generator().manual_seed(seed + 100 * time + space)
    x = torch.randn(batch, time, space, CHANNELS, generator=g, dtype=torch.float64)
    labels = torch.randint(CLASSES, (batch, time, space), generator=g)
    labels[0, -1, 0] = -100
    return x, labels


def whole(x: Any) -> torch.Tensor:
    """A gradient, or all rows of a sharded one."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def errors(
    model: Any, got: torch.Tensor, reference: Any, want: torch.Tensor
) -> list[tuple[float, str]]:
    """Of the loss and of each gradient; of keys' biases, whose gradient is 0, against all."""
    scale = sum(p.grad.norm() ** 2 for p in reference.parameters()) ** 0.5
    loss = want.detach()
    found = [(float((got.detach() - loss).abs() / loss.abs()), "loss")]
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        of = scale if name.endswith("bias") else q.grad.norm()
        found.append((float((whole(p.grad) - q.grad).norm() / of), name))
    return found


def make_timesformer(frames: int, dropout: float = 0.0) -> Any:
    """For videos of 12 x 12 pixels, in float64; redrawn, so that no gradient is too small."""
    import transformers

    config = transformers.TimesformerConfig(
        image_size=12,
        patch_size=4,
        num_frames=frames,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=4,
    )
    model = transformers.TimesformerForVideoClassification(config).double().train()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def videos(batch: int, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    """So many of 12 x 12 pixels, and a label of each; float64."""
    g = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, frames, 3, 12, 12, generator=g, dtype=torch.float64)
    return x, torch.arange(batch)


def make_latte(frames: int) -> Any:
    """Latte as diffusers has it, in float64; redrawn, so that no gradient is too small."""
    from diffusers import LatteTransformer3DModel

    model = LatteTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        cross_attention_dim=16,
        sample_size=8,
        patch_size=2,
        caption_channels=12,
        video_length=frames,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=10,
    )
    model = model.double().train()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def noised(batch: int, frames: int) -> dict[str, Any]:
    """Videos of 8 x 8 pixels, a step of diffusion and a text of seven tokens for each."""
    g = torch.Generator().manual_seed(batch)
    return {
        "hidden_states": torch.randn(batch, 3, frames, 8, 8, generator=g, dtype=torch.float64),
        "timestep": torch.randint(0, 10, (batch,), generator=g),
        "encoder_hidden_states": torch.randn(batch, 7, 12, generator=g, dtype=torch.float64),
    }


class Axial(nn.Module):
    """Attention over rows, then over columns, by the package axial-attention, and an MLP; cells
    [B, R, C, 3] and their labels [B, R, C] to a loss."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        from axial_attention import AxialAttention

        self.into = nn.Linear(CHANNELS, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(WIDTH),
                    AxialAttention(WIDTH, 2, HEADS, dim_index=-1, sum_axial_out=False),
                    _mlp(),
                ]
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.into(x)
        for norm, attention, mlp in self.layers:
            x = x + attention(norm(x))
            x = x + mlp["down"](F.gelu(mlp["up"](mlp["norm"](x))))
        return F.cross_entropy(self.head(x).flatten(0, 2), labels.flatten())


def make_joint(kind: str, frames: int) -> Any:
    """A VideoMAE or a ViViT, whose attention is over time and space at once, in float64."""
    import transformers

    config, model = {
        "videomae": (
            transformers.VideoMAEConfig,
            transformers.VideoMAEForVideoClassification,
        ),
        "vivit": (transformers.VivitConfig, transformers.VivitForVideoClassification),
    }[kind]
    sizes: dict[str, Any] = {"image_size": 12, "num_frames": frames, "hidden_size": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 4}
    if kind == "videomae":
        sizes |= {"patch_size": 4, "tubelet_size": 2}
    else:
        sizes |= {"tubelet_size": [2, 4, 4]}
    made = model(config(**sizes)).double().train()
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return made
