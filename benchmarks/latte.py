"""A Latte of 3 billion parameters, as diffusers has it, for ``dsp_paper.py``.

Attention is over the patches of a frame, over a text, and then over frames, of which a model takes
as many as its table of positions has.
"""

from typing import Any

import torch
from diffusers import LatteTransformer3DModel

HEADS, WIDTH, LAYERS = 32, 72, 20
"""Of the model: 20 layers of space and time."""
TEXT, CAPTION = 120, 4096
"""Tokens of a text, and their width."""
CHANNELS, PATCH, SIDE = 4, 2, 64
"""Of a frame in latent space, which so has 1,024 patches."""
FRAMES = 18


def make_model(layers: int = LAYERS, side: int = SIDE) -> torch.nn.Module:
    """The model, with random weights.

    Args:
        layers: of space and time each.
        side: of a frame.
    """
    return LatteTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH,
        in_channels=CHANNELS,
        out_channels=2 * CHANNELS,
        num_layers=layers,
        cross_attention_dim=HEADS * WIDTH,
        sample_size=side,
        patch_size=PATCH,
        caption_channels=CAPTION,
        video_length=FRAMES,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        attention_bias=True,
        activation_fn="gelu-approximate",
    )


def make_batch(batch: int = 1, side: int = SIDE) -> dict[str, Any]:
    """Arguments of one call: videos [B, C, T, side, side], steps of diffusion, and texts."""
    return {
        "hidden_states": torch.zeros(batch, CHANNELS, FRAMES, side, side),
        "timestep": torch.zeros(batch, dtype=torch.int64),
        "encoder_hidden_states": torch.zeros(batch, TEXT, CAPTION),
    }
