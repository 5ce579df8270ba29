"""Models whose batch and sequence no input shows as they are, or that hold several sequences: what
of them has blocks, and what is computed whole, exactly and with a note."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from harness import RankPool
from models import relative, whole
from torch import Tensor, nn

Made = tuple[nn.Module, dict[str, Tensor]]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 40,
}
IMAGE: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_labels": 3}
CLASSES = torch.tensor([0, 2])


def ids(*shape: int) -> Tensor:
    return torch.randint(3, 50, shape)


def vit() -> Made:
    model = hf.ViTForImageClassification(hf.ViTConfig(**SIZES, **IMAGE))
    return model, {"pixel_values": torch.randn(2, 3, 16, 16), "labels": CLASSES}


def dinov2() -> Made:
    sizes = {k: n for k, n in SIZES.items() if k != "intermediate_size"}
    model = hf.Dinov2ForImageClassification(hf.Dinov2Config(**sizes, **IMAGE))
    return model, {"pixel_values": torch.randn(2, 3, 16, 16), "labels": CLASSES}


def beit() -> Made:
    config = hf.BeitConfig(**SIZES, **IMAGE, use_relative_position_bias=True)
    given = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": CLASSES}
    return hf.BeitForImageClassification(config), given


def wav2vec2() -> Made:
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4)}
    config = hf.Wav2Vec2Config(
        **SIZES,
        **convolutions,
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_labels=3,
        apply_spec_augment=False,
        classifier_proj_size=16,
    )
    model = hf.Wav2Vec2ForSequenceClassification(config).eval()
    return model, {"input_values": torch.randn(2, 400), "labels": CLASSES}


def deberta_v2() -> Made:
    config = hf.DebertaV2Config(
        **SIZES,
        vocab_size=50,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        max_relative_positions=16,
        num_labels=3,
    )
    labels = torch.randint(0, 3, (2, 11))
    return hf.DebertaV2ForTokenClassification(config), {"input_ids": ids(2, 11), "labels": labels}


def multiple_choice() -> Made:
    model = hf.BertForMultipleChoice(hf.BertConfig(**SIZES, vocab_size=50))
    return model, {"input_ids": ids(2, 3, 11), "labels": CLASSES}


def llama_model() -> Any:
    return hf.LlamaModel(hf.LlamaConfig(**SIZES, vocab_size=50, num_key_value_heads=2))


class Concatenated(nn.Module):
    """Chosen and rejected answers in one batch, as for preferences."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama_model()

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        both = self.model(input_ids=torch.cat([chosen, rejected])).last_hidden_state
        first, second = both.square().mean((1, 2)).chunk(2)
        return (first - second).sigmoid().mean()


class Siamese(Concatenated):
    """Two inputs of one shape through one encoder."""

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        first, second = (self.model(input_ids=x).last_hidden_state for x in (chosen, rejected))
        return (first - second).square().mean()


class Repeated(Concatenated):
    """A batch repeated inside."""

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        three = self.model(input_ids=chosen.repeat_interleave(3, 0)).last_hidden_state
        return three.square().mean()


class Prefixed(Concatenated):
    """A learned prefix before the tokens, as in prompt tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(3, 32))

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        x = self.model.embed_tokens(chosen)
        x = torch.cat([self.prefix.expand(len(x), -1, -1), x], 1)
        return self.model(inputs_embeds=x).last_hidden_state.square().mean()


class Convolved(Concatenated):
    """A causal convolution over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(32, 32, 4, padding=3, groups=32)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        x = self.model.embed_tokens(chosen)
        x = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return self.model(inputs_embeds=x).last_hidden_state.square().mean()


def of_two_inputs(cls: type[Concatenated]) -> Callable[[], Made]:
    return lambda: (cls(), {"chosen": ids(2, 11), "rejected": ids(2, 11)})


def jamba() -> Made:
    config = hf.JambaConfig(
        **SIZES | {"num_hidden_layers": 2},
        vocab_size=50,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_cache=False,
    )
    tokens = ids(2, 11)
    return hf.JambaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


MODELS: dict[str, Callable[[], Made]] = {
    f.__name__: f for f in (vit, dinov2, beit, wav2vec2, deberta_v2, multiple_choice, jamba)
} | {
    cls.__name__: of_two_inputs(cls)
    for cls in (Concatenated, Siamese, Repeated, Prefixed, Convolved)
}


NUM_BLOCKS: dict[str, int] = {
    "vit": 2,
    "dinov2": 2,
    "beit": 2,
    "wav2vec2": 2,
    "deberta_v2": 0,
    "multiple_choice": 2,
    "jamba": 3,
    "Concatenated": 2,
    "Siamese": 4,
    "Repeated": 2,
    "Prefixed": 2,
    "Convolved": 2,
}
"""Attention and MLP of the one layer, twice where two inputs of one length go through it."""


