"""``torch.compile(model, backend="paradyse")`` in the ways people call it, on one rank and two."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from harness import RankPool
from models import TOLERANCE, check, make_batch, relative, run_step, worst
from torch import Tensor, nn
from torch.nn import functional as F

Ranks = Callable[[int], RankPool]
BOTH = pytest.mark.parametrize("nproc", [1, 2])
MOSTLY_TWO = pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])


def make_model(family: str, **config: Any) -> Any:
    """Of one layer."""
    return models.make_model(family, num_hidden_layers=1, **config)


def paradyse_of(model: Any, dynamic: bool | None = None, **options: Any) -> Any:
    options = {"inner": "eager", **options}
    return torch.compile(model, backend="paradyse", dynamic=dynamic, options=options)


def captures(compiled: Any) -> int:
    import paradyse

    return paradyse.stats(compiled).captures


@pytest.mark.broad
def test_found_without_an_import(tmp_path: Path) -> None:
    """The entry point alone, all options at their default, from outside the checkout."""
    program = """
        import sys, torch
        from transformers import LlamaConfig, LlamaForCausalLM
        torch.manual_seed(0)
        sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
        config = LlamaConfig(vocab_size=64, num_hidden_layers=1, intermediate_size=40, **sizes)
        model = LlamaForCausalLM(config)
        ids = torch.randint(64, (2, 13))
        weights = list(model.parameters())
        want = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, weights)
        assert not any(name.startswith("paradyse") for name in sys.modules)
        compiled = torch.compile(model, backend="paradyse")
        got = torch.autograd.grad(compiled(input_ids=ids, labels=ids).loss, weights)
        import paradyse
        assert paradyse.stats(compiled).steps == 1
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
        print("exact")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert out.stdout.strip() == "exact", out.stderr[-4000:]


def train_dynamic(dynamic: bool | None) -> int:
    model = make_model("llama")
    compiled = paradyse_of(model, dynamic)
    for seq_len in (11, 17, 6):
        batch = make_batch("plain", 3, seq_len)
        check(run_step(compiled, model, batch), run_step(model, model, batch), what=str(seq_len))
    return captures(compiled)


@pytest.mark.broad
@MOSTLY_TWO
@pytest.mark.parametrize(("dynamic", "most"), [(True, 1), (None, 2)])
def test_dynamic(nproc: int, dynamic: bool | None, most: int, ranks: Ranks) -> None:
    found = ranks(nproc).run(train_dynamic, dynamic, timeout_s=200)
    assert set(found) == {most}


def run_without_grad(training: bool) -> None:
    model = make_model("llama").train(training)
    compiled = paradyse_of(model)
    for batch, seq_len in ((2, 9), (2, 14), (1, 1)):
        inputs = {"input_ids": make_batch("plain", batch, seq_len)["input_ids"]}
        with torch.no_grad():
            got, want = compiled(**inputs), model(**inputs)
        assert got.logits.shape == want.logits.shape and not got.logits.requires_grad
        assert relative(got.logits, want.logits) <= TOLERANCE[torch.float32]


@pytest.mark.broad
@MOSTLY_TWO
@pytest.mark.parametrize("training", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_grad(nproc: int, training: bool, ranks: Ranks) -> None:
    ranks(nproc).run(run_without_grad, training, timeout_s=200)


def train_in_eval_mode_then_infer() -> None:
    """One compiled model in turn with and without gradients."""
    model = make_model("gpt2").eval()
    compiled = paradyse_of(model)
    batch = make_batch("left", 2, 13)
    want = run_step(model, model, batch, logits=True)
    for _ in range(2):
        check(run_step(compiled, model, batch), want)
        with torch.no_grad():
            out = compiled(**batch)
        assert want.logits is not None
        assert relative(out.logits, want.logits) <= TOLERANCE[torch.float32]
        assert abs(out.loss.item() / want.loss - 1) <= TOLERANCE[torch.float32]


@pytest.mark.broad
@BOTH
def test_eval_and_no_grad_in_turn(nproc: int, ranks: Ranks) -> None:
    ranks(nproc).run(train_in_eval_mode_then_infer, timeout_s=200)


def shifted_loss(ids: Tensor) -> Callable[[Any], Tensor]:
    def loss(out: Any) -> Tensor:
        logits = out.logits[:, :-1].float()
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))

    return loss


def train_on_logits(how: str) -> None:
    model = make_model("llama")
    compiled = paradyse_of(model)
    for seq_len in (13, 10):
        batch = make_batch(how, 3, seq_len)
        ids = batch["input_ids"]
        del batch["labels"]
        want = run_step(model, model, batch, shifted_loss(ids), logits=True)
        check(run_step(compiled, model, batch, shifted_loss(ids), logits=True), want, what=how)


@pytest.mark.broad
@MOSTLY_TWO
@pytest.mark.parametrize("how", [pytest.param("plain", marks=pytest.mark.slow), "left"])
def test_loss_from_logits(nproc: int, how: str, ranks: Ranks) -> None:
    ranks(nproc).run(train_on_logits, how, timeout_s=200)


