"""Toy graphs for tests of passes, and what these ask of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

import paradyse.strategies.attention.operators  # noqa: F401  registers the operators
from paradyse.distributed.axis import SINGLE
from paradyse.passes.pipeline import CaptureContext
from paradyse.torch_private import FakeTensorMode, make_fx


def trace(fn: Callable[..., Any], *inputs: Tensor, weights: int = 0) -> fx.GraphModule:
    """The graph of ``fn`` on fake tensors; its last ``weights`` inputs are parameters."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [mode.from_tensor(x).requires_grad_(x.requires_grad) for x in inputs]
        gm = make_fx(fn, pre_dispatch=True)(*fakes)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node in placeholders[len(placeholders) - weights :]:
        node.meta["weight"] = True
    return gm


def context(replicas: Any = SINGLE) -> CaptureContext:
    options = SimpleNamespace(passes_off=(), on_unsupported="gather")
    return CaptureContext(options, SINGLE, replicas)


def operators(gm: fx.GraphModule) -> Counter[str]:
    """Name of each operator, without its namespace and overload -> how often it is there."""
    targets = (n.target for n in gm.graph.nodes if n.op == "call_function")
    return Counter(getattr(t, "overloadpacket", t).__name__ for t in targets)


def run(gm: fx.GraphModule, *inputs: Tensor) -> Any:
    """What the graph gives, after the checks that the runner of passes makes."""
    gm.graph.lint()
    gm.recompile()
    return gm(*inputs)


HEADS, HIDDEN, VOCABULARY = 4, 8, 11


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention [B, H, S, D] by the operator of the library."""
    nothing = (None, None, None, None)
    return torch.ops.paradyse.attention(q, k, v, *nothing, -1, 0, -1, 0.5, 0.0, 0.0)[0]


def toy_inputs(batch: int = 2, length: int = 5) -> list[Tensor]:
    """Ids and labels [B, S]; weights of the embedding, the norm, two blocks and the head."""
    ids = torch.randint(VOCABULARY, (batch, length))
    rows = (3 * HIDDEN, HIDDEN, 3 * HIDDEN, HIDDEN, VOCABULARY)
    columns = (HIDDEN, HIDDEN, HIDDEN, 3 * HIDDEN, HIDDEN)
    linears = [torch.randn(n, m) / m for n, m in zip(rows, columns, strict=True)]
    return [ids, ids.clone(), torch.randn(VOCABULARY, HIDDEN), torch.ones(HIDDEN), *linears]


def toy(ids: Tensor, labels: Tensor, embed: Tensor, norm: Tensor, *linears: Tensor) -> Tensor:
    """The loss of a transformer of one layer."""
    qkv, proj, up, down, head = linears
    x = F.embedding(ids, embed)
    b, s, h = x.shape
    heads = F.linear(F.layer_norm(x, (h,), norm), qkv).view(b, s, 3, HEADS, h // HEADS)
    o = attend(*heads.permute(2, 0, 3, 1, 4).unbind(0)).transpose(1, 2).reshape(b, s, h)
    x = x + F.linear(o, proj)
    x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (h,), norm), up)), down)
    return F.cross_entropy(F.linear(x, head).flatten(0, 1), labels.flatten())
