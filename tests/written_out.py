"""Models that write their attention out, each in a way of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from models import VOCAB, redraw
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH = 64
"""Most tokens of a sequence."""

Attend = Callable[["ByHand", Tensor, Tensor, Tensor], Tensor]


class ByHand(nn.Module):
    """A causal transformer [B, S] -> logits, whose attention of q, k, v [B, S, H, D] is ``attend``,
    which gives [B, S, H, D].
    """

    def __init__(self, attend: Attend, heads: int = 6, width: int = 4, layers: int = 2) -> None:
        super().__init__()
        hidden = heads * width
        self.heads, self.attend = heads, attend
        self.embed = nn.Embedding(VOCAB, hidden)
        self.table = nn.Embedding(8, heads)
        self.sinks = nn.Parameter(torch.zeros(heads))
        self.temperature = nn.Parameter(torch.zeros(heads, 1, 1))
        self.register_buffer("tril", torch.ones(LENGTH, LENGTH).tril()[None, None])
        self.register_buffer("hidden", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))
        slopes = 2.0 ** -torch.arange(1, heads + 1)
        self.register_buffer("slopes", slopes)
        linears = {"qkv": 3 * hidden, "proj": hidden}
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {n: nn.Linear(hidden, m) for n, m in linears.items()}
                | {"norm": nn.LayerNorm(hidden)}
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        b, s, h = x.shape
        for layer in self.layers:
            qkv = layer["qkv"](layer["norm"](x)).view(b, s, 3, self.heads, h // self.heads)
            y = self.attend(self, *qkv.unbind(2))
            x = x + layer["proj"](y.reshape(b, s, h))
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def nano_gpt(at: ByHand, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A buffer of ones and zeros, minus infinity, the scale after the product."""
    s = q.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(at.tril[:, :, :s, :s] == 0, float("-inf"))
    return (F.softmax(att, dim=-1) @ v).transpose(1, 2)


def einsums(at: ByHand, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads stay where they are; a finite number at places that a bool buffer names."""
    s = q.shape[1]
    scores = torch.einsum("bihd,bjhd->bhij", q / 2.0, k)
    scores = torch.where(at.hidden[:s, :s], -1e4, scores)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).to(v.dtype), v)


def merged(at: ByHand, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Batch and heads are one dim; what is added is scaled too."""
    b, s, h, d = q.shape
    q, k, v = (x.transpose(1, 2).reshape(b * h, s, d) for x in (q, k, v))
    hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
    mask = torch.zeros(s, s, dtype=q.dtype).masked_fill(hidden, -1e9)
    scores = (torch.baddbmm(mask[None], q, k.transpose(1, 2)) / math.sqrt(d)).softmax(-1)
    return torch.bmm(scores, v).view(b, h, s, d).transpose(1, 2)


def alibi(at: ByHand, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Slopes times distances, both ways."""
    i = torch.arange(q.shape[1])
    far = (i[None] - i[:, None]).abs()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-2, -1) - at.slopes[:, None, None] * far
    return (scores.softmax(-1) @ v).transpose(1, 2)


def t5(at: ByHand, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A table that is looked up by a bucket of the distance, and a causal mask, in one value."""
    i = torch.arange(q.shape[1])
    far = -torch.min(i[None] - i[:, None], torch.zeros_like(i[None] - i[:, None]))
    large = 4 + (torch.log(far.float() / 4) / math.log(16 / 4) * 4).to(torch.long)
    large = torch.min(large, torch.full_like(large, 7))
    bucket = torch.where(far < 4, far, large)
    bias = at.table(bucket).permute([2, 0, 1]).unsqueeze(0)
    causal = torch.where(i[None] <= i[:, None], 0.0, torch.finfo(torch.float32).min)[None, None]
    bias = bias + causal.to(bias.dtype)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(3, 2)
    scores += bias
    return (scores.softmax(-1).type_as(scores) @ v).transpose(1, 2)


def sunk(at: ByHand, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A column of sinks beside the scores."""
    b, s, h, _ = q.shape
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.transpose(2, 3)) * 0.5
    scores = scores.masked_fill(at.hidden[:s, :s], torch.finfo(q.dtype).min)
    column = at.sinks.reshape(1, -1, 1, 1).expand(b, -1, s, -1)
    scores = torch.cat([scores, column], -1)
    scores = scores - scores.max(-1, keepdim=True).values
    return (scores.softmax(-1)[..., :-1] @ v).transpose(1, 2)


def tempered(at: ByHand, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A learned temperature of each head, and one of each query."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(2, 3) * at.temperature.exp() / (1 + q[..., :1] ** 2)
    scores = scores.masked_fill(at.hidden[: q.shape[2], : q.shape[2]], -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


BY_HAND: dict[str, tuple[Attend, str]] = {
    "nano_gpt": (nano_gpt, "causal"),
    "einsums": (einsums, "causal"),
    "merged": (merged, "causal"),
    "alibi": (alibi, "full, bias"),
    "t5": (t5, "causal, bias"),
    "sunk": (sunk, "causal"),
    "tempered": (tempered, "causal"),
}
"""Name -> how attention is written out, and what is understood of its mask."""

_SIZES = {"vocab_size": VOCAB, "use_cache": False}
_WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_N = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": LENGTH}
HUGGING_FACE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gpt_oss": (
        _WIDE
        | {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40, "sliding_window": 5}
        | {"num_local_experts": 2, "num_experts_per_tok": 1},
        ("causal, left 4", "causal"),
    ),
    "mpt": (
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": LENGTH},
        ("causal, bias",) * 2,
    ),
    "bloom": (
        {"hidden_size": 32, "n_head": 4, "n_layer": 2},
        ("causal, bias",) * 2,
    ),
    "gpt_neo": (
        {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "window_size": 5}
        | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": LENGTH},
        ("causal", "causal, left 4"),
    ),
    "codegen": (_N | {"rotary_dim": 4}, ("causal",) * 2),
    "xglm": (
        {"d_model": 32, "attention_heads": 4, "num_layers": 2, "ffn_dim": 40}
        | {"max_position_embeddings": LENGTH},
        ("causal",) * 2,
    ),
    "mpnet": (
        _WIDE | {"intermediate_size": 40, "max_position_embeddings": LENGTH},
        ("full, bias",) * 2,
    ),
}
"""HuggingFace's name -> its sizes, and what is understood of the mask of each layer."""


def make(name: str) -> Any:
    """A model of one of the tables, without dropout, the same on every rank."""
    if name in BY_HAND:
        return redraw(ByHand(BY_HAND[name][0]))
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    config = AutoConfig.for_model(name, **_SIZES, **HUGGING_FACE[name][0])
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    kind = AutoModelForMaskedLM if name == "mpnet" else AutoModelForCausalLM
    torch.manual_seed(0)
    return redraw(kind.from_config(config))
