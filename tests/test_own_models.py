"""Small models as people write them, with what no family of HuggingFace's has: each as without the
backend, on one rank and on two."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from harness import RankPool
from models import relative
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS = 11, 16, 4
WHOLE = ("megatron_cz", "ulysses_z", "colossal_z", "megatron_cz+recompute")


class Decoder(nn.Module):
    """Two layers over token ids [B, S], and a loss; parts of it are replaced below."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(WIDTH),
                    "qkv": nn.Linear(WIDTH, 3 * WIDTH),
                    "out": nn.Linear(WIDTH, WIDTH),
                    "score": nn.Linear(WIDTH, 1),
                    "gate": nn.Linear(WIDTH, HEADS),
                    "up": nn.Linear(WIDTH, 4 * WIDTH),
                    "down": nn.Linear(4 * WIDTH, WIDTH),
                }
            )
            for _ in range(num_layers)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def attend(self, layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            y = layer["norm"](x)
            q, k, v = (
                z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in layer["qkv"](y).chunk(3, -1)
            )
            x = x + layer["out"](self.attend(layer, y, q, k, v).transpose(1, 2).flatten(2))
            x = x + layer["down"](F.gelu(layer["up"](x)))
        return x

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = self.head(x)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def forward(self, ids: Tensor) -> Any:
        return self.loss(self.hidden(ids), ids)


class LogOfCut(Decoder):
    """A logarithm, and a quotient, of what is made of tokens behind the cut."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        p = self.head(x).softmax(-1)[:, :-1]
        seen = F.one_hot(ids[:, 1:], VOCAB).to(p) * 0.5 + 0.25
        return (p / seen).sum(-1).square().mean() - (p * seen).log().sum(-1).mean()


class ClassOrNone(Decoder):
    """Labels computed from tokens behind the cut."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        labels = (ids[:, 1:] == 3).long()
        return F.cross_entropy(self.head(x)[:, :-1].reshape(-1, VOCAB), labels.reshape(-1))


class TwoLosses(Decoder):
    """Of the same labels, of which each ignores others."""

    ignored: Sequence[int] = (-100, 0)

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        flat, logits = ids.flatten(), self.head(x)
        one, other = (
            F.cross_entropy(y.flatten(0, 1), flat, ignore_index=i)
            for y, i in zip((logits, 2 * logits), self.ignored, strict=True)
        )
        return one + other


class TwoLossesTurned(TwoLosses):
    ignored = (0, -100)


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


class ByFrequency(Decoder):
    """A word's gradient is divided by how often it occurs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, scale_grad_by_freq=True)


class LastTokens(Decoder):
    """The last 40 tokens count, of as many as there are at least; a share of all."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = self.head(x)[:, -40:-1]
        summed = F.cross_entropy(logits.flatten(0, 1), ids[:, -39:].flatten(), reduction="sum")
        return summed / ids.shape[1]


class ShortTable(Decoder):
    """A table of 32 places, read from both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(32, WIDTH))

    def hidden(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        return super().hidden(ids) + self.places[:n] + self.places[n - 1 - torch.arange(n)]


class Pieces(Decoder):
    """A loss of 16 rows at a time, of which there are as many at several lengths."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        rows, labels = x[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        pairs = zip(rows.split(16), labels.split(16), strict=True)
        losses = [F.cross_entropy(self.head(a), b, reduction="sum") for a, b in pairs]
        return torch.stack(losses).sum() / ids.numel()


class InThrees(Decoder):
    """Zeros in front, up to a multiple of three."""

    def hidden(self, ids: Tensor) -> Tensor:
        x, n = super().hidden(ids), ids.shape[1]
        padded = torch.cat([x.new_zeros(x.shape[0], -n % 3, WIDTH), x], 1)
        return x + padded.cumsum(1)[:, :n] / 10


class OneRowWritten(Decoder):
    """Words of one token are told from logits of the first."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = self.head(x).scatter(-1, ids[:, 3:4, None], -3.0)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class ExpOfCut(Decoder):
    """Exponentials, of which those of the last token would overflow."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        last = torch.where(torch.arange(n) == n - 1, 1e5, 1.0).double()[:, None]
        e = (self.head(x) * last)[:, :-1].exp()
        return (e / e.sum(-1, keepdim=True)).square().sum(-1).mean()


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
    "labels made behind the cut": (ClassOrNone, (13, 22)),
    "a logarithm of cut tokens": (LogOfCut, (13, 22)),
    "two losses of the same labels": (TwoLosses, (13, 22)),
    "two losses, turned": (TwoLossesTurned, (13, 22)),
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
    "fresh noise in weights": (FreshNoise, (13, 22)),
    "gradients by frequency": (ByFrequency, (13, 22)),
    "attention is returned": (GivesAttention, (13, 22)),
    "values are returned": (GivesValues, (13, 22)),
    "a loss of the last tokens": (LastTokens, (44, 50, 61)),
    "a table that ends": (ShortTable, (13, 22, 31)),
    "a loss in pieces": (Pieces, (20, 22, 24)),
    "padding to threes": (InThrees, (13, 22, 17)),
    "one row is written": (OneRowWritten, (13, 22)),
    "exponentials of cut tokens": (ExpOfCut, (13, 22)),
    "unit vectors": (UnitVectors, (4, 13, 397)),
}


