"""Recover masks on HuggingFace models: meanings, nothing of S x S, equal loss and gradients."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from mask_graphs import TOLERANCE, Notes, calls, dense_values, spec
from models import DRAWS_AT_LAYERS, draws_at_layers
from torch import Tensor, fx

from paradyse.passes.recover_masks import recover_masks
from paradyse.passes.retrace import make_autocast_explicit, retrace
from paradyse.runtime.capture import trace_inputs

B, S = 2, 13
SIZES: dict[str, Any] = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 1}
WIDE = SIZES | {"num_attention_heads": 4, "intermediate_size": 48}
GROUPED = WIDE | {"num_key_value_heads": 2}
CAUSAL = [{"right": 0}]
FULL: list[dict[str, int]] = [{}]

FAMILIES: dict[str, tuple[str, dict[str, Any], list[dict[str, int]]]] = {
    "Llama": ("LlamaForCausalLM", GROUPED, CAUSAL),
    "Mistral": (
        "MistralForCausalLM",
        GROUPED | {"sliding_window": 5},
        [{"left": 4, "right": 0}],
    ),
    "Qwen3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 8}, CAUSAL),
    "Gemma3": (
        "Gemma3ForCausalLM",
        GROUPED
        | {
            "num_hidden_layers": 2,
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        [{"left": 3, "right": 0}, {"right": 0}],
    ),
    "Phi3": (
        "Phi3ForCausalLM",
        GROUPED | {"pad_token_id": 0, "sliding_window": 4},
        [{"left": 3, "right": 0}],
    ),
    "GPT2": (
        "GPT2LMHeadModel",
        {"vocab_size": 128, "n_embd": 32, "n_layer": 1, "n_head": 4}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        CAUSAL,
    ),
    "GPTNeoX": ("GPTNeoXForCausalLM", WIDE, CAUSAL),
    "OPT": (
        "OPTForCausalLM",
        SIZES
        | {"num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
        CAUSAL,
    ),
    "Falcon": ("FalconForCausalLM", SIZES | {"num_attention_heads": 4}, CAUSAL),
    "BERT": (
        "BertForMaskedLM",
        WIDE | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        FULL,
    ),
    "Mixtral": ("MixtralForCausalLM", GROUPED | {"num_local_experts": 4}, CAUSAL),
    "OLMo2": ("Olmo2ForCausalLM", GROUPED, CAUSAL),
}
PACKED = ("Llama", "Mistral", "Qwen3", "Gemma3", "Phi3", "GPT2", "GPTNeoX", "Mixtral", "OLMo2")
"""Those that look for documents in position_ids."""
CACHED = ("Llama", "Mistral", "Gemma3", "GPT2")


def _batch(how: str, seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 128, (B, S), generator=g)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
    if how.startswith("padded"):
        keep = torch.ones(B, S, dtype=torch.int64)
        n = int(torch.randint(1, S - 2, (), generator=g))
        keep[0, slice(0, n) if how.endswith("left") else slice(S - n, S)] = 0
        batch["attention_mask"] = keep
        batch["labels"][keep == 0] = -100
    if how == "packed":
        cuts = torch.rand(B, S, generator=g) < 0.3
        batch["position_ids"] = _restarting(cuts)
    return batch


def _restarting(cuts: Tensor) -> Tensor:
    """Positions that restart at 0 at each cut."""
    index = torch.arange(S).expand(B, S)
    return index - torch.where(cuts, index, 0).cummax(-1).values


def retraced(gm: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return retrace(gm, list(trace_inputs(placeholders, inputs).values))


CASES = [
    (family, how)
    for family in FAMILIES
    for how in ("plain", "padded left", "padded right", "packed", "cached")
    if (how != "packed" or family in PACKED)
    and (how != "cached" or family in CACHED)
    and (how != "padded right" or family in ("Llama", "BERT"))
]


@pytest.fixture(autouse=True, scope="module")
def _one_graph() -> Iterator[None]:
    # GPT-2 breaks its graph at this call otherwise.
    with torch._dynamo.config.patch(ignore_logging_functions={logging.Logger.warning_once}):  # type: ignore[attr-defined]
        yield


EVERY_KIND = ("Llama", "Gemma3", "BERT")
"""Families asked about every kind of batch; of others each kind but padding is slow."""


@pytest.mark.broad(but="Llama-padded left")
@pytest.mark.parametrize(
    ("family", "how"),
    [
        pytest.param(
            *case,
            marks=() if case[0] in EVERY_KIND or case[1] == "padded left" else pytest.mark.slow,
        )
        for case in CASES
    ],
)
def test_model(family: str, how: str) -> None:
    if family == "OPT" and draws_at_layers():
        pytest.skip(DRAWS_AT_LAYERS)
    name, sizes, expected = FAMILIES[family]
    torch._dynamo.reset()
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**sizes))
    batch = _batch(how, seed=len(family))
    if how != "cached" and family != "BERT":
        batch["use_cache"] = False
    extra = {"padded": {"key_padding": True}, "packed": {"document_ids": True}}.get(
        how.split()[0], {}
    )

    def loss_and_gradients(fn: Any) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        loss = fn(**batch).loss
        loss.backward()
        return loss.detach(), {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }

    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
        graphs.append(retraced(gm, inputs))
        notes = Notes()
        assert recover_masks(graphs[-1], notes) == len(calls(graphs[-1]))
        assert notes.notes == []
        graphs[-1].graph.lint()
        graphs[-1].recompile()
        return graphs[-1]

    want = loss_and_gradients(model)
    got = loss_and_gradients(torch.compile(model, backend=backend))
    (graph,) = graphs
    assert [spec(n) for n in calls(graph)] == [{**e, **extra} for e in expected]
    assert dense_values(graph, S) == []
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.broad(but="packed")
@pytest.mark.filterwarnings("ignore:var_to_val is deprecated:FutureWarning")
@pytest.mark.parametrize("how", ["plain", "padded left", "packed"])
def test_symbolic_capture_under_autocast(how: str) -> None:
    """Sizes of the trace are not those of the call, casts stand between repeat_kv and attention."""
    torch._dynamo.reset()
    cls = transformers.MistralForCausalLM
    model = cls(cls.config_class(**GROUPED, sliding_window=5))
    batch = _batch(how, 0) | {"use_cache": False}
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
        graphs.append(retraced(gm, inputs))
        for p in (make_autocast_explicit, recover_masks):
            p(graphs[-1], Notes())
        return gm

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        torch.compile(model, backend=backend, dynamic=True)(**batch)
    (node,) = calls(graphs[0])
    extra = {"padded": {"key_padding": True}, "packed": {"document_ids": True}}
    assert spec(node) == {"left": 4, "right": 0, **extra.get(how.split()[0], {})}
    q, k, v = (x.meta["val"] for x in node.args[:3])
    assert (q.shape[1], k.shape[1], v.shape[1]) == (4, 2, 2)
    assert (q.dtype, k.dtype, v.dtype) == (torch.bfloat16,) * 3
    assert dense_values(graphs[0], q.shape[2]) == []


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_custom_mask_of_a_model_is_exact(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    cls = transformers.LlamaForCausalLM
    model = cls(cls.config_class(**GROUPED))
    seen = (torch.rand(B, 1, S, S) < 0.6) | torch.eye(S, dtype=torch.bool)
    mask = (
        seen
        if dtype == torch.bool
        else torch.randn(B, 1, S, S).masked_fill(~seen, torch.finfo(dtype).min)
    )
    batch = _batch("plain", 0) | {"attention_mask": mask, "use_cache": False}
    notes = Notes()

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
        graph = retraced(gm, inputs)
        recover_masks(graph, notes)
        assert [spec(n) for n in calls(graph)] == [{"bias": True}]
        assert len(dense_values(graph, S)) == 1  # the input itself
        graph.recompile()
        return graph

    want = model(**batch).loss
    got = torch.compile(model, backend=backend)(**batch).loss
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
    assert len(notes.notes) == 1
