"""Models by a configuration and a number of layers."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paradyse.cli import launch
from paradyse.cli.main import main
from paradyse.cli.models import checked_config, make_model, table_of_positions

SMALL = {"vocab_size": 64, "d_model": 16, "max_position_embeddings": 64, "encoder_ffn_dim": 16}
SMALL |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
BART = {"model_type": "bart", **SMALL, "encoder_layers": 2, "decoder_layers": 3}
T5 = {"model_type": "t5", "vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2}
PROPHET = {"model_type": "prophetnet", "vocab_size": 64, "hidden_size": 16, "encoder_ffn_dim": 16}
PROPHET |= {"num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2}
PROPHET |= {"num_encoder_layers": 3, "num_decoder_layers": 3, "decoder_ffn_dim": 16}


@pytest.mark.parametrize(
    ("config", "made", "depths"),
    [
        (BART, "BartForConditionalGeneration", {"encoder": 1, "decoder": 1}),
        (BART, "BartForCausalLM", {"decoder": 1}),
        (
            {**T5, "num_layers": 3, "num_decoder_layers": 2},
            "T5ForConditionalGeneration",
            {"encoder": 1, "decoder": 1},
        ),
        (PROPHET, "ProphetNetForConditionalGeneration", {"encoder": 1, "decoder": 1}),
    ],
)
def test_an_encoder_and_a_decoder_have_as_few_layers_as_asked(
    config: dict[str, Any], made: str, depths: dict[str, int]
) -> None:
    with torch.device("meta"):
        model = make_model({**config, "architectures": [made]}, layers=1)
    assert type(model).__name__ == made
    found = {
        part: len(module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and (part := name.split(".")[-2]) in depths
    }
    assert found == depths


def test_what_has_fewer_layers_keeps_them() -> None:
    with torch.device("meta"):
        model = make_model({**BART, "architectures": ["BartModel"]}, layers=3)
        assert (len(model.encoder.layers), len(model.decoder.layers)) == (2, 3)
        with pytest.raises(ValueError, match="--layers 4: it has 3; give fewer"):
            make_model(BART, layers=4)


def test_the_text_of_a_model_of_images_has_as_few_layers_as_asked() -> None:
    text = {"model_type": "gemma3_text", "vocab_size": 64, "hidden_size": 16, "head_dim": 8}
    text |= {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = {"model_type": "gemma3", "text_config": {**text, "intermediate_size": 16}}
    config["architectures"] = ["Gemma3ForConditionalGeneration"]
    with torch.device("meta"):
        model = make_model(config, layers=2)
    assert len(model.model.language_model.layers) == 2
    assert len(model.config.text_config.layer_types) == 2


def test_a_model_that_takes_no_token_ids_is_refused_before_ranks_start(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="ViTForImageClassification takes no token ids"):
        checked_config(str(tmp_path / "config.json"), None)


GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_head": 2, "n_layer": 1}
BERT = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 64}
BERT |= {"num_hidden_layers": 1, "max_position_embeddings": 64}
OPT = {"model_type": "opt", **BERT, "ffn_dim": 16, "word_embed_proj_dim": 16}
LLAMA = {"model_type": "llama", **BERT}
GPTJ = {**GPT2, "model_type": "gptj", "rotary_dim": 4, "n_positions": 64}


@pytest.mark.parametrize(
    ("config", "name", "most"),
    [
        (GPT2, "n_positions", 1024),  # by default
        ({"model_type": "bert", **BERT}, "max_position_embeddings", 64),
        ({"model_type": "roberta", **BERT}, "max_position_embeddings", 62),  # 0 and 1 are padding's
        (OPT, "max_position_embeddings", 64),  # two rows more
        ({**BART, "use_cache": False}, "max_position_embeddings", 64),
        (GPTJ, "n_positions", 64),  # a buffer
        (LLAMA, "", 0),  # its vocabulary has as many rows
        ({**T5, "num_layers": 1, "architectures": ["T5ForConditionalGeneration"]}, "", 0),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_a_table_of_positions_ends_where_the_model_fails(
    config: dict[str, Any], name: str, most: int
) -> None:
    model = make_model(config)
    assert table_of_positions(model) == (name, most)

    def call(n: int) -> None:
        ids = torch.full((1, n), 5)
        model(ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))

    call(most or 64)
    with pytest.raises((IndexError, RuntimeError)) if most else contextlib.nullcontext():
        call((most or 64) + 1)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("verify --seq-len 1025", "--seq-len: a sequence of 1,025 tokens"),
        ("profile", "--lengths: a sequence of 2,048 tokens"),
        ("profile --lengths 64,2048,128", "--lengths: a sequence of 2,048 tokens"),
        ("verify --seq-len 1024", ""),
        ("profile --lengths 128:1024:4", ""),
    ],
)
def test_sequences_beyond_a_table_of_positions_are_refused_before_ranks_start(
    line: str,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(*args: Any) -> None:
        raise launch.RanksFailed("started")

    monkeypatch.setattr(launch, "_start", start)
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    more = ["--out", str(tmp_path / "p.jsonl")] if line.startswith("profile") else []
    code = main([*line.split(), "--model", str(tmp_path / "config.json"), *more])
    error = capsys.readouterr().err
    if problem:
        assert code == 2 and problem in error
        assert "a table of 1,024 positions (n_positions): give at most 1,024, or" in error
    else:
        assert code == 1 and error.endswith("started\n")
