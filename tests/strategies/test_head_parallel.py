"""Blocks as sums over groups of heads or columns, and the two strategies made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import RankPool
from models import (
    FAMILIES,
    VOCAB,
    check,
    in_bfloat16,
    make_batch,
    make_model,
    norm_of,
    redraw,
    relative,
    run_step,
    worst,
)
from torch import Tensor, fx, nn
from torch.nn import functional as F

from paradyse.config import parse_options
from paradyse.distributed.axis import Axis
from paradyse.graph.factors import Factor
from paradyse.runtime.capture import build_program, is_model_state, trace_inputs
from paradyse.runtime.program import Program
from paradyse.strategies import infeasible_reasons
from paradyse.strategies.groups.analyse import analyse
from paradyse.strategies.groups.evaluate import evaluate, evaluate_ups, on_tokens
from paradyse.strategies.groups.model import Groups, Unsplittable, Weight, up_weights
from paradyse.weights.slices import Rows

CLOSE = 1e-6
"""Relative norms, in float64. Some models take their norms in float32; a wrong row gives 1e-2."""

_SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 1}

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fused QKV and gate, by slices": ("Phi3ForCausalLM", dict(FAMILIES["phi3"].config)),
    "fused QKV as (3, H, D)": ("GPT2LMHeadModel", dict(FAMILIES["gpt2"].config)),
    "fused QKV as (H, 3, D)": ("GPTNeoXForCausalLM", dict(FAMILIES["neox"].config)),
    "fused QKV as (H + 2, D)": ("FalconForCausalLM", dict(FAMILIES["falcon"].config)),
    "fused QKV as (Hk, H / Hk + 2, D)": (
        "FalconForCausalLM",
        _SMALL | {"num_attention_heads": 8, "num_kv_heads": 2, "new_decoder_architecture": True},
    ),
    "fused QKV, one KV head": (
        "GPTBigCodeForCausalLM",
        {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 1, "n_head": 4}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "fused QKV by unbind, fused gate": (
        "ModernBertForMaskedLM",
        _SMALL
        | {"num_attention_heads": 4, "intermediate_size": 88, "pad_token_id": 0}
        | {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "one KV head": (
        "LlamaForCausalLM",
        _SMALL | {"num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 50},
    ),
    "norm weights of each head": (
        "CohereForCausalLM",
        _SMALL
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 88}
        | {"use_qk_norm": True, "pad_token_id": 0},
    ),
    "tokens flattened between": ("OPTForCausalLM", dict(FAMILIES["opt"].config)),
    "odd numbers": ("LlamaForCausalLM", dict(FAMILIES["llama_odd"].config)),
    "norms of each head": ("Qwen3ForCausalLM", dict(FAMILIES["qwen3"].config)),
    "biases everywhere": ("BertForMaskedLM", dict(FAMILIES["bert"].config)),
    "norms behind the projection": ("Gemma3ForCausalLM", dict(FAMILIES["gemma3"].config)),
}


class _Recorder(fx.Interpreter):
    """Keeps every value of the graph it runs."""

    def __init__(self, gm: fx.GraphModule):
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


def capture(model: Any, inputs: dict[str, Any]) -> tuple[Program, dict[fx.Node, Any]]:
    """The program of one call on one rank, and the value of every node."""
    calls: list[tuple[fx.GraphModule, list[Any], tuple[Any, ...]]] = []

    def backend(gm: fx.GraphModule, examples: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            calls.append((gm, examples, args))
            return gm(*args)

        return run

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(**inputs)
    # Of transformers 5.17 OPT breaks the graph, ahead of its layers.
    gm, examples, args = max(calls, key=lambda call: len(call[0].graph.nodes))
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    weights = [is_model_state(n, e) for n, e in zip(nodes, examples, strict=True)]
    traced = trace_inputs(nodes, examples).values
    program, _ = build_program(gm, traced, weights, parse_options({}), Axis("one", 1, 0))
    assert program is not None
    recorder = _Recorder(program.placeholders[0].graph.owning_module)
    recorder.run(*args)
    return program, recorder.values


def sum_of_groups(program: Program, groups: Groups, values: dict[fx.Node, Any]) -> Tensor:
    """What the down projections give before their bias, side by side, group after group."""
    scope = program.scope
    total: Any = 0
    weights = split_weights(groups)
    for g in range(len(groups.slots.q)):
        env = {n: values[n] for n in groups.core.inputs if n in values}
        for node, rows in groups.slices.items():
            env[node] = rows.take(values[node], g)
        for node, form in groups.region_weights.items():
            env[node] = values[node] if form is None else form.take(values[node], g)
        taken = [
            values[w.node] if w.form is None else w.form.take(values[w.node], g) for w in weights
        ]
        for w, t in zip(weights, taken, strict=True):
            assert list(t.shape) == w.shape()
        env.update(evaluate_ups(scope, groups.ups, values, taken, groups.sizes))
        evaluate(scope, groups.core, env, groups.sizes)
        last = taken[-len(groups.downs) :]
        parts = [
            F.linear(env[d.x], d.weight.apply(w)) for d, w in zip(groups.downs, last, strict=True)
        ]
        total = total + torch.cat(parts, -1)
    return total


def split_weights(groups: Groups) -> list[Weight]:
    return [*up_weights(groups.ups), *(d.weight for d in groups.downs)]


@pytest.mark.broad(but="fused QKV as (3, H, D)")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_sum_to_the_block(layout: str) -> None:
    import transformers

    name, config = LAYOUTS[layout]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = redraw(cls(cls.config_class(**config))).double()
    inputs: dict[str, Any] = {"input_ids": make_batch("plain", 2, 9)["input_ids"]}
    if "Masked" not in name:
        inputs["use_cache"] = False
    program = check_groups(model, inputs)
    assert {s.block.kind for s in program.block_steps} == {"attention", "mlp"}


def check_groups(model: Any, inputs: dict[str, Any]) -> Program:
    """Every block's groups, for several numbers of them, sum to it in value and gradients."""
    program, values = capture(model, inputs)
    for p in (2, 3, 4, 7):
        scope = replace(program.scope, axis=Axis(f"of {p}", p, 0))
        for step in program.block_steps:
            groups = analyse(scope, step.block)
            got = sum_of_groups(program, groups, values)
            parts = []
            for d in groups.downs:
                bias = d.bias.apply(values[d.bias.node]) if d.bias is not None else 0
                parts.append(values[d.node] - bias)
            want = torch.cat(parts, -1)
            assert relative(got, want) < CLOSE
            weights = dict.fromkeys(w.node for w in split_weights(groups))
            _compare_gradients(got, want, [values[n] for n in weights])
    return program


