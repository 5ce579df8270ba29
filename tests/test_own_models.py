"""Small models as people write them, with what no family of HuggingFace's has: each as without the
backend, on one rank and on two."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import RankPool
from models import relative
from own_models import HEADS, VOCAB, WIDTH, Decoder, check_on_ranks, compared, ids_of, in_tiers
from torch import Tensor, nn
from torch.nn import functional as F

import paradyse
from paradyse.strategies.attention import chunked_call


class MaskOfTokens(Decoder):
    """Which keys are seen is computed from hidden states."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = layer["score"](x).squeeze(-1) > 0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])


class BiasOfTokens(Decoder):
    """As forget gates have it."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = F.logsigmoid(layer["gate"](x)).transpose(1, 2)[:, :, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class Hourglass(Decoder):
    """Attention over all tokens and over half of them, by one formula."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def first_four(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen = torch.arange(k.shape[2])[None] < 4
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

        short = first_four(*(z.unflatten(2, (-1, 2)).mean(3) for z in (q, k, v)))
        return first_four(q, k, v) + short.repeat_interleave(2, 2)


class Pairs(Decoder):
    """Attention over all tokens, and over pairs of them, of which ranks could have some."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pairs = (z.unflatten(2, (-1, 2)).mean(3) for z in (q, k, v))
        short = F.scaled_dot_product_attention(*pairs)
        return F.scaled_dot_product_attention(q, k, v) + short.repeat_interleave(2, 2)


class PooledKeys(Decoder):
    """Keys and values are summed up into slots, which are a sequence of their own."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gates = layer["gate"](x).sigmoid()  # [B, S, slots]
        k, v = (torch.einsum("bhsd,bsk->bhkd", z, gates) for z in (k, v))
        return F.scaled_dot_product_attention(q, k, v)


class ProjectedKeys(Decoder):
    """As Linformer has it: keys and values are projected along the tokens, by a learned table."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(40, 5))

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = self.places[: x.shape[1]]
        k, v = (torch.einsum("bhsd,sk->bhkd", z, places) for z in (k, v))
        return F.scaled_dot_product_attention(q, k, v)


class PooledQueries(Decoder):
    """As Funnel (arXiv 2006.03236) has it: every second token asks all of them, and each of a pair
    reads what the pair has found."""

    def layers_of(self, x: Tensor, layers: Iterable[Any] | None = None) -> Tensor:
        for layer in layers or self.layers:
            pairs = F.avg_pool1d(x.transpose(1, 2), 3, 2, 1).transpose(1, 2)
            q, k, v = (
                F.linear(z, w).unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for z, w in zip((pairs, x, x), layer["qkv"].weight.chunk(3), strict=True)
            )
            y = self.attend(layer, x, q, k, v).transpose(1, 2).flatten(2)
            x = x + (pairs + layer["out"](y)).repeat_interleave(2, 1)
        return x

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class PooledTokens(Decoder):
    """Attention is among slots alone, which tokens are pooled to and read from."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gates = layer["gate"](x).sigmoid()
        slots = (torch.einsum("bhsd,bsk->bhkd", z, gates) for z in (q, k, v))
        return torch.einsum("bhkd,bsk->bhsd", F.scaled_dot_product_attention(*slots), gates)


class GivesAttention(Decoder):
    """Returns what the last attention gives, ahead of its projection, beside the loss."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.given = super().attend(layer, x, q, k, v)
        return self.given

    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids), self.given


class GivesValues(GivesAttention):
    """Returns values that attention reads, as caches do, times a weight."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        super().attend(layer, x, q, k, v)
        found, self.given = self.given, v * self.head.weight[0, 0]
        return found


class ByCases(Decoder):
    """Numbers that the length makes by cases: a loss is multiplied by one, tokens move by one."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        longest = max(ids.shape[1], 64)
        return super().loss(x.roll(longest - 60, 1), ids) * longest


class SizeByCases(Decoder):
    """Something has a size that the length makes by cases."""

    def __init__(self, size: Callable[[int], int]) -> None:
        super().__init__()
        self.size = size

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        places = torch.arange(self.size(ids.shape[1])).flip(0)
        return super().loss(x + places[:1].double(), ids)


class NoFewerPlaces(Decoder):
    """There are 16 places at least, counted from the last."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        return super().loss(x + torch.arange(max(n, 16)).flip(0)[:n, None].double() / 20, ids)