def train_with_cache(family: str) -> None:
    model = make_model(family, use_cache=True)
    compiled = paradyse_of(model)
    for seq_len in (13, 10):
        batch = make_batch("plain", 2, seq_len)
        kept: list[Any] = []

        def loss_of(out: Any) -> Tensor:
            kept.append(out.past_key_values)  # noqa: B023
            return out.loss

        want = run_step(model, model, batch, loss_of)
        check(run_step(compiled, model, batch, loss_of), want)
        expected, found = kept
        assert len(found) == len(expected) == 1
        for a, b in zip(expected.layers, found.layers, strict=True):
            for x, y in ((a.keys, b.keys), (a.values, b.values)):
                assert x.shape == y.shape
                assert relative(y.detach(), x.detach()) <= TOLERANCE[torch.float32]


@pytest.mark.broad
@MOSTLY_TWO
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt2", "mistral"))]
)
def test_cache_left_on(nproc: int, family: str, ranks: Ranks) -> None:
    ranks(nproc).run(train_with_cache, family, timeout_s=200)


def train_under_autocast(family: str) -> list[tuple[float, float, float, float]]:
    model = make_model(family)
    compiled = paradyse_of(model)
    found = []
    for seq_len in (17, 12):
        batch = make_batch("plain", 3, seq_len)
        exact = run_step(model, model, batch)
        with torch.autocast("cpu", torch.bfloat16):
            steps = [run_step(call, model, batch) for call in (model, compiled)]
        assert all(g.dtype == torch.float32 for s in steps for g in s.grads.values())
        row = [abs(s.loss / exact.loss - 1) for s in steps]
        whole = models.norm_of(list(exact.grads.values()))
        row += [
            models.norm_of([s.grads[n] - g for n, g in exact.grads.items()]) / whole for s in steps
        ]
        found.append(tuple(row))
    return found  # type: ignore[return-value]


@pytest.mark.broad
@MOSTLY_TWO
@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "gpt2"])
def test_autocast(nproc: int, family: str, ranks: Ranks) -> None:
    """No further from float32 than twice eager autocast: both round to 8 bits, in other places."""
    for rows in ranks(nproc).run(train_under_autocast, family, timeout_s=200):
        for eager_loss, loss, eager_grad, grad in rows:
            assert loss <= 2 * eager_loss + 2**-8
            assert 1e-4 < grad <= 2 * eager_grad  # above: it did round


DROPOUT: dict[str, dict[str, float]] = {
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2},
    "llama": {"attention_dropout": 0.2},
    "bert": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2},
}


def train_with_dropout(family: str, plans: tuple[str, ...]) -> dict[str, list[models.Step]]:
    """Plan -> steps under seeds 5, 5, 6 and once more without a new seed."""
    model = make_model(family, **DROPOUT[family])  # type: ignore[arg-type]
    current = list(plans[:1])
    compiled = paradyse_of(model, plan=lambda workload: current[0])
    batch = make_batch("left", 3, 13)
    steps: dict[str, list[models.Step]] = {}
    for current[0] in plans:
        steps[current[0]] = []
        for seed in (5, 5, 6, None):
            if seed is not None:
                torch.manual_seed(seed)
            steps[current[0]].append(run_step(compiled, model, batch))
    return steps


@pytest.mark.broad
@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.slow), "bert"])
def test_dropout(family: str, pool1: RankPool, pool2: RankPool) -> None:
    plans = ("megatron_cz", "ulysses_z", "colossal_z", "megatron_ts", "metp", "dsp")
    (one,) = pool1.run(train_with_dropout, family, plans[:1], timeout_s=200)
    (reference,) = one.values()
    for rank in pool2.run(train_with_dropout, family, plans, timeout_s=200):
        for plan, steps in rank.items():
            same, again, other, later = steps
            assert worst(again, same)[0] <= 1e-6, plan
            assert abs(other.loss / same.loss - 1) > 1e-4, plan
            assert abs(later.loss / other.loss - 1) > 1e-4, plan
            for got, want in zip(steps, reference, strict=True):
                assert abs(got.loss / want.loss - 1) <= 1e-5, plan
                check(got, want, what=plan)


def embedding_masks() -> Tensor:
    """Which elements of the embedding two forward passes keep, [2, B, S, h]."""
    model = make_model("gpt2", embd_pdrop=0.25).transformer
    with torch.no_grad():
        for name, p in model.named_parameters():
            # one everywhere in the residual stream, which no block adds to; what is dropped is
            # below the mean, and the last norm makes that its sign
            p.fill_(float(name == "wte.weight" or name.startswith("ln_f.weight")))
    compiled = paradyse_of(model)
    ids = make_batch("plain", 3, 21)["input_ids"]
    torch.manual_seed(7)
    with torch.no_grad():
        return torch.stack([compiled(input_ids=ids).last_hidden_state > 0 for _ in range(2)])


