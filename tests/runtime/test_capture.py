"""From a graph of Dynamo to a program: static and symbolic, and what a length may change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import RankPool
from models import TOLERANCE, make_batch, make_model, relative
from tiny import LengthScaled, Mixer, Tiny, tokens
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch.nn import functional as F
from transformers import BartConfig, BartForConditionalGeneration

import paradyse.backend
from paradyse.runtime.registry import captures_of


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()  # its limit of 8 compilations per function is shared by all tests


def compile_and_compare(model, lengths, dynamic=None, **options):
    compiled = torch.compile(
        model, backend="paradyse", dynamic=dynamic, options={"inner": "eager", **options}
    )
    for batch, length in lengths:
        ids, labels = tokens(batch, length), tokens(batch, length, seed=1)
        grads = []
        for call in (model, compiled):
            model.zero_grad()
            loss = call(ids, labels)
            loss.backward()
            grads.append((loss.detach(), [p.grad for p in model.parameters()]))
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    return compiled


class TwoStreams(Tiny):
    """Attends from one stream to itself, then to another one of any length."""

    def forward(self, ids: Tensor, others: Tensor) -> Tensor:
        x, y = self.embed(ids), self.embed(others)
        for layer in self.layers:
            for keys in (x, y):
                q, k, v = (self.heads_of(layer, z, i) for i, z in enumerate((x, keys, keys)))
                o = F.scaled_dot_product_attention(q, k, v)
                x = x + layer["proj"](o.transpose(1, 2).flatten(2))
            x = x + layer["down"](F.gelu(layer["up"](layer["norm2"](x))))
        return self.head(x).square().mean()

    def heads_of(self, layer: Any, x: Tensor, part: int) -> Tensor:
        made = layer["qkv"](layer["norm"](x)).chunk(3, -1)[part]
        return made.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def bart(ids: Tensor, others: Tensor, model: Any) -> Tensor:
    return model(input_ids=others, decoder_input_ids=ids).logits.square().mean()


TWO_LENGTHS = [(13, 13), (17, 17), (13, 15), (10, 6), (6, 10), (9, 9)]


def train_on_two_lengths(family: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    if family == "bart":
        each = {"layers": 1, "attention_heads": 4, "ffn_dim": 40}
        sizes = {f"{side}_{k}": n for side in ("encoder", "decoder") for k, n in each.items()}
        config = BartConfig(vocab_size=50, d_model=32, dropout=0.0, use_cache=False, **sizes)
        model: nn.Module = BartForConditionalGeneration(config)
    else:
        model = TwoStreams()
    model = model.double()
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    weights = list(model.parameters())
    for ids, others in ((tokens(2, a), tokens(2, b, seed=1)) for a, b in TWO_LENGTHS):
        found = []
        for call in (model, compiled):
            loss = bart(ids, others, call) if family == "bart" else call(ids, others)
            grads = torch.autograd.grad(loss, weights, allow_unused=True)
            found.append((loss.detach(), [g for g in grads if g is not None]))
        torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


@pytest.mark.broad(but="1-two streams")
@pytest.mark.parametrize(
    ("nproc", "family"),
    [
        (1, "two streams"),
        (2, "two streams"),
        (1, "bart"),
        pytest.param(2, "bart", marks=pytest.mark.slow),
    ],
)
def test_lengths_that_were_equal_at_first(nproc: int, family: str, ranks: Any) -> None:
    ranks(nproc).run(train_on_two_lengths, family, timeout_s=200)


@pytest.mark.broad(but="None")
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_batch_as_large_as_its_length_is_long_at_first(dynamic: bool | None) -> None:
    sizes = [(5, 5), (6, 6), (5, 7), (9, 4)]
    compile_and_compare(Tiny().double(), sizes, dynamic)


LENGTHS = [(2, 7), (2, 11), (3, 5), (1, 9), (1, 1)]


@pytest.mark.broad(but="True")
@pytest.mark.parametrize("dynamic", [None, True])
def test_any_length_and_batch(dynamic):
    compile_and_compare(Tiny().double(), LENGTHS, dynamic)


@pytest.mark.broad(but="True")
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_number_made_of_the_length_is_not_taken_for_a_constant(dynamic):
    compile_and_compare(LengthScaled().double(), LENGTHS, dynamic)


class Repeated(Tiny):
    """Repeats its tokens, which no input shows: of its length there is a program for each."""

    def forward(self, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        twice = None if labels is None else labels.repeat(1, 2)
        return super().forward(ids.repeat(1, 2), twice, mask)


@pytest.mark.broad(but="True")
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_length_that_no_input_shows_is_not_taken_for_that_of_all_calls(dynamic):
    compiled = compile_and_compare(Repeated().double(), LENGTHS, dynamic)
    assert all(c.graphs for c in captures_of(compiled))


class Beside(Tiny):
    """Has an input whose length says nothing of the tokens, and reads its own as a number."""

    def forward(self, ids: Tensor, labels: Tensor, prices: Tensor) -> Any:
        places = ids * torch.arange(ids.shape[1], dtype=torch.float64)
        return super().forward(ids, labels) * (1 + places.cos().mean()) * prices.sort()[0][0, 1]


def test_a_length_of_its_own_does_not_stop_another_one_from_being_served() -> None:
    model = Beside().double()
    compiled: Any = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    for n, others in [(7, 7), (11, 6), (5, 6), (9, 8), (14, 8)]:
        ids, prices = tokens(2, n), torch.linspace(1.0, 2.0, 2 * others).double().view(2, others)
        got, want = (call(ids, ids.flip(1), prices) for call in (compiled, model))
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    assert not list(captures_of(compiled, whole=True))
    several = [list(c.graphs) for c in captures_of(compiled)]
    assert [len(keys) for keys in several] == [1, 2]
    assert not any(c._whole_at for c in captures_of(compiled))


class Choices(Tiny):
    """Two sequences for each of the batch."""

    def forward(self, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        pairs = [x if x is None else torch.stack([x, x.flip(1)], 1) for x in (ids, labels)]
        return super().forward(*[x if x is None else x.flatten(0, 1) for x in pairs], mask)


def test_sequences_of_a_batch_of_two_dims_are_counted():
    seen = []

    def plan(workload: Any) -> str:
        seen.append((workload.batch, workload.seq_len))
        return "megatron_cz"

    compile_and_compare(Choices().double(), [(2, 7), (3, 5)], plan=plan)
    assert seen == [(4, 7), (6, 5)]


@pytest.mark.broad
def test_an_operator_without_a_rule_runs_as_it_is():
    compiled = compile_and_compare(Mixer().double(), LENGTHS)
    notes = [n for c in captures_of(compiled) for n in c.notes]
    assert any("fft" in n and "gathered" in n for n in notes)


@pytest.mark.broad(but="4")
@pytest.mark.parametrize("length", [4, 8, 32, 96, 128])
def test_lengths_equal_to_a_width_of_the_model(length):
    compile_and_compare(Tiny().double(), [(4, length), (4, length + 1), (4, 4)])


def test_a_second_capture_compiles_nothing():
    compiled = compile_and_compare(Tiny().double(), [(2, 7)], inner="aot_eager")
    before = paradyse.stats(compiled)
    compile_and_compare(Tiny().double(), [(2, 13)], inner="aot_eager")
    after = paradyse.stats(compiled)
    assert before.pieces_compiled == after.pieces_compiled > 0
    assert before.variants_compiled == 2  # one attention, one MLP, whatever the depth


def test_a_batch_of_one_compiles_variants_of_its_own():
    compiled = compile_and_compare(Tiny().double(), [(1, 7), (2, 7)], inner="aot_eager")
    stats = paradyse.stats(compiled)
    assert (stats.captures, stats.variants_compiled) == (2, 4)


def test_blocks_are_found_whatever_modules_are_called():
    compiled = compile_and_compare(Tiny(layers=3).double(), [(2, 7)])
    (graph,) = next(iter(captures_of(compiled))).graphs.values()
    assert [b.kind for b in graph.blocks] == ["attention", "mlp"] * 3
    assert len({b.structure for b in graph.blocks}) == 2
    assert {str(b.mask) for b in graph.blocks if b.kind == "attention"} == {"causal"}


def test_passes_can_be_switched_off_by_name():
    off = ["merge_equals", "unify_linears"]
    compile_and_compare(Tiny().double(), [(2, 7)], passes_off=off)


@pytest.mark.parametrize("name", ["merge_equal", "name_dims"])
def test_passes_that_do_not_exist_or_are_needed_are_refused(name):
    text = f"unknown pass '{name}'.*; legal: drop_no_ops, unify_linears, merge_equals, "
    with pytest.raises(ValueError, match=text):
        paradyse.backend.paradyse(None, [], options={"passes_off": [name]})


def test_the_dump_has_every_pass_with_named_dims(tmp_path):
    compile_and_compare(Tiny().double(), [(2, 7)], dump=str(tmp_path))
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files[0] == "00_retrace.txt" and files[-2].endswith("split_steps.txt")
    assert "layers.1.mlp" in (tmp_path / "plan_batch2_length7.txt").read_text()
    text = (tmp_path / files[-2]).read_text()
    assert "[B, S, 32]" in text and "# layers.1.mlp" in text
    assert ", block: layers.0.mlp(" in text


def test_explain_needs_a_graph_and_names_the_blocks():
    model = Tiny()
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    with pytest.raises(ValueError, match="run one step"):
        paradyse.explain(compiled, 1, 128)
    compiled(tokens(2, 7))
    report = paradyse.explain(compiled, 1, 128)
    assert "layers.0.attention and 1 like it" in str(report) and "layers.0.mlp" in str(report)


@pytest.mark.broad
def test_each_kind_of_mask_is_explained() -> None:
    """Plain, padded and packed batches have graphs of their own, and so has evaluation a plan."""
    model = make_model("llama_odd")
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    masks = []
    for how in ("plain", "right", "packed"):
        compiled(**make_batch(how, 2, 9)).loss.backward()
        masks.append(paradyse.stats(compiled).last.mask)
    assert masks == ["causal", "causal, key padding", "causal, documents"]
    for mask in masks:
        report = paradyse.explain(compiled, 2, 9, mask=mask)
        assert report.workload.mask == mask and f"mask: {mask}" in str(report)
    assert paradyse.explain(compiled, 2, 9).workload.mask == masks[-1]
    with torch.no_grad():
        evaluated = paradyse.explain(compiled, 2, 9, mask="causal")
    assert not evaluated.workload.training
    assert evaluated.peak_bytes < paradyse.explain(compiled, 2, 9, mask="causal").peak_bytes
    known = "'causal', 'causal, key padding', 'causal, documents'"
    with pytest.raises(ValueError, match=f"mask 'padded' has run: give one of {known}"):
        paradyse.explain(compiled, 2, 9, mask="padded")


def test_frozen_weights_have_neither_gradient_nor_moments() -> None:
    model = Tiny()
    for name, p in model.named_parameters():
        p.requires_grad_("qkv" in name)
    compiled = compile_and_run(model)
    (graph,) = next(iter(captures_of(compiled))).graphs.values()
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert (
        graph.choice.planner.static_bytes == sum(p.nbytes for p in model.parameters()) + 3 * trained
    )


def compile_and_run(model: nn.Module) -> Any:
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    compiled(tokens(2, 7), tokens(2, 7, seed=1)).backward()
    return compiled


class Mapped(Tiny):
    """Maps a function over sequences, in which tracing loses sight of values."""

    def extra(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda rows: rows.cumsum(0))(x)


class JambaLike(Tiny):
    """A recurrence over tokens, by PyTorch's scan."""

    def extra(self, x: Tensor) -> Tensor:
        def combine(left: Any, right: Any) -> Any:
            return left[0] * right[0], right[0] * left[1] + right[1]

        states = associative_scan(combine, (x.sigmoid(), x), dim=1, combine_mode="generic")
        return x + states[1]