def _compare_gradients(got: Tensor, want: Tensor, weights: list[Tensor]) -> None:
    """Of the whole weights: every row back in its place."""
    out = torch.randn(got.shape, generator=torch.Generator().manual_seed(0), dtype=got.dtype)
    mine, theirs = (torch.autograd.grad(y, weights, out, retain_graph=True) for y in (got, want))
    whole = norm_of(theirs)
    assert all(relative(a, b, whole) < CLOSE for a, b in zip(mine, theirs, strict=True))


class _Layer(nn.Module):
    """Attention and an MLP in which something can be odd."""

    def __init__(self, odd: str = ""):
        super().__init__()
        self.odd = odd
        self.embed = nn.Embedding(VOCAB, 32)
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(32))
        self.out = nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)
        self.probe = nn.Linear(32, 8)

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        h = self.norm(x)
        q, k, v = (layer(h) for layer in self.qkv)
        if self.odd == "sources":
            v = self.qkv[2](x)
        if self.odd == "weights":
            v = F.linear(h, self.qkv[2].weight * self.scale)
        if self.odd == "norm":
            q = F.layer_norm(q, (32,))
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        if self.odd == "dropout":
            o = F.dropout(o, 0.5)
        if self.odd == "norm behind":
            o = F.layer_norm(o, (32,))
        x = x + self.out(o)
        if self.odd == "probe":
            return x + F.gelu(self.probe(o)).sum(-1, keepdim=True).cumsum(1), x
        h = F.gelu(self.up(x))
        return x + self.down(F.dropout(h, 0.5) if self.odd == "mlp dropout" else h)