def train(names: list[str], sharded: bool) -> dict[str, int]:
    """Trains each of the models; the number of blocks that each has."""
    import paradyse
    from paradyse.runtime.registry import captures_of

    num_blocks = {}
    for name in names:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batch = MODELS[name]()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        want, grads = loss_and_gradients(model, model, batch)
        if sharded:
            paradyse.shard(model)
        compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
        got, found = loss_and_gradients(compiled, model, batch)
        assert abs(got - want) <= 1e-5 * abs(want), name
        whole = torch.stack([g.norm() for g in grads.values()]).norm()
        for weight, grad in grads.items():
            assert type(found[weight]) is Tensor
            assert (found[weight] - grad).norm() <= 1e-4 * whole, (name, weight)
        graphs = [g for c in captures_of(compiled) for g in c.graphs.values()]
        num_blocks[name] = sum(len(g.blocks) for g in graphs)
        notes = [n for c in captures_of(compiled, whole=True) for n in c.notes]
        assert notes or graphs, name
    return num_blocks


def loss_and_gradients(
    call: Any, model: nn.Module, batch: dict[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what models and Dynamo say of each other
        out = call(**batch)
    loss = out if isinstance(out, Tensor) else out.loss
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {
        n: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for n, g in grads.items()
    }


@pytest.mark.slow
def test_on_one_rank(pool1: RankPool) -> None:
    assert pool1.run(train, list(MODELS), False, timeout_s=300) == [NUM_BLOCKS]


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_on_two_ranks(sharded: bool, pool2: RankPool) -> None:
    want = NUM_BLOCKS | {"deberta_v2": 1}  # where several train token ids say what the sequence is
    assert pool2.run(train, list(MODELS), sharded, timeout_s=300) == [want] * 2


def whole_at_eleven(inner: str, sharded: bool) -> dict[str, float]:
    """The largest error at each length, of a model that has a program for each; that for eleven
    tokens cannot be made."""
    from test_capture import Repeated

    import paradyse
    from paradyse import backend
    from paradyse.runtime.registry import captures_of

    torch.manual_seed(0)
    model = Repeated().double()
    eager = copy.deepcopy(model)
    build = backend.build_program

    def refusing(gm: Any, inputs: Any, *rest: Any) -> Any:
        program, ctx = build(gm, inputs, *rest)
        lengths = {x.shape[-1] for x in inputs if getattr(x, "dtype", None) == torch.int64}
        return (None, SimpleNamespace(notes=["eleven"])) if 11 in lengths else (program, ctx)

    if sharded:
        paradyse.shard(model)
    compiled = torch.compile(model, backend="paradyse", options={"inner": inner})
    errors = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "build_program", refusing)
        for length in (7, 9, 11, 9, 11):
            given = ids(2, length) % 20
            for one in (compiled, eager):
                one(given, given).backward()
            pairs = zip(model.parameters(), eager.parameters(), strict=True)
            errors[str(length)] = max(relative(whole(p.grad), q.grad) for p, q in pairs)
            model.zero_grad()
            eager.zero_grad()
    assert any(c.graphs and c.notes[-1:] == ["eleven"] for c in captures_of(compiled))
    return errors


@pytest.mark.broad
@pytest.mark.parametrize(
    ("inner", "sharded"), [("eager", False), ("eager", True), ("aot_eager", False)]
)
def test_a_length_that_cannot_be_split_beside_others_that_can(
    inner: str, sharded: bool, pool2: RankPool
) -> None:
    for errors in pool2.run(whole_at_eleven, inner, sharded, timeout_s=120):
        assert errors.keys() == {"7", "9", "11"} and max(errors.values()) < 1e-9


class Scaled(nn.Module):
    """Two means of what has no sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.rand(4000)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x * self.first).sin() * self.second
        return y.mean(), y.square().mean()


def kept_for_another() -> list[float]:
    """How far gradients of sharded weights are off after each of several backward calls."""
    import paradyse

    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = Scaled().double()
    model = paradyse.shard(copy.deepcopy(reference))
    compiled: Any = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    x, off = torch.randn(64, 4000, dtype=torch.float64), []
    want, got = reference(x), compiled(x)
    for i in (0, 1, 0):
        want[i].backward(retain_graph=True)
        got[i].backward(retain_graph=True)
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        off += [relative(whole(p.grad), q.grad) for p, q in pairs]
    for run in (reference, compiled):
        _, loss = run(x)
        loss *= 2  # an output is the caller's to write to
        loss.backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return off + [relative(whole(p.grad), q.grad) for p, q in pairs]


def test_backward_of_a_whole_graph_again(pool2: RankPool) -> None:
    for off in pool2.run(kept_for_another, timeout_s=60):
        assert max(off) < 1e-12
