"""Heads by dataflow alone: logits and what is computed of each token's; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import HIDDEN, VOCABULARY, attend, context, operators, run, trace
from torch import Tensor
from torch.nn import functional as F

from paradyse.passes.name_dims import name_dims
from paradyse.passes.outline_blocks import outline_blocks
from paradyse.passes.outline_head import outline_head
from paradyse.passes.place_tokens import place_tokens

Ends = Callable[..., Any]


def model(end: Ends) -> Callable[..., Any]:
    """Attention, then ``end`` of the stream [B, S, H], the labels [B, S] and weights."""

    def fn(x: Tensor, labels: Tensor, *weights: Tensor) -> Any:
        q = x[:, None]
        return end(x + attend(q, q, q)[:, 0], labels, *weights)

    return fn


def inputs() -> list[Tensor]:
    """The stream, labels, two weights [V, H] and one [2, H]."""
    torch.manual_seed(0)
    rows = (VOCABULARY, VOCABULARY, 2)
    x, labels = torch.randn(2, 5, HIDDEN), torch.randint(VOCABULARY, (2, 5))
    return [x, labels, *(torch.randn(n, HIDDEN) for n in rows)]


def outlined(end: Ends) -> tuple[Any, Any]:
    ctx, gm = context(), trace(model(end), *inputs(), weights=3)
    name_dims(gm, ctx)
    place_tokens(gm, ctx)
    outline_blocks(gm, ctx)
    before = operators(gm)
    assert outline_head(gm, ctx) == len(ctx.heads)
    assert operators(gm) == before
    found, want = run(gm, *inputs()), model(end)(*inputs())
    torch.testing.assert_close(found, want)  # in the new order too
    return ctx, gm


def names(nodes: Any) -> list[str]:
    return [n.name for n in nodes]


def notes(ctx: Any) -> list[str]:
    """But for those on attention, which has no projections here."""
    return [note for note in ctx.notes if "no projections" not in note]


def mean(y: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), F.pad(labels, (0, 1), value=-100)[:, 1:].flatten())


def plain(x: Tensor, labels: Tensor, w: Tensor, *_: Tensor) -> Any:
    return mean(F.linear(F.layer_norm(x, (HIDDEN,)), w), labels)


def test_from_the_norm_to_the_sums() -> None:
    ctx, gm = outlined(plain)
    (head,) = ctx.heads
    assert names(head.linears) == ["linear"] and names(head.pre) == ["add", "layer_norm"]
    assert names(head.core) == ["linear", "flatten", "loss_sums"] and not head.logits
    order = names(gm.graph.nodes)
    at = [order.index(n.name) for n in head.nodes]
    assert at == list(range(at[0], at[-1] + 1)), "they stand together"
    read = {a for n in head.nodes for a in n.all_input_nodes} - {*head.nodes}
    assert all(order.index(a.name) < at[0] for a in read)
    assert order.index("slice_1") < at[0] < at[-1] < order.index("div_tensor")
    assert not notes(ctx)


def returning(x: Tensor, labels: Tensor, w: Tensor, *_: Tensor) -> Any:
    y = torch.tanh(F.linear(x, w) / 3)
    return mean(y, labels), y


def test_logits_that_are_returned_are_known() -> None:
    ((head,), _) = outlined(returning)[0].heads, None
    assert names(head.logits) == ["tanh"] and names(head.core)[:3] == ["linear", "div", "tanh"]


def adapted(x: Tensor, labels: Tensor, w: Tensor, b: Tensor, a: Tensor) -> Any:
    return mean(F.linear(x, w) + F.linear(F.linear(x, a), b[:, :2]), labels)


def single_tokens(x: Tensor, labels: Tensor, w: Tensor, *_: Tensor) -> Any:
    y = F.linear(x, w)
    return y.logsumexp(-1).square().mean(), (y.argmax(-1) == labels).sum(), mean(y, labels)


def two(x: Tensor, labels: Tensor, w: Tensor, v: Tensor, *_: Tensor) -> Any:
    first = mean(F.linear(x, w), labels)
    return first + mean(F.linear(x.relu(), v), labels.flip(1))


def chained(x: Tensor, labels: Tensor, w: Tensor, v: Tensor, *_: Tensor) -> Any:
    """The second head's stream depends on the first one's loss."""
    loss = mean(F.linear(x, w), labels)
    return mean(F.linear(x * loss, v), labels)


FOUND = {
    "adapters": (adapted, [2]),
    "results of single tokens": (single_tokens, [1]),
    "two heads": (two, [1, 1]),
    "one behind the other": (chained, [1]),
}


@pytest.mark.parametrize("name", FOUND)
def test_heads_and_their_linears(name: str) -> None:
    end, want = FOUND[name]
    ctx, _ = outlined(end)
    assert [len(h.linears) for h in ctx.heads] == want
    assert not any(h.logits for h in ctx.heads)


def without_a_loss(x: Tensor, labels: Tensor, w: Tensor, *_: Tensor) -> Any:
    return F.linear(x, w)


def narrow(x: Tensor, labels: Tensor, w: Tensor, v: Tensor, a: Tensor) -> Any:
    return F.linear(x, a).square().sum()


def mixed(x: Tensor, labels: Tensor, w: Tensor, *_: Tensor) -> Any:
    y = F.linear(x, w)
    return mean(y, labels), y.cumsum(1)


def shifted(x: Tensor, labels: Tensor, w: Tensor, *_: Tensor) -> Any:
    y = F.linear(x, w)[:, :-1]
    return F.cross_entropy(y.flatten(0, 1), labels[:, 1:].flatten())


def dropped(x: Tensor, labels: Tensor, w: Tensor, *_: Tensor) -> Any:
    return mean(F.dropout(F.linear(x, w), 0.0001), labels)


REFUSED = {
    "no loss": (without_a_loss, ""),
    "few classes": (narrow, ""),
    "a sum over tokens": (mixed, "aten.cumsum.default mixes tokens"),
    "shifted logits": (shifted, "aten.slice.Tensor mixes tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_head_and_why(name: str) -> None:
    end, why = REFUSED[name]
    ctx, _ = outlined(end)
    assert not ctx.heads
    assert notes(ctx) == ([f"the logits of linear are always computed whole: {why}"] if why else [])


def test_logits_that_are_dropped_out_are_refused() -> None:
    ctx, gm = context(), trace(model(dropped), *inputs(), weights=3)
    name_dims(gm, ctx)
    place_tokens(gm, ctx)
    assert outline_head(gm, ctx) == 0
    assert notes(ctx) == [
        "the logits of linear are always computed whole: dropout drops some of them out"
    ]
