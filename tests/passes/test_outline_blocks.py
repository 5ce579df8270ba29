"""Blocks by dataflow alone: what is in them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import HEADS, HIDDEN, attend, context, operators, toy, toy_inputs, trace
from plans import blocks_of
from tiny import Tiny, tokens
from torch import Tensor
from torch.nn import functional as F

from paradyse.passes.dump import readable
from paradyse.passes.name_dims import name_dims
from paradyse.passes.outline_blocks import Block, outline_blocks
from paradyse.passes.place_tokens import place_tokens


def outlined(fn: Callable[..., Any], inputs: list[Tensor]) -> tuple[Any, Any]:
    ctx, gm = context(), trace(fn, *inputs, weights=len(inputs) - 1)
    name_dims(gm, ctx)
    place_tokens(gm, ctx)
    before = operators(gm)
    assert outline_blocks(gm, ctx) == len(ctx.blocks)
    assert operators(gm) == before  # the graph itself is unchanged
    return ctx, gm


def parts(block: Block) -> list[list[str]]:
    names = [block.pre, block.up, block.region, block.downs, block.post]
    return [[str(n.target).split(".")[1] for n in nodes if "." in str(n.target)] for nodes in names]


def test_attention_and_mlp_from_residual_to_residual() -> None:
    ctx, _ = outlined(toy, toy_inputs())
    attention, mlp = ctx.blocks
    heads = ["view", "permute", "unbind", "attention", "transpose", "reshape"]
    assert parts(attention) == [["layer_norm"], ["linear"], heads, ["linear"], ["add"]]
    assert parts(mlp) == [["layer_norm"], ["linear"], ["gelu"], ["linear"], ["add"]]
    assert [b.label for b in ctx.blocks] == ["layers.0.attention", "layers.0.mlp"]
    assert attention.output in mlp.pre[0].all_input_nodes and not ctx.notes
    assert attention.down is attention.downs[0] and attention.nodes[0] is attention.pre[0]


def test_the_dump_shows_blocks_and_named_dims() -> None:
    ctx, gm = outlined(toy, toy_inputs())
    text = readable(gm, ctx)
    assert text.startswith("# sequence axis: 1 rank\narg0_1: int64[B, S] = input arg0_1\n")
    assert "arg4_1: float32[3*4*2, 8] = weight arg4_1" in text
    inside = text[text.index("# layers.0.mlp") :]
    assert "    gelu: float32[B, S, 24] = gelu.default(linear_2)\n" in inside
    assert inside.index("# between blocks") < inside.index("loss_sums")


W = torch.randn(HIDDEN, HIDDEN)


def project(x: Tensor, *weights: Tensor) -> Any:
    """Queries, keys, values [B, H, S, D]."""
    out = (F.linear(x, w).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in weights)
    return tuple(out)


def joined(o: Tensor) -> Tensor:
    return o.transpose(1, 2).flatten(2)


def separate(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    return x + F.linear(joined(attend(*project(x, q, k, v))), out)


def gated(x: Tensor, *weights: Tensor) -> Tensor:
    gate, up, down = weights[4:]
    x = separate(x, *weights[:4])
    return x + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def adapted(x: Tensor, q: Tensor, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """A low-rank adapter of the queries, and one of the output."""
    heads = (F.linear(x, q) + F.linear(F.linear(x, a[:3]), b[:, :3]) for _ in range(3))
    o = joined(attend(*(h.unflatten(-1, (HEADS, -1)).transpose(1, 2) for h in heads)))
    return x + (F.linear(o, out) + F.linear(F.linear(o, a[:2]), b[:, :2]))


def normed(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """A norm between attention and its output projection, as BitNet has one."""
    o = joined(attend(*project(x, q, k, v)))
    return x + F.linear(o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-6), out)


FOUND = {
    "a norm before the output": (normed, 4, [("attention", 3, 1)]),
    "three projections": (separate, 4, [("attention", 3, 1)]),
    "a gate": (gated, 7, [("attention", 3, 1), ("mlp", 2, 1)]),
    "adapters": (adapted, 4, [("attention", 6, 2)]),
}


@pytest.mark.parametrize("name", FOUND)
def test_projections_gates_and_adapters(name: str) -> None:
    fn, num_weights, want = FOUND[name]
    ctx, _ = outlined(fn, [torch.randn(2, 5, HIDDEN), *[W] * num_weights])
    assert [(b.kind, len(b.up), len(b.downs)) for b in ctx.blocks] == want
    assert not ctx.notes


def test_what_makes_a_latent_is_ahead_of_the_projections() -> None:
    """So is a key that all heads share, up to where heads are made of it."""

    def fn(x: Tensor, q: Tensor, latent: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        c, key = F.linear(x, latent).split([HIDDEN - 2, 2], -1)
        (queries,), (keys, values) = project(x, q), project(c, k[:, :-2], v[:, :-2])
        keys = keys + key.sin().unsqueeze(1).expand(keys.shape)
        return x + F.linear(joined(attend(queries, keys, values)), out)

    ctx, _ = outlined(fn, [torch.randn(2, 5, HIDDEN), *[W] * 5])
    ((block,), notes) = ctx.blocks, ctx.notes
    names = {part: [str(n) for n in getattr(block, part)] for part in ("pre", "up", "region")}
    assert names["up"] == ["linear_1", "linear_2", "linear_3"] and not notes
    assert {"linear", "sin"} <= {*names["pre"]} and "expand" in names["region"]


def shared(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """The second layer reads the keys and values of the first."""
    heads = project(x, q, k, v)
    x = x + F.linear(joined(attend(*heads)), out)
    return x + F.linear(joined(attend(*project(x, q), *heads[1:])), out)


def without_output(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    return joined(attend(*project(x, q, k, v))).relu()


def differential(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """Two attentions of the same queries and keys before one norm, as DiffLlama has them."""
    heads = project(x, q, k, v)
    both = torch.cat([attend(*heads), attend(*heads[:2], heads[2] * 0.5)], -1)
    o = joined(both)
    return x + F.linear(o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True)), torch.cat([out, out], 1))


REFUSED = {
    "two attentions at once": (differential, "has projections of it"),
    "shared keys": (shared, "is also read by"),
    "no output": (without_output, "has no projections around it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_strategy_can_compute_runs_whole_and_is_noted(name: str) -> None:
    fn, text = REFUSED[name]
    ctx, gm = outlined(fn, [torch.randn(2, 5, HIDDEN), W, W, W, W])
    cores = {n for n in gm.graph.nodes if "attention" in str(n.target)}
    assert ctx.whole_attention and ctx.whole_attention <= cores
    assert not ctx.whole_attention & ctx.split.keys()
    assert any(text in note for note in ctx.notes)


def test_a_cache_that_is_filled_is_no_reader() -> None:
    def fn(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Any:
        heads = project(x, q, k, v)
        return x + F.linear(joined(attend(*heads)), out), heads[1] * 1, heads[2]

    ctx, _ = outlined(fn, [torch.randn(2, 5, HIDDEN), W, W, W, W])
    assert [b.kind for b in ctx.blocks] == ["attention"]
    assert "mul" in {n.name for n in ctx.tails}


@pytest.mark.parametrize("place", ["a list", "positional arguments"])
def test_layers_are_told_apart_wherever_the_program_has_the_model(place: str) -> None:
    """What leads to the model may have numbers as well: L['args'][0].layers.1."""
    torch._dynamo.reset()
    model, ids = Tiny(), tokens(2, 7)

    def one_of(models: list[Tiny]) -> Tensor:
        return models[0](ids, ids)

    def anything(*args: Any) -> Tensor:
        return args[0](*args[1:])

    f, args = (one_of, ([model],)) if place == "a list" else (anything, (model, ids, ids))
    compiled = torch.compile(f, backend="paradyse", options={"inner": "eager"})
    compiled(*args)
    kinds = ("attention", "mlp")
    assert [b.name for b in blocks_of(model)] == [f"layers.{i}.{k}" for i in (0, 1) for k in kinds]