SCANNED = [(2, 7), (2, 11), (3, 5)]


def train_a_map() -> list[str]:
    compiled = compile_and_compare(Mapped().double(), SCANNED)
    assert all(type(p.grad) is Tensor for p in compiled.parameters())
    return [n for c in captures_of(compiled, whole=True) for n in c.notes]


@pytest.mark.broad(but="1")
@pytest.mark.parametrize("nproc", [1, 2])
def test_what_tracing_cannot_follow_is_computed_whole(nproc: int, ranks: Any) -> None:
    for notes in ranks(nproc).run(train_a_map, timeout_s=200):
        assert any("which the passes do not see into" in n for n in notes), notes


def train_a_scan() -> None:
    compiled = compile_and_compare(JambaLike().double(), SCANNED)
    assert not list(captures_of(compiled, whole=True))
    for capture in captures_of(compiled):
        for graph in capture.graphs.values():
            ctx = graph.program.ctx
            assert len(ctx.blocks) == 4 and not ctx.gathered
            assert [r.over.size for r in ctx.mixing] == [32]  # a part of the channels each


@pytest.mark.broad
def test_a_scan_is_shared_by_channels(pool2: RankPool) -> None:
    pool2.run(train_a_scan, timeout_s=200)


class ScaledTokens(Tiny):
    """Reads the length, as a number, in what is computed for each token, and of no token."""

    def extra(self, x: Tensor) -> Tensor:
        bound = (100 + self.head.bias.sum()).clamp(max=x.shape[1])
        return x / x.shape[1] + x.clamp(max=x.shape[1] - 12) * bound


