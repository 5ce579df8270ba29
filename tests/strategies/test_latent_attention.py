"""Latent attention: heads are made of a latent by other linears, and share a rotary key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import VOCAB, check, make_batch, redraw, run_step
from plans import PLANS, blocks_of, choose
from torch import Tensor, nn
from torch.nn import functional as F

import paradyse

HEADS, HIDDEN, LATENT = 3, 12, 8
PLAIN, ROTARY, VALUE = 6, 4, 5
"""Widths of a head: what no position goes into, what is rotated, and of its values."""
LEVERS = ("megatron_cz+selective", "ulysses_z+chunked", "megatron_ts+recompute")


def halves(x: Tensor, angles: Tensor) -> Tensor:
    """``x`` [.., S, D] rotated by ``angles`` [S, D / 2], one half of a row with the other."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def complex_numbers(x: Tensor, angles: Tensor) -> Tensor:
    """``x`` rotated as complex numbers, each of two that are next to each other."""
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2)


ROTATIONS = {"halves": halves, "complex numbers": complex_numbers}


class Latent(nn.Module):
    """A causal transformer [B, S] -> loss with the attention of DeepSeek-V2 (arXiv 2405.04434,
    section 2.1)."""

    def __init__(self, rotate: str, query_latent: bool) -> None:
        super().__init__()
        self.rotate = ROTATIONS[rotate]
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        queries = HEADS * (PLAIN + ROTARY)
        made: dict[str, Any] = {
            "norm": nn.LayerNorm(HIDDEN),
            "kv_a": nn.Linear(HIDDEN, LATENT + ROTARY, bias=False),
            "kv_norm": nn.RMSNorm(LATENT),
            "kv_b": nn.Linear(LATENT, HEADS * (PLAIN + VALUE), bias=False),
            "proj": nn.Linear(HEADS * VALUE, HIDDEN),
        }
        if query_latent:
            made |= {"q_a": nn.Linear(HIDDEN, 7), "q_norm": nn.RMSNorm(7)}
        made["q_b"] = nn.Linear(7 if query_latent else HIDDEN, queries)
        self.layers = nn.ModuleList(nn.ModuleDict(made) for _ in range(1))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        b, s, _ = x.shape
        speeds = 0.5 ** torch.arange(ROTARY // 2, dtype=x.dtype)
        angles = torch.arange(s, dtype=x.dtype)[:, None] * speeds
        for layer in self.layers:
            h = layer["norm"](x)
            q = layer["q_norm"](layer["q_a"](h)) if "q_a" in layer else h
            q = layer["q_b"](q).view(b, s, HEADS, -1).transpose(1, 2)
            q, q_rotary = q.split([PLAIN, ROTARY], -1)
            latent, k_rotary = layer["kv_a"](h).split([LATENT, ROTARY], -1)
            kv = layer["kv_b"](layer["kv_norm"](latent)).view(b, s, HEADS, -1).transpose(1, 2)
            k, v = kv.split([PLAIN, VALUE], -1)
            k_rotary = self.rotate(k_rotary.view(b, 1, s, ROTARY), angles)
            q = torch.cat([q, self.rotate(q_rotary, angles)], -1)
            k = torch.cat([k, k_rotary.expand(*k.shape[:-1], -1)], -1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["proj"](y.transpose(1, 2).reshape(b, s, -1))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def train(
    rotate: str, query_latent: bool, sharded: bool, plans: tuple[str, ...], inner: str
) -> tuple[list[dict[str, str]], list[str]]:
    """Loss and every gradient under each of ``plans``; what attention refuses, and notes."""
    torch._dynamo.reset()
    reference = redraw(Latent(rotate, query_latent)).double()
    model = redraw(Latent(rotate, query_latent)).double()
    if sharded:
        paradyse.shard(model)
    current = list[Any](["ulysses_z"])
    options = {"plan": lambda workload: current[0], "inner": inner}
    compiled = torch.compile(model, backend="paradyse", options=options)

    def loss_of(out: Any) -> Any:
        return out

    for length in (13, 2):
        batch = make_batch("plain", 2, length)
        want = run_step(reference, reference, batch, loss_of)
        run_step(compiled, model, batch, loss_of)
        for plan in plans:
            current[0] = choose(plan, blocks_of(compiled))
            check(
                run_step(compiled, model, batch, loss_of), want, torch.float64, f"{plan} {length}"
            )
    refused = [b.infeasible for b in blocks_of(compiled) if b.kind == "attention"]
    return refused, list(paradyse.explain(compiled, 2, 13).gathered)


@pytest.mark.broad
@pytest.mark.parametrize(
    ("rotate", "query_latent", "sharded", "p", "inner"),
    [
        ("halves", True, True, 2, "eager"),
        pytest.param("complex numbers", False, False, 2, "eager", marks=pytest.mark.slow),
        pytest.param("halves", False, True, 3, "eager", marks=pytest.mark.slow),
        pytest.param("complex numbers", True, True, 4, "eager", marks=pytest.mark.slow),
        pytest.param("halves", True, False, 2, "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_equal_to_one_process(
    rotate: str, query_latent: bool, sharded: bool, p: int, inner: str, ranks: Any
) -> None:
    case = (rotate, query_latent, sharded, (*PLANS, *LEVERS), inner)
    for refused, gathered in ranks(p).run(train, *case, timeout_s=300):
        assert refused == [{}] and not gathered
