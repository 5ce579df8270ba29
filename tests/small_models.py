"""Small models of any transformers class, with random weights, and training batches for them.

A configuration is shrunk by the names of its fields (``SMALL``), the configurations inside it too;
what a family needs besides stands in its row of ``family_table.py``. A batch follows from what the
model takes (``BATCHES``).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from models import redraw
from torch import Tensor

VOCAB = 96
NUM_WORDS = 72
"""Token ids that batches draw from; those above are for special tokens."""
NUM_LAYERS = 2

_SIZES = (
    (VOCAB, "vocab_size text_vocab_size"),
    (
        NUM_LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth "
        "num_decoder_layers num_encoder_layers",
    ),
    (
        32,
        "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size word_embed_proj_dim "
        "projection_dim out_hidden_size hidden_size_per_layer_input image_size",
    ),
    (
        40,
        "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner hidden_dim "
        "ffn_hidden_size intermediate_size_mlp",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads attention_heads "
        "decoder_attention_heads num_experts n_routed_experts num_local_experts moe_num_experts",
    ),
    (2, "num_key_value_heads num_kv_heads n_head_kv linear_num_value_heads linear_num_key_heads"),
    (2, "num_experts_per_tok moe_k moe_topk num_experts_per_token"),
    (
        8,
        "head_dim d_kv kv_channels qk_nope_head_dim qk_rope_head_dim v_head_dim state_size "
        "mamba_d_state ssm_state_size time_step_rank linear_key_head_dim linear_value_head_dim "
        "patch_size num_mel_bins relative_attention_num_buckets",
    ),
    (
        16,
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "moe_shared_expert_intermediate_size prefix_dense_intermediate_size q_lora_rank "
        "kv_lora_rank",
    ),
    (
        128,
        "max_position_embeddings n_positions max_seq_len n_ctx max_source_positions "
        "max_target_positions max_sequence_length",
    ),
    (6, "sliding_window attention_window local_attention attention_chunk_size"),
    (3, "num_labels"),
    (1, "n_group topk_group first_k_dense_replace"),
)
SMALL: Mapping[str, int] = {name: n for n, names in _SIZES for name in names.split()}
"""Field of a configuration -> the most that it may be. A field that is None by default stays so."""

OFF: Mapping[str, Any] = {
    "use_cache": False,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
}
"""What would be random, or would make outputs that training does not read; dropouts as well."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A family of the table."""

    cls: str
    """Name of a class of transformers."""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields beside what ``SMALL`` makes of them; a dict for a configuration inside it."""
    batch: str = ""
    """Key of ``BATCHES``; by default what the name of the class says."""
    lengths: tuple[int, ...] = (13, 22, 31)
    """Of three calls: tokens, or images where these are all of one size."""


def config_fields(cls: Any) -> dict[str, Any]:
    """Fields of a configuration class with their defaults."""
    return {f.name: f.default for f in dataclasses.fields(cls)}


def shrink(cls: Any, given: Mapping[str, Any], spec: Mapping[str, Any] | None = None) -> Any:
    """Arguments for the configuration class ``cls`` that make it small.

    Args:
        cls: of transformers.
        given: what is to be as it stands there.
        spec: defaults that the configuration around it gives, in place of the class's own.
    """
    defaults = {**config_fields(cls), **(spec or {})}
    made: dict[str, Any] = {}
    special = VOCAB
    for name, default in defaults.items():
        if isinstance(default, bool):
            if name in OFF:
                made[name] = OFF[name]
        elif name in OFF or ("drop" in name and isinstance(default, int | float)):
            made[name] = OFF.get(name, type(default)(0))
        elif name in SMALL and isinstance(default, int):
            made[name] = min(default, SMALL[name])
        elif name.endswith(("_token_id", "_token_index")) and isinstance(default, int):
            if default >= NUM_WORDS:
                special -= 1
                made[name] = special
        elif name in (spec or {}):
            made[name] = default
    for name, sub in getattr(cls, "sub_configs", {}).items():
        inner_cls, inner_spec = _sub_config(sub, given.get(name))
        if inner_cls is not None:
            small = shrink(inner_cls, given.get(name) or {}, inner_spec)
            made[name] = {**small, "model_type": inner_cls.model_type}
    inner = getattr(cls, "sub_configs", {})
    return {**made, **{k: v for k, v in given.items() if k not in inner}}


def _sub_config(sub: Any, given: Any) -> tuple[Any, Mapping[str, Any]]:
    """Class and defaults of a configuration inside another; None where there is none by default."""
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    if isinstance(sub, type) and issubclass(sub, PreTrainedConfig):
        return sub, {}
    model_type = (given or {}).get("model_type") or getattr(sub, "model_type", None)
    optional = getattr(sub, "optional", False)
    if given is None and optional:
        return None, {}
    cls = getattr(sub, "config_class", sub)
    if cls is AutoConfig:
        if model_type is None:
            return None, {}
        cls = CONFIG_MAPPING[model_type]
    return cls, dict(getattr(sub, "init_kwargs", None) or {})


def make(row: Row, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """The small model of ``row`` in training mode, the same on every rank."""
    import transformers

    cls = getattr(transformers, row.cls)
    torch.manual_seed(seed)
    config = cls.config_class(**shrink(cls.config_class, row.config))
    if not hasattr(config, "decoder_start_token_id"):  # what tokenizers or checkpoints bring
        config.decoder_start_token_id = 0
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    model = cls(config)
    return redraw(model, seed).to(dtype).train()


def num_layers(model: Any) -> int:
    """Layers of all stacks of ``model``: modules of a list that have an attention or an MLP."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    inside = {id(x) for outer in lists for m in outer for x in m.modules() if x is not m}
    return sum(
        sum(any(True for _ in m.parameters()) for m in found)
        for found in lists
        if id(found) not in inside and len({type(m) for m in found}) == 1
    )