def test_dropout_masks(pool1: RankPool, pool2: RankPool) -> None:
    """A function of seed and place: independent everywhere, and not of the number of ranks."""
    (one,) = pool1.run(embedding_masks, timeout_s=200)
    for two in pool2.run(embedding_masks, timeout_s=200):
        assert torch.equal(one, two)
    n = one.numel()
    assert abs(one.float().mean().item() - 0.75) < 5 * (0.25 * 0.75 / n) ** 0.5
    rows = one.flatten(0, 2).float() - 0.75
    products = (rows @ rows.T / rows.shape[1]).fill_diagonal_(0)  # between places and passes
    assert products.abs().max() < 6 * 0.25 * 0.75 / rows.shape[1] ** 0.5
    per_column = one.flatten(0, 2).float().mean(0)
    assert ((per_column - 0.75).abs() < 5 * (0.25 * 0.75 / rows.shape[0]) ** 0.5).all()


def accumulate() -> None:
    model = make_model("llama")
    compiled = paradyse_of(model)
    batches = [make_batch("plain", 2, n) for n in (13, 9, 16)]

    def gradients(call: Any) -> models.Step:
        model.zero_grad()
        total = 0.0
        for batch in batches:
            loss = call(**batch).loss / 3
            loss.backward()
            total += loss.item()
        together = sum(call(**b).loss for b in batches[:2])  # two graphs alive at a time
        together.backward()
        return models.Step(total, {n: p.grad.clone() for n, p in model.named_parameters()})

    check(gradients(compiled), gradients(model))


@MOSTLY_TWO
def test_gradient_accumulation(nproc: int, ranks: Ranks) -> None:
    ranks(nproc).run(accumulate, timeout_s=200)


class NoAttention(nn.Module):
    """Mixes tokens in ways that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, models.VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        x = self.norm(x + self.conv(x.mT).mT)
        x = x + x.cumsum(1) / 16 + x.flip(1) + x.sort(dim=1).values
        logits = self.out(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return _Output(loss, logits)


class SomeAttention(NoAttention):
    """An attention block between parts without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.proj = nn.Linear(16, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        x = x + x.roll(1, dims=1)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(o.transpose(1, 2).flatten(2))
        x = x + x.cumsum(1) / 16
        logits = self.out(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return _Output(loss, logits)


class _Output:
    def __init__(self, loss: Tensor, logits: Tensor) -> None:
        self.loss, self.logits = loss, logits


def train_unsupported(cls: type[nn.Module], on_unsupported: str) -> None:
    torch.manual_seed(0)
    model = cls()
    compiled = paradyse_of(model, on_unsupported=on_unsupported)
    for seq_len in (13, 9):
        batch = make_batch("plain", 2, seq_len)
        want = run_step(model, model, batch, logits=True)
        check(run_step(compiled, model, batch, logits=True), want)


@pytest.mark.broad(but="NoAttention-2")
@MOSTLY_TWO
@pytest.mark.parametrize("cls", [NoAttention, SomeAttention])
def test_without_rules_exact(nproc: int, cls: type[nn.Module], ranks: Ranks) -> None:
    ranks(nproc).run(train_unsupported, cls, "gather", timeout_s=200)


class _AllAtOnce:
    """Mixes tokens, channels and sequences: there is no dim left by which ranks could share it."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        out = super().forward(input_ids, labels)  # type: ignore[misc]
        all_at_once = out.logits.flatten().cumsum(0).view_as(out.logits)
        return _Output(out.loss + all_at_once.square().mean(), out.logits)


class NoAttentionAllAtOnce(_AllAtOnce, NoAttention):
    pass


class SomeAttentionAllAtOnce(_AllAtOnce, SomeAttention):
    pass


@pytest.mark.parametrize("cls", [NoAttentionAllAtOnce, SomeAttentionAllAtOnce])
def test_without_rules_error(cls: type[nn.Module], pool2: RankPool) -> None:
    pool2.run(expect_unsupported, cls, timeout_s=200)


def expect_unsupported(cls: type[nn.Module]) -> None:
    with pytest.raises(Exception, match="NotImplementedError.*(mixes tokens|can be split)"):
        train_unsupported(cls, "error")


def train_encoder_decoder() -> None:
    import transformers

    config = transformers.T5Config(
        vocab_size=models.VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=40,
        num_layers=1,
        num_heads=4,
        decoder_start_token_id=0,
    )
    config.dropout_rate = 0.0
    config.use_cache = False
    model = models.redraw(transformers.T5ForConditionalGeneration(config).eval())
    compiled = paradyse_of(model)
    for seq_len in (13, 10):
        batch = make_batch("plain", 2, seq_len)
        batch["labels"] = batch["labels"][:, : seq_len - 4].contiguous()
        check(run_step(compiled, model, batch), run_step(model, model, batch))


@pytest.mark.slow
@MOSTLY_TWO
def test_encoder_decoder_exact(nproc: int, ranks: Ranks) -> None:
    """Two sequences of different lengths in one graph, and a position bias that is learned."""
    ranks(nproc).run(train_encoder_decoder, timeout_s=200)
