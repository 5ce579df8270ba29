"""Small encoder-decoder models, and batches for them whose two sequences have lengths of their
own."""

from __future__ import annotations

from typing import Any

import torch
from models import VOCAB, redraw
from torch import Tensor

_WIDTHS = {"d_model": 32, "vocab_size": VOCAB}
_BART = {f"{s}_{k}": n for s in ("encoder", "decoder") for k, n in
         {"layers": 2, "attention_heads": 4, "ffn_dim": 40}.items()}  # fmt: skip
_OFF = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
_T5 = {"d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
FRAMES = 26
"""Of the spectrogram that Whisper sees: half as many tokens."""

CONFIGS: dict[str, dict[str, Any]] = {
    "T5": _WIDTHS | _T5 | {"decoder_start_token_id": 0, "relative_attention_num_buckets": 8},
    "Bart": _WIDTHS | _BART | _OFF | {"max_position_embeddings": 64},
    "Whisper": _WIDTHS
    | _BART
    | _OFF
    | {"num_mel_bins": 8, "max_source_positions": FRAMES // 2, "max_target_positions": 64}
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}


def make(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of ``family``, equal on all ranks."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**CONFIGS[family], use_cache=False)
    cls = getattr(transformers, f"{family}ForConditionalGeneration")
    torch.manual_seed(0)
    return redraw(cls(config).eval()).to(dtype)


def batch_of(
    family: str, source: int, target: int, how: str = "plain", dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Two pairs of sequences of these lengths; ``how`` "padded": the second source is shorter."""
    g = torch.Generator().manual_seed(source * 64 + target)
    labels = torch.randint(3, VOCAB, (2, target), generator=g)
    labels[0, -1] = -100
    if family == "Whisper":
        features = torch.randn(2, 8, FRAMES, generator=g, dtype=dtype)
        return {"input_features": features, "labels": labels}
    made = {"input_ids": torch.randint(3, VOCAB, (2, source), generator=g), "labels": labels}
    if how == "padded":
        made["attention_mask"] = torch.ones(2, source, dtype=torch.int64)
        made["attention_mask"][1, source - max(1, source // 3) :] = 0
    return made