def ids_of(seq_len: int) -> Tensor:
    g = torch.Generator().manual_seed(seq_len)
    return torch.randint(VOCAB, (2, seq_len), generator=g)


def compared(name: str, strategies: Sequence[Any]) -> list[str]:
    """What is off, under each of ``strategies`` at each length."""
    make, lengths = MODELS[name]
    torch.manual_seed(0)
    model, off = make().double(), []
    for strategy in strategies:
        torch._dynamo.reset()
        options = {"inner": "eager", "plan": strategy}
        compiled: Any = torch.compile(model, backend="paradyse", options=options)
        for seq_len in lengths:
            found = []
            for run in (model, compiled):
                model.zero_grad(set_to_none=True)
                torch.manual_seed(seq_len)
                out = run(ids_of(seq_len))
                loss, more = out if isinstance(out, tuple) else (out, torch.zeros(()))
                loss = loss + more.square().sum()
                loss.backward()
                grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
                found.append((loss.detach(), grads))
            (want, of), (got, mine) = found
            each = [relative(mine[n], g) for n, g in of.items() if n in mine]
            is_exact = relative(got, want) < 1e-9 and all(off_by < 1e-8 for off_by in each)
            if not (of.keys() == mine.keys() and is_exact):  # nor with NaN
                off.append(f"{strategy}, {seq_len} tokens: loss {got} for {want}, {each} off")
    return off


QUICK = ("two losses of the same labels", "attention over tokens, and over pairs")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.broad) for n in MODELS]
)
def test_loss_and_gradients_are_those_of_the_model(
    name: str, pool1: RankPool, pool2: RankPool
) -> None:
    assert pool1.run(compared, name, ["auto"], timeout_s=100) == [[]]
    for off in pool2.run(compared, name, [*WHOLE, "auto"], timeout_s=200):
        assert off == []


@pytest.mark.broad
def test_rows_past_the_end_have_gradients_in_a_norm(pool2: RankPool, pool3: RankPool) -> None:
    rows = {"head": "vocabulary"}
    everyone = ["megatron_ts", "metp", "colossal_z", "ulysses_z", "megatron_cz", "auto", rows]
    for off in pool2.run(compared, "unit vectors", everyone, timeout_s=200):
        assert off == []
    for off in pool3.run(compared, "unit vectors", everyone, timeout_s=200):
        assert off == []


class Dropping(Decoder):
    """Drops of the embeddings, and of cut tokens ahead of the loss; blocks add nothing."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.fill_(float(name == "embed.weight"))

    def forward(self, ids: Tensor) -> Any:
        x = F.dropout(self.embed(ids), 0.25, training=True)
        for layer in self.layers:
            x = x + layer["down"](F.gelu(layer["up"](x)))
        q = layer["qkv"](x).chunk(3, -1)
        heads = [z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in q]
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = F.dropout((x + layer["out"](y))[:, :-1], 0.25, training=True)
        return x.mean(), x


def kept() -> list[Tensor]:
    """Which elements both drops keep, at several lengths."""
    torch._dynamo.reset()
    model, found = Dropping(), []
    compiled: Any = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    for seq_len in (13, 22, 31, 40):
        torch.manual_seed(7)
        loss, x = compiled(ids_of(seq_len))
        loss.backward()
        found.append(x.detach() > 0)
    return found


def test_two_drops_are_independent_at_any_length(pool1: RankPool, pool2: RankPool) -> None:
    (one,) = pool1.run(kept, timeout_s=100)
    for two in pool2.run(kept, timeout_s=100):
        assert all(map(torch.equal, one, two))
    for mask in one:
        share, n = mask.double().mean().item(), mask.numel()
        assert abs(share - 0.5625) < 5 * (0.5625 * 0.4375 / n) ** 0.5


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