class _RepeatedHeads(nn.Module):
    """KV heads copied for each query head before attention, in two spellings."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(VOCAB, 32)
        self.qkv = nn.ModuleList(nn.Linear(32, n) for n in (32, 16, 16))
        self.out = nn.Linear(32, 32)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in self.qkv)
        if self.how == "repeat_interleave":
            k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        else:
            k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(o.transpose(1, 2).flatten(2))


class _Encoder(nn.Module):
    """PyTorch's own layer: packed projections, (B H, S, D) on the way, sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, dropout=0.0)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.layer(self.embed(input_ids))


PLAIN: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "repeat_interleave": (lambda: _RepeatedHeads("repeat_interleave"), 1),
    "expand": (lambda: _RepeatedHeads("expand"), 1),
    "encoder": (_Encoder, 2),
    "projections of different values": (lambda: _Layer("sources"), 2),
}


@pytest.mark.parametrize("how", PLAIN)
def test_groups_of_plain_modules(how: str) -> None:
    torch.manual_seed(0)
    make, num_blocks = PLAIN[how]
    program = check_groups(make().double(), {"input_ids": torch.arange(14).view(2, 7)})
    assert len(program.block_steps) == num_blocks


def test_a_second_reader_that_is_no_adapter() -> None:
    program, _ = capture(_Layer("probe"), {"input_ids": torch.arange(10).view(2, 5)})
    assert [s.block.kind for s in program.block_steps] == []
    assert any("what they give is not added up" in note for note in program.ctx.notes)


@pytest.mark.parametrize(
    ("odd", "kind", "reason"),
    [
        ("weights", "attention", "a projection's weight is computed (aten.mul.Tensor)"),
        ("norm", "attention", "aten.layer_norm.default mixes all heads"),
        ("norm behind", "attention", "aten.layer_norm.default mixes all heads"),
    ],
)
def test_refuses_by_name(odd: str, kind: str, reason: str) -> None:
    program, _ = capture(_Layer(odd), {"input_ids": torch.arange(10).view(2, 5)})
    scope = replace(program.scope, axis=Axis("of 2", 2, 0))
    blocks = {s.block.kind: s.block for s in program.block_steps}
    with pytest.raises(Unsplittable) as caught:
        analyse(scope, blocks[kind])
    assert str(caught.value).startswith(reason)
    assert infeasible_reasons(scope, blocks[kind]).keys() == {"megatron_ts", "metp"}
    for other in blocks.keys() - {kind}:
        assert infeasible_reasons(scope, blocks[other]) == {}


def _with_dropout(family: str, config: dict[str, Any], inner: str) -> list[tuple[float, str]]:
    """Errors of the strategies of this file against megatron_cz, from the same random state."""
    batch: dict[str, Tensor] = make_batch("plain", 2, 9)
    loss_of: Any = lambda out: out.loss  # noqa: E731
    if family in FAMILIES:
        model = make_model(family, torch.float64, **config)
    else:
        torch.manual_seed(0)
        model, batch = _Layer(family).double(), {"input_ids": batch["input_ids"]}
        loss_of = lambda out: (out * torch.arange(1.0, 33.0)).tanh().sum()  # noqa: E731
    steps = {}
    for plan in ("megatron_cz", "megatron_ts", "metp"):
        torch._dynamo.reset()
        torch.manual_seed(5)
        compiled = torch.compile(model, backend="paradyse", options={"plan": plan, "inner": inner})
        steps[plan] = run_step(compiled, model, batch, loss_of)
    torch.manual_seed(6)
    assert run_step(compiled, model, batch, loss_of).loss != steps["metp"].loss
    return [worst(steps[plan], steps["megatron_cz"]) for plan in ("megatron_ts", "metp")]