Batch = dict[str, Any]
Maker = Callable[[Any, int, torch.Generator], Batch]
"""(the model, a length, random numbers) -> keyword arguments of one call, without labels."""
NUM_SEQUENCES = 3


def _ids(n: int, g: torch.Generator, *lead: int) -> Tensor:
    return torch.randint(3, NUM_WORDS, (*lead, n), generator=g)


def _classes(batch: int, g: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (batch,), generator=g)


def tokens(model: Any, n: int, g: torch.Generator) -> Batch:
    """Token ids [3, n], a label for each."""
    ids = _ids(n, g, NUM_SEQUENCES)
    return {"input_ids": ids, "labels": ids}


def classified(model: Any, n: int, g: torch.Generator) -> Batch:
    """Token ids [3, n], a class for each row."""
    return {"input_ids": _ids(n, g, NUM_SEQUENCES), "labels": _classes(NUM_SEQUENCES, g)}


def choices(model: Any, n: int, g: torch.Generator) -> Batch:
    """Token ids [3, 2, n], two choices for each of three questions."""
    return {"input_ids": _ids(n, g, NUM_SEQUENCES, 2), "labels": _classes(NUM_SEQUENCES, g)}


def translation(model: Any, n: int, g: torch.Generator) -> Batch:
    """Token ids [3, n] and labels of another length."""
    return {"input_ids": _ids(n, g, NUM_SEQUENCES), "labels": _ids(n // 2 + 3, g, NUM_SEQUENCES)}


def images(model: Any, n: int, g: torch.Generator) -> Batch:
    """n // 4 images, a class for each."""
    return {"pixel_values": _pixels(model, n // 4, g), "labels": _classes(n // 4, g)}


def _pixels(model: Any, n: int, g: torch.Generator) -> Tensor:
    config = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", 32)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.randn(n, getattr(config, "num_channels", 3), height, width, generator=g)


def masked_images(model: Any, n: int, g: torch.Generator) -> Batch:
    """n // 4 images, of which some patches are to be found again."""
    patches = (model.config.image_size // model.config.patch_size) ** 2
    hidden = torch.rand(n // 4, patches, generator=g) < 0.5
    return {"pixel_values": _pixels(model, n // 4, g), "bool_masked_pos": hidden}


def masked_patches(model: Any, n: int, g: torch.Generator) -> Batch:
    """n // 4 images, and noise [.., patches] that says which patches a model is not to see."""
    patches = (model.config.image_size // model.config.patch_size) ** 2
    noise = torch.rand(n // 4, patches, generator=g)
    return {"pixel_values": _pixels(model, n // 4, g), "noise": noise}


def image_text(model: Any, n: int, g: torch.Generator) -> Batch:
    """Token ids [3, n + image tokens] with one image a row; types of tokens where the model takes
    them: without these PaliGemma sees all keys in eager mode, and compiled the earlier ones."""
    config = model.config
    token = getattr(config, "image_token_id", None) or config.image_token_index
    vision = config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    patches = getattr(config, "image_seq_length", patches)
    ids = torch.cat([_ids(2, g, 3), torch.full((3, patches), token), _ids(n, g, 3)], 1)
    batch = {"input_ids": ids, "pixel_values": _pixels(model, 3, g), "labels": ids}
    if "token_type_ids" in inspect.signature(model.forward).parameters:
        suffix = torch.arange(ids.shape[1]) >= patches + 2
        batch["token_type_ids"] = suffix.long().expand(3, -1).contiguous()
    return batch


def contrast(model: Any, n: int, g: torch.Generator) -> Batch:
    """Three images and three texts of n tokens, to be told apart."""
    ids = _ids(n, g, NUM_SEQUENCES)
    ids[:, -1] = NUM_WORDS + 1
    pixels = _pixels(model, NUM_SEQUENCES, g)
    return {"input_ids": ids, "pixel_values": pixels, "return_loss": True}


def waves(model: Any, n: int, g: torch.Generator) -> Batch:
    """Sound [3, samples] of n frames, a class for each."""
    sound = torch.randn(NUM_SEQUENCES, n * 320 + 80, generator=g)
    return {"input_values": sound, "labels": _classes(NUM_SEQUENCES, g)}


def transcribed_waves(model: Any, n: int, g: torch.Generator) -> Batch:
    """Sound [3, samples] of n frames, some characters for each."""
    sound = torch.randn(NUM_SEQUENCES, n * 320 + 80, generator=g)
    labels = torch.randint(3, model.config.vocab_size, (NUM_SEQUENCES, 4), generator=g)
    return {"input_values": sound, "labels": labels}


def transcribed_features(model: Any, n: int, g: torch.Generator) -> Batch:
    """Log-mel features [3, bins, 2 * positions], n tokens of text for each."""
    config = model.config
    shape = NUM_SEQUENCES, config.num_mel_bins, 2 * config.max_source_positions
    return {"input_features": torch.randn(shape, generator=g), "labels": _ids(n, g, NUM_SEQUENCES)}


def features(model: Any, n: int, g: torch.Generator) -> Batch:
    """Log-mel features [3, bins, 2 * positions], a class for each."""
    made = transcribed_features(model, n, g)
    return {**made, "labels": _classes(NUM_SEQUENCES, g)}


def spectrogram(model: Any, n: int, g: torch.Generator) -> Batch:
    """Log-mel features [3, frames, bins], a class for each."""
    shape = NUM_SEQUENCES, model.config.max_length, model.config.num_mel_bins
    return {"input_values": torch.randn(shape, generator=g), "labels": _classes(3, g)}


BATCHES: Mapping[str, Maker] = {
    fn.__name__: fn
    for fn in (
        tokens,
        classified,
        choices,
        translation,
        images,
        masked_images,
        masked_patches,
        image_text,
        contrast,
        waves,
        transcribed_waves,
        transcribed_features,
        features,
        spectrogram,
    )
}

_BY_CLASS = (
    ("MultipleChoice", "choices"),
    ("ImageClassification", "images"),
    ("MaskedImageModeling", "masked_images"),
    ("SequenceClassification", "classified"),
    ("ForCTC", "transcribed_waves"),
    ("AudioClassification", "features"),
)


def batch_of(row: Row, model: Any, n: int) -> Batch:
    """Keyword arguments of one training call of ``model``, with labels; the same on every rank."""
    kind = row.batch or next((b for text, b in _BY_CLASS if text in row.cls), "")
    if not kind:
        kind = "translation" if model.config.is_encoder_decoder else "tokens"
    made = BATCHES[kind](model, n, torch.Generator().manual_seed(n))
    known = inspect.signature(model.forward).parameters
    return {k: v for k, v in made.items() if k in known}