class Unprojected(Decoder):
    """Attention of the very tokens: beside another, and of what a layer gives."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mine, heads = super().attend(layer, x, q, k, v), self.heads(x)
        return mine + F.scaled_dot_product_attention(heads, heads, heads)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        heads = self.heads(x)
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return super().loss(x + y.transpose(1, 2).flatten(2), ids)


class AmongChannels(Decoder):
    """Ahead of all layers channels attend to each other, so that the width is a sequence too."""

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q = F.normalize(x.unflatten(-1, (2, -1)).permute(0, 2, 3, 1), dim=-1)
        x = x + F.scaled_dot_product_attention(q, q, q, scale=1.0).permute(0, 3, 1, 2).flatten(2)
        return self.layers_of(x)


class MaskOfTable(Decoder):
    """A mask of its own for each sequence and head, of a table of distances."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, HEADS)

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        near = self.table((at[:, None] - at).clamp(0, 7)).permute(2, 0, 1)[None]
        seen = (at <= at[:, None]) & (x[..., 0] < 1e3)[:, None, None]
        mask = torch.where(seen, near, torch.finfo(x.dtype).min)
        return F.scaled_dot_product_attention(q, k, v, mask)


class Windowed(Decoder):
    """The first layer is of windows of four tokens that are folded into the batch, with places of a
    table; the next word is told."""

    def __init__(self) -> None:
        super().__init__(num_layers=3)
        self.table = nn.Parameter(torch.randn(64, WIDTH))

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.table[: ids.shape[1]]
        (batch, n, width), (first, *rest) = x.shape, self.layers
        windows = self.layers_of(x.reshape(batch * n // 4, 4, width), [first])
        return self.layers_of(windows.reshape(batch, n, width), rest)


class FreshNoise(Decoder):
    """Embeddings and the head read one table with noise; MLPs draw their own."""

    def hidden(self, ids: Tensor) -> Tensor:
        self.noisy = self.embed.weight + 0.5 * torch.randn_like(self.embed.weight)
        x = F.embedding(ids, self.noisy)
        for layer in self.layers:
            q, k, v = (
                z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in layer["qkv"](x).chunk(3, -1)
            )
            x = x + layer["out"](self.attend(layer, x, q, k, v).transpose(1, 2).flatten(2))
            w = layer["up"].weight + 0.5 * torch.randn_like(layer["up"].weight)
            x = x + layer["down"](F.gelu(F.linear(x, w, layer["up"].bias)))
        return x

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = F.linear(x, self.noisy)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class RandomLabels(Decoder):
    """Noise is drawn behind the layers, and then which tokens count."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x + torch.randn_like(x) * torch.rand(WIDTH, dtype=x.dtype)
        labels = torch.where(torch.rand(ids.shape) < 0.5, ids, -100)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class DrawnInPlace(Decoder):
    """Drops paths as timm does, and adds noise, in a block and behind all."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = super().attend(layer, x, q, k, v)
        kept = y.new_empty((len(y), *([1] * (y.ndim - 1)))).bernoulli_(0.7).div_(0.7)
        return y * kept

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return super().loss(x + torch.empty_like(x).normal_(0, 0.1), ids)


class OneKeyMore(Decoder):
    """Scores have a key of nothing more, so that a token may look at none (softmax off by one)."""

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = F.pad(scores.masked_fill(hidden, float("-inf")), (0, 1))
        return scores.softmax(-1)[..., :-1] @ v


class ByFrequency(Decoder):
    """A word's gradient is divided by how often it occurs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, scale_grad_by_freq=True)


class ShortTable(Decoder):
    """A table of 32 places, read from both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(32, WIDTH))

    def hidden(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        return super().hidden(ids) + self.places[:n] + self.places[n - 1 - torch.arange(n)]


class UnitVectors(Decoder):
    """Nothing but unit vectors, as nGPT has them (arXiv 2410.01131): no norm has an epsilon, and no
    linear before one a bias."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer["out"], layer["down"] = (
                nn.Linear(layer[name].in_features, WIDTH, bias=False) for name in ("out", "down")
            )
        self.embed, self.head = nn.Embedding(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def hidden(self, ids: Tensor) -> Tensor:
        def unit(x: Tensor) -> Tensor:
            return x / x.square().sum(-1, keepdim=True).sqrt()

        x = unit(self.embed(ids))
        for layer in self.layers:
            q, k, v = (
                z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in layer["qkv"](x).chunk(3, -1)
            )
            y = unit(self.attend(layer, x, q, k, v)).transpose(1, 2).flatten(2)
            x = unit(x + unit(layer["out"](y)) / 2)
            x = unit(x + unit(layer["down"](F.silu(layer["up"](x)))) / 2)
        return x


MODELS: dict[str, tuple[Callable[[], Decoder], Sequence[int]]] = {
    "a mask of hidden states": (MaskOfTokens, (13, 22)),
    "a bias of hidden states": (BiasOfTokens, (13, 22)),
    "one formula for two lengths": (Hourglass, (12, 22)),
    "attention over tokens, and over pairs": (Pairs, (12, 22)),
    "keys pooled to slots": (PooledKeys, (13, 22)),
    "keys projected along tokens": (ProjectedKeys, (13, 22)),
    "tokens pooled to slots": (PooledTokens, (13, 22)),
    "a number made by cases": (ByCases, (13, 22, 90)),
    "as many as tokens, or 16": (NoFewerPlaces, (22, 90, 150, 9)),
    "as few as tokens, or 16": (partial(SizeByCases, lambda n: min(n, 16)), (22, 41, 9)),
    "one, and for 64 tokens one": (partial(SizeByCases, lambda n: n // 64 + 1), (13, 22, 90, 150)),
    "attention without projections": (Unprojected, (13, 22)),
    "attention among channels": (AmongChannels, (13, 22)),
    "a mask of a table": (MaskOfTable, (13, 22)),
    "windows in the batch": (Windowed, (8, 24)),
    "fresh noise in weights": (FreshNoise, (13, 22)),
    "every second token asks": (PooledQueries, (8, 22, 10)),
    "random labels": (RandomLabels, (13, 22)),
    "noise drawn in place": (DrawnInPlace, (13, 22)),
    "one key more": (OneKeyMore, (13, 22)),
    "gradients by frequency": (ByFrequency, (13, 22)),
    "attention is returned": (GivesAttention, (13, 22)),
    "values are returned": (GivesValues, (13, 22)),
    "a table that ends": (ShortTable, (13, 22, 31)),
    "unit vectors": (UnitVectors, (4, 13, 397)),
}


def compare(name: str, strategies: Sequence[Any]) -> list[str]:
    """Of one of ``MODELS``: see ``compared``."""
    return compared(*MODELS[name], strategies)


QUICK = ("attention over tokens, and over pairs",)


@pytest.mark.parametrize("name", in_tiers(MODELS, QUICK))
def test_loss_and_gradients_are_those_of_the_model(
    name: str, pool1: RankPool, pool2: RankPool
) -> None:
    check_on_ranks(compare, name, pool1, pool2)


def test_a_program_for_each_length_is_explained_whichever_ran_last() -> None:
    torch._dynamo.reset()
    model: Any = ByCases().double()
    compiled: Any = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    for length in MODELS["a number made by cases"][1][:2]:
        compiled(torch.arange(2 * length).reshape(2, length) % VOCAB)
    notes = paradyse.explain(compiled, 2, length).gathered
    assert any("each length gets a program of its own" in note for note in notes), notes


class Halves(Decoder):
    """The first half of a batch and the second, which has one more where they are odd."""

    def forward(self, ids: Tensor) -> Any:
        half = ids.shape[0] // 2
        return super().forward(ids[:half]) + super().forward(ids[half:])


def halves(shapes: Sequence[tuple[int, int]]) -> list[float]:
    torch._dynamo.reset()
    model, off = Halves().double(), []
    options = {"inner": "eager", "strategies": ["megatron_cz", "metp"]}  # none that computes whole
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    for shape in shapes:
        ids = torch.arange(math.prod(shape)).reshape(shape) % VOCAB
        grads = [torch.autograd.grad(run(ids), model.embed.weight) for run in (model, compiled)]
        off.append(relative(grads[1][0], grads[0][0]))
    return off


@pytest.mark.broad
def test_plans_of_sequences_that_are_two_or_one(pool2: RankPool) -> None:
    """Halves alike are of one batch, others of two."""
    for off in pool2.run(halves, [(3, 13), (5, 9), (4, 11), (2, 13)], timeout_s=100):
        assert max(off) < 1e-9


@pytest.mark.broad
def test_rows_past_the_end_have_gradients_in_a_norm(pool2: RankPool, pool3: RankPool) -> None:
    rows = {"head": "vocabulary"}
    everyone = ["megatron_ts", "metp", "colossal_z", "ulysses_z", "megatron_cz", "auto", rows]
    for off in pool2.run(compare, "unit vectors", everyone, timeout_s=200):
        assert off == []
    for off in pool3.run(compare, "unit vectors", everyone, timeout_s=200):
        assert off == []


def in_chunks() -> list[str]:
    plan = {"attention": "ulysses_z+chunked", "mlp": "megatron_cz"}
    with patch.object(chunked_call, "chunk_tokens", lambda batch: 5):
        return compared(UnitVectors, (13, 45), [plan])


def test_rows_past_the_end_of_attention_by_chunks(pool2: RankPool) -> None:
    for off in pool2.run(in_chunks, timeout_s=100):
        assert off == []


@pytest.mark.broad
def test_tiles_of_tokens_that_are_folded_into_the_batch(pool2: RankPool) -> None:
    plan = {"attention": "megatron_cz", "mlp": "megatron_cz+tiled"}
    for off in pool2.run(compare, "windows in the batch", [plan], timeout_s=100):
        assert off == []


@pytest.mark.broad
def test_groups_of_columns_of_weights_that_have_a_sequence(pool2: RankPool) -> None:
    plans = [{"attention": "megatron_cz", "mlp": name} for name in ("megatron_ts", "metp")]
    for off in pool2.run(compare, "attention among channels", plans, timeout_s=100):
        assert off == []


class Scaled(Decoder):
    """What is multiplied in place is read under another name too."""

    def forward(self, ids: Tensor, scale: float = 1.0) -> Any:
        x = self.hidden(ids) + 0.0
        first = x[..., :4]
        first *= scale
        return self.head(x).square().mean()


def scaled() -> list[float]:
    torch._dynamo.reset()
    model = Scaled().double()
    compiled: Any = torch.compile(
        model, backend="paradyse", options={"inner": "eager"}, dynamic=True
    )
    ids = ids_of(13)
    return [relative(compiled(ids, x).detach(), model(ids, x).detach()) for x in (1.5, 0.7)]


def test_a_number_is_multiplied_in_place(pool1: RankPool) -> None:
    assert max(pool1.run(scaled, timeout_s=100)[0]) < 1e-12


class Copying(Decoder):
    """Returns copies, as logs and buffers of users want them."""

    def forward(self, ids: Tensor) -> Any:
        loss = super().forward(ids)
        weight = self.head.weight.detach().clone()[1:]
        copied = ids.to(ids.dtype, copy=True)
        twice = ids.clone(), ids.clone()
        return loss, ids.clone().flatten(), copied, loss.detach().clone(), weight, *twice


def written() -> None:
    torch._dynamo.reset()
    model, ids = Copying(), ids_of(13)
    compiled: Any = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    before = copy.deepcopy((ids, model.head.weight.detach()))
    loss, *copies = compiled(ids)
    value = loss.item()
    copies[-2].zero_()
    assert torch.equal(copies[-1], ids)
    for x in copies:
        x.zero_()
    assert loss.item() == value != 0
    assert torch.equal(ids, before[0]) and torch.equal(model.head.weight, before[1])


def test_copies_are_the_callers(pool1: RankPool, pool2: RankPool) -> None:
    pool1.run(written, timeout_s=100)
    pool2.run(written, timeout_s=100)