def train_by_length(inner: str) -> tuple[list[float], int]:
    """Errors at each length, and the programs at the end."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference, model = ScaledTokens().double(), ScaledTokens().double()
    model.load_state_dict(reference.state_dict())
    options = {"inner": inner, "plan": "megatron_cz"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    errors = []
    for n in (13, 22, 31, 16):
        ids = tokens(2, n)
        got, want = (
            torch.autograd.grad(call(ids, ids), list(m.parameters()))
            for call, m in ((compiled, model), (reference, reference))
        )
        errors.append(max(float((a - b).norm() / (1e-9 + b.norm())) for a, b in zip(got, want)))
    return errors, sum(len(c.graphs) for c in captures_of(compiled))


@pytest.mark.broad
@pytest.mark.parametrize(
    ("p", "inner"),
    [
        (2, "eager"),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((3, "eager"), (2, "aot_eager"))),
    ],
)
def test_a_number_that_is_the_length_is_whole_on_every_rank(p: int, inner: str, ranks: Any) -> None:
    """A rank's part of the tokens has another size: the number does not go by it."""
    for errors, programs in ranks(p).run(train_by_length, inner, timeout_s=100):
        assert max(errors) < TOLERANCE[torch.float64], errors
        assert programs == 2


class TwoLosses(Tiny):
    """Of each token, and of each sequence, as for pretraining: the second tells Dynamo that two
    sizes are one, and the arguments' names which of them it goes on with."""

    def forward(self, input_ids: Tensor, labels: Tensor, next_sentence_label: Tensor) -> Any:
        logits = super().forward(input_ids)
        of_tokens = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
        return of_tokens + F.cross_entropy(logits.mean(1), next_sentence_label)


