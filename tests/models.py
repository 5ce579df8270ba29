"""Small HuggingFace models of every family, batches for them, and the comparison with eager.

Weights are drawn anew: as HuggingFace initializes them attention is almost uniform, biases are zero
and norms are one, so that a bias added once per rank or a mask that is off by one hardly shows.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

VOCAB = 96
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Largest relative norm of a difference: sums are taken in another order, at most a few thousand
terms deep. Measured are 1e-6 and 1e-15; a wrong mask, position or term gives above 1e-3."""
NOTHING = {torch.float32: 1e-6, torch.float64: 1e-14}
"""A gradient below this share of the whole gradient's norm is rounding of a mathematical zero (a
key bias, which softmax ignores; queries that see one key): held against the whole's norm."""

_BASE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2}
_MHA = _BASE | {"num_attention_heads": 4, "intermediate_size": 88}
_GQA = _MHA | {"num_key_value_heads": 2}


@dataclass(frozen=True)
class Family:
    """How to make a model, and what is known of it."""

    cls: str
    config: Mapping[str, Any]
    packs: bool = True
    """Finds packed documents in ``position_ids``."""
    causal: bool = True
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Strategy that cannot compute the attention -> what the reason says."""
    kinds: tuple[str, ...] = ("attention", "mlp")
    """Kinds of blocks in a layer."""


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _GQA),
    # 6 heads, 3 KV heads, 50 columns: no p of 2 or 4 divides all of them
    "llama_odd": Family(
        "LlamaForCausalLM",
        _BASE
        | {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
        | {"intermediate_size": 50, "attention_bias": True, "mlp_bias": True},
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 88}
        | {"n_positions": 128}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "neox": Family("GPTNeoXForCausalLM", _MHA),
    "bert": Family(
        "BertForMaskedLM",
        _MHA | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        packs=False,
        causal=False,
    ),
    "qwen3": Family("Qwen3ForCausalLM", _GQA | {"head_dim": 16}),
    "mistral": Family("MistralForCausalLM", _GQA | {"sliding_window": 6}),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        _GQA
        | {"head_dim": 16, "sliding_window": 5}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _GQA,
        refuses=dict.fromkeys(("megatron_ts", "metp"), "q_norm mixes all heads"),
    ),
    "phi3": Family("Phi3ForCausalLM", _GQA | {"pad_token_id": 0}),
    "opt": Family(
        "OPTForCausalLM",
        _BASE
        | {"num_attention_heads": 4, "ffn_dim": 88, "word_embed_proj_dim": 64, "dropout": 0.0},
        packs=False,
    ),
    "falcon": Family("FalconForCausalLM", _BASE | {"num_attention_heads": 4}, packs=False),
    "mixtral": Family(
        "MixtralForCausalLM", _GQA | {"num_local_experts": 4}, kinds=("attention", "experts")
    ),
}


DRAWS_AT_LAYERS = "this transformers draws at each layer whether it is dropped: graphs end there"


def draws_at_layers() -> bool:
    """Whether OPT and its like draw a number at each layer even if none is ever dropped, as in
    transformers 5.17: Dynamo breaks the graph ahead of layers, which get a mask as it lies."""
    from transformers.models.opt.modeling_opt import OPTDecoder

    return "self.layerdrop > 0" not in inspect.getsource(OPTDecoder.forward)


def make_model(
    family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any
) -> Any:
    """The family's model, the same on every rank. It keeps no KV cache unless asked to."""
    import transformers

    spec = FAMILIES[family]
    cls = getattr(transformers, spec.cls)
    defaults: dict[str, Any] = {"use_cache": False} if spec.causal else {}
    torch.manual_seed(seed)
    model = cls(cls.config_class(**{**spec.config, **defaults, **config}))
    return redraw(model, seed).to(dtype)