@pytest.mark.parametrize(
    ("family", "config"),
    [
        pytest.param(
            "gpt2",
            {"n_layer": 1, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama_odd",
            {"num_hidden_layers": 1, "attention_dropout": 0.3},
            marks=pytest.mark.slow,
        ),
        ("dropout", {}),
        ("mlp dropout", {}),
    ],
)
def test_dropout_is_the_same_in_every_strategy(
    family: str, config: dict[str, Any], pool2: RankPool
) -> None:
    for errors in pool2.run(_with_dropout, family, config, "eager", timeout_s=300):
        assert max(error for error, _ in errors) < 1e-9, errors


def _under_autocast() -> list[tuple[str, float, float]]:
    """(plan, its error, eager's own error) in bfloat16, against float32."""
    model, batch = make_model("gpt2", n_layer=1), make_batch("plain", 2, 11)

    exact = run_step(model, model, batch)
    eager, _ = worst(run_step(in_bfloat16(model), model, batch), exact)
    found = []
    for plan in ("megatron_ts", "metp"):
        torch._dynamo.reset()
        compiled = torch.compile(
            model, backend="paradyse", options={"plan": plan, "inner": "aot_eager"}
        )
        found.append((plan, worst(run_step(in_bfloat16(compiled), model, batch), exact)[0], eager))
    return found


@pytest.mark.slow
def test_autocast(pool2: RankPool) -> None:
    for found in pool2.run(_under_autocast, timeout_s=300):
        for plan, error, eager in found:
            assert error < 2 * eager, (plan, error, eager)


def _evaluating(plan: str) -> tuple[Any, Any]:
    """Losses without gradients, and gradients with most weights frozen."""
    model, batch = make_model("llama_odd", torch.float64), make_batch("plain", 2, 7)
    compiled = torch.compile(model, backend="paradyse", options={"plan": plan, "inner": "eager"})
    with torch.no_grad():
        losses = compiled(**batch).loss.item(), model(**batch).loss.item()
    for name, p in model.named_parameters():
        p.requires_grad_("layers.0.self_attn.k_proj" in name or "layers.1.mlp.down" in name)
    check(run_step(compiled, model, batch), run_step(model, model, batch), torch.float64, plan)
    return losses


@pytest.mark.broad
@pytest.mark.parametrize("plan", [pytest.param("megatron_ts", marks=pytest.mark.slow), "metp"])
def test_without_gradients_and_with_frozen_weights(plan: str, pool2: RankPool) -> None:
    for got, want in pool2.run(_evaluating, plan, timeout_s=300):
        assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    "rows",
    [(2, 3, 4), (0, 1, 4, -1, -1, 2), (0, 0, 0), (-1, -1), (*range(0, 199, 2), -1)],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_are_taken_and_put_back(rows: tuple[int, ...], dim: int) -> None:
    weight = torch.randn([200 if d == dim else 3 for d in range(2)]).requires_grad_()
    form = Rows(dim, ((0,) * len(rows), rows))
    taken = form.take(weight, 1)
    for i, row in enumerate(rows):
        want = weight.select(dim, row) if row >= 0 else torch.zeros(3)
        assert torch.equal(taken.select(dim, i), want)
    grad = torch.randn_like(taken)
    out = torch.zeros_like(weight)
    form.add(out, 1, grad)
    (want,) = torch.autograd.grad(taken, weight, grad)
    torch.testing.assert_close(out, want)


def test_a_sequence_merged_with_another_dim_is_taken_apart() -> None:
    x = torch.arange(24.0).reshape(6, 4)  # [B S, 4] of 2 rows of 3
    batch, seq, width = map(Factor, (2, 3, 4))
    scope: Any = SimpleNamespace(
        sequence_of=lambda node: seq,
        names=SimpleNamespace(of=lambda node: [(batch, seq), (width,)]),
    )
    node = fx.Graph().placeholder("x")
    out = on_tokens(scope, node, x, {}, lambda t, dim: t.flip(dim))
    assert torch.equal(out, x.reshape(2, 3, 4).flip(1).reshape(6, 4))


def _saved_bytes(plan: str) -> int:
    """What forward keeps for backward, parameters aside."""
    model, batch = make_model("llama", num_key_value_heads=4), make_batch("plain", 1, 256)
    compiled = torch.compile(
        model, backend="paradyse", options={"plan": plan, "inner": "aot_eager"}
    )
    run_step(compiled, model, batch)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = compiled(**batch).loss
    assert loss.requires_grad
    return sum(s.nbytes() for at, s in kept.items() if at not in parameters)


@pytest.mark.slow
def test_metp_keeps_less_for_backward(pool2: RankPool) -> None:
    streamed, whole = (
        pool2.run(_saved_bytes, p, timeout_s=300)[0] for p in ("metp", "megatron_cz")
    )
    assert streamed < whole, (streamed, whole)