def two_losses() -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, errors = TwoLosses(layers=1).double(), []
    options = {"inner": "eager", "plan": "megatron_cz"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    for batch, n in ((3, 13), (2, 31), (4, 17)):
        ids, classes = tokens(batch, n), torch.arange(batch)
        got, want = (
            torch.autograd.grad(call(ids, ids.clone(), classes), list(model.parameters()))
            for call in (compiled, model)
        )
        errors += [relative(a, b) for a, b in zip(got, want, strict=True)]
    assert not list(captures_of(compiled, whole=True))
    return errors


def test_batch_and_length_that_both_change(pool2: RankPool) -> None:
    for errors in pool2.run(two_losses, timeout_s=100):
        assert max(errors) < TOLERANCE[torch.float64], errors


class Shortened(Tiny):
    """Computes all tokens but the last, as people's wrappers of decoders do."""

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return super().forward(ids[:, :-1], labels[:, 1:])


class Prefixed(Tiny):
    """Computes a token of its own ahead of those that it is given."""

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return super().forward(F.pad(ids, (1, 0), value=3), F.pad(labels, (1, 0), value=-100))


class RepeatedPositions(Tiny):
    """Repeats positions for each sequence of the batch, as Whisper does."""

    def extra(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).unsqueeze(0).repeat(x.shape[0], 1)
        return x + self.embed(positions % 7)


class LastTokens(Tiny):
    """Computes as many tokens as it takes, whatever it is given."""

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return super().forward(ids[:, -7:], labels[:, -7:])


class BothEnds(Tiny):
    """Leaves tokens out at both ends."""

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return super().forward(ids[:, 2:-3], labels[:, 2:-3])


OWN_LENGTHS = {
    "last tokens": LastTokens,
    "both ends": BothEnds,
    "shortened": Shortened,
    "prefixed": Prefixed,
    "repeated": RepeatedPositions,
}


def own_lengths(name: str) -> tuple[list[float], int]:
    """Errors at each length, and the programs at the end."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, errors = OWN_LENGTHS[name](layers=1).double(), []
    options = {"inner": "eager", "plan": "ulysses_z"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    for batch, n in ((3, 13), (2, 31), (4, 17), (2, 8)):
        ids = tokens(batch, n)
        got, want = (
            torch.autograd.grad(call(ids, ids.clone()), list(model.parameters()))
            for call in (compiled, model)
        )
        errors += [relative(a, b) for a, b in zip(got, want, strict=True)]
    return errors, sum(len(c.graphs) for c in captures_of(compiled))


@pytest.mark.parametrize("name", OWN_LENGTHS)
def test_one_program_for_all_lengths_and_batches(name: str, pool2: RankPool) -> None:
    for errors, programs in pool2.run(own_lengths, name, timeout_s=100):
        assert max(errors) < TOLERANCE[torch.float64], errors
        assert programs == 2


class WithBoxes(Tiny):
    """Adds up boxes of objects, of which a batch may have none."""

    def forward(self, ids: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
        loss: Tensor = super().forward(ids, labels)
        return loss + (self.head.weight.sum() * boxes).sum()


def test_an_input_without_elements_beside_others() -> None:
    model, ids = WithBoxes(), tokens(2, 9)
    compiled: Any = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    for boxes in torch.ones(3, 4), torch.ones(0, 4), torch.ones(2, 4):
        torch.testing.assert_close(compiled(ids, ids, boxes), model(ids, ids, boxes))