def redraw(model: Any, seed: int = 0) -> Any:
    """``model`` with weights that make every part of it matter."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=g)
            if p.ndim > 1:
                p.copy_(noise * 0.12)
            elif "norm" in name.lower() or "ln_" in name:
                p.add_(noise * 0.1)
            else:
                p.copy_(noise * 0.1)
    return model


def make_batch(how: str, batch: int, seq_len: int, seed: int = 0) -> dict[str, Tensor]:
    """Keyword arguments of one call, labels included; the same on every rank.

    Args:
        how: "plain", "left" or "right" (padding, a different length each row), or "packed" (several
            documents a row, told by position_ids).
    """
    g = torch.Generator().manual_seed(1000 * seq_len + 10 * batch + seed)
    ids = torch.randint(3, VOCAB, (batch, seq_len), generator=g)
    labels = torch.where(torch.rand(batch, seq_len, generator=g) < 0.2, -100, ids)
    labels[:, -1] = ids[:, -1]  # at least one label a row
    made = {"input_ids": ids, "labels": labels}
    if how in ("left", "right"):
        pad = torch.randint(0, max(seq_len - 2, 1), (batch,), generator=g)
        pad[0] = min(2, seq_len - 1)
        index = torch.arange(seq_len)
        index = index if how == "left" else seq_len - 1 - index
        real = index >= pad[:, None]
        labels[~real] = -100
        if how == "right":
            labels.masked_scatter_((index == pad[:, None]), ids[(index == pad[:, None])])
        made["attention_mask"] = real.long()
    elif how == "packed":
        index = torch.arange(seq_len).expand(batch, seq_len)
        cuts = torch.rand(batch, seq_len, generator=g) < 0.25
        cuts[:, seq_len // 2] = True
        made["position_ids"] = index - torch.where(cuts, index, 0).cummax(-1).values
    else:
        assert how == "plain", how
    return made


@dataclass(frozen=True)
class Step:
    """What one training step gives."""

    loss: float
    grads: Mapping[str, Tensor]
    logits: Tensor | None = None
    loss_dtype: torch.dtype = torch.float64


def in_bfloat16(call: Any) -> Any:
    """``call`` under autocast."""

    def run(**kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(**kwargs)

    return run


def run_step(
    call: Any,
    model: Any,
    batch: Mapping[str, Any],
    loss_of: Callable[[Any], Tensor] = lambda out: out.loss,
    logits: bool = False,
) -> Step:
    """One forward and backward of ``call``, which runs ``model``'s parameters."""
    model.zero_grad(set_to_none=True)
    with warnings.catch_warnings():
        # At graph breaks Dynamo reads .grad of what is handed on, and fails if warnings are errors.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a")
        out = call(**batch)
    loss = loss_of(out)
    loss.backward()
    grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    kept = out.logits.detach().clone() if logits else None
    return Step(loss.item(), grads, kept, loss.dtype)


def whole(x: Tensor) -> Tensor:
    """A copy; of a sharded tensor all rows, so every rank must ask."""
    x = x.detach()
    gather = getattr(x, "full_tensor", None)
    return gather() if gather is not None else x.clone()


def relative(got: Tensor, want: Tensor, scale: float | None = None) -> float:
    """|got - want| / |want|, norms in float64; infinite where the shapes or NaNs differ."""
    if got.shape != want.shape or not got.isfinite().all():
        return math.inf
    norm = want.double().norm().item() if scale is None else scale
    return (got.double() - want.double()).norm().item() / max(norm, 1e-300)


def norm_of(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


def exact_dtype(family: str) -> torch.dtype:
    """The widest dtype that ``family`` computes in: some round to float32 whatever they are given,
    so that a float64 model of them is no more exact."""
    return torch.float32 if family in ("gemma3", "mixtral") else torch.float64


def errors(got: Step, want: Step) -> dict[str, float]:
    """What was compared -> its relative error: "loss", "logits", and every parameter's gradient.

    Of the loss it is what goes beyond its last two bits: HuggingFace sums losses in float32, also
    of a float64 model.
    """
    if got.grads.keys() != want.grads.keys():
        return {
            f"gradient of {n} (one side only)": math.inf
            for n in got.grads.keys() ^ want.grads.keys()
        }
    off = relative(*(torch.tensor(s.loss, dtype=torch.float64) for s in (got, want)))
    found = {"loss": max(0.0, off - 2 * torch.finfo(want.loss_dtype).eps)}
    if got.logits is not None and want.logits is not None:
        found["logits"] = relative(got.logits, want.logits)
    whole = norm_of(list(want.grads.values()))
    for name, grad in want.grads.items():
        own = norm_of([grad])
        scale = own if own > NOTHING[grad.dtype] * whole else whole
        found[f"gradient of {name}"] = relative(got.grads[name], grad, scale)
    return found


def worst(got: Step, want: Step) -> tuple[float, str]:
    """The largest error and what it is of."""
    found = errors(got, want)
    name = max(found, key=lambda n: found[n])
    return found[name], name


def check(got: Step, want: Step, dtype: torch.dtype = torch.float32, what: str = "") -> None:
    """Raises AssertionError with everything that is further off than the tolerance."""
    wrong = {n: e for n, e in errors(got, want).items() if not e <= TOLERANCE[dtype]}
    assert not wrong, f"{what}: " + ", ".join(f"{n} {e:.1e}" for n, e in wrong.items())
