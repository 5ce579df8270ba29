"""Recover masks: what is recovered says what the dense mask said, and what is not stays dense."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mask_graphs import TOLERANCE, Notes, calls, dense_values, spec
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from paradyse.graph.attention_call import AttentionCall
from paradyse.passes.recover_masks import recover_masks
from paradyse.passes.simplify import merge_equals

B, H, S, D = 2, 4, 13, 8
SDPA = torch.ops.aten.scaled_dot_product_attention.default


def trace(fn: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in inputs]
    with mode:
        return make_fx(fn, pre_dispatch=True)(*fakes)


# Masks built by hand: functions of (attention_mask, documents, positions), all int64 [B, S].

ATTENTION_MASK = torch.ones(B, S, dtype=torch.int64)
ATTENTION_MASK[0, :4] = 0
ATTENTION_MASK[1, -3:] = 0
DOCUMENTS = torch.tensor([[5, 5, 5, 2, 2, 7, 7, 7, 7, 7, 2, 2, 2], [1] * 6 + [0] * 7])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 1, 2, 3], [*range(4, 13), 0, 1, 2, 3]])
MIN = torch.finfo(torch.float32).min


def i() -> Tensor:
    return torch.arange(S)[:, None]


def j() -> Tensor:
    return torch.arange(S)[None, :]


def at_i(x: Tensor) -> Tensor:
    return x[:, None, :, None]


def at_j(x: Tensor) -> Tensor:
    return x[:, None, None, :]


def counting() -> Tensor:
    return torch.arange(S).expand(B, S)


def starts(p: Tensor) -> Tensor:
    return (torch.diff(p, prepend=p[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def packed(p: Tensor, documents: Tensor) -> Tensor:
    b = torch.arange(B)[:, None, None, None]
    q, kv = torch.arange(S)[None, None, :, None], torch.arange(S)[None, None, None, :]
    return (documents[b, q] == documents[b, kv]) & (p[b, kv] <= p[b, q])


def left_padded(a: Tensor) -> Tensor:
    return (a.cumsum(-1) == 0).sum(-1)[:, None, None, None]


UNDERSTOOD: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "all": (lambda a, d, p: torch.ones(S, S, dtype=torch.bool), {}),
    "causal": (lambda a, d, p: j() <= i(), {"right": 0}),
    "causal, turned round": (lambda a, d, p: ~(i() < j()), {"right": 0}),
    "causal by a large number": (lambda a, d, p: torch.where(j() <= i(), 0.0, -1e9), {"right": 0}),
    "causal by tril": (lambda a, d, p: torch.ones(S, S).tril().bool(), {"right": 0}),
    "causal by triu of -inf": (
        lambda a, d, p: torch.full((S, S), float("-inf")).triu(diagonal=1),
        {"right": 0},
    ),
    "causal by the least float": (
        lambda a, d, p: torch.where(j() <= i(), torch.zeros(()), MIN)[None, None],
        {"right": 0},
    ),
    "causal by one minus mask": (lambda a, d, p: (1.0 - (j() <= i()).float()) * MIN, {"right": 0}),
    "causal by masked_fill": (
        lambda a, d, p: torch.zeros(S, S).masked_fill(j() > i(), float("-inf")),
        {"right": 0},
    ),
    "window": (lambda a, d, p: (j() <= i()) & (j() > i() - 4), {"left": 3, "right": 0}),
    "window both ways": (lambda a, d, p: (i() - j()).abs() <= 2, {"left": 2, "right": 2}),
    "two windows": (
        lambda a, d, p: (i() - j() < 5) & (i() - j() < 3) & (j() - i() <= 4),
        {"left": 2, "right": 4},
    ),
    "itself alone": (lambda a, d, p: i() == j(), {"left": 0, "right": 0}),
    "chunks": (lambda a, d, p: (i() // 4 == j() // 4) & (j() <= i()), {"right": 0, "chunk": 4}),
    "chunks in chunks": (
        lambda a, d, p: (i() // 4 == j() // 4) & (i() // 3 == j() // 3),
        {"chunk": 4, "document_ids": True},
    ),
    "chunks after padding": (
        lambda a, d, p: (i() - left_padded(a)) // 3 == (j() - left_padded(a)) // 3,
        {"document_ids": True},
    ),
    "padding": (lambda a, d, p: at_j(a).bool(), {"key_padding": True}),
    "padding compared": (
        lambda a, d, p: (at_j(a) == 1) & (j() <= i()),
        {"key_padding": True, "right": 0},
    ),
    "padding by a not": (lambda a, d, p: ~at_j(a == 0), {"key_padding": True}),
    "padding as floats": (
        lambda a, d, p: (1.0 - at_j(a.bool()).float()).masked_fill(at_j(a) == 0, float("-inf")),
        {"key_padding": True},
    ),
    "padding of both": (
        lambda a, d, p: at_j(a).bool() & at_i(a).bool(),
        {"key_padding": True, "document_ids": True},
    ),
    "a stretch of keys": (lambda a, d, p: (j() >= 2) & (at_j(a) != 0), {"key_padding": True}),
    "documents": (lambda a, d, p: at_i(d) == at_j(d), {"document_ids": True}),
    "documents, padding, window": (
        lambda a, d, p: (at_i(d) == at_j(d)) & (j() <= i()) & (i() - j() < 3) & at_j(a).bool(),
        {"document_ids": True, "key_padding": True, "left": 2, "right": 0},
    ),
    "documents twice": (
        lambda a, d, p: (at_i(d) == at_j(d)) & (at_j(a) == at_i(a)),
        {"document_ids": True},
    ),
    "packed": (lambda a, d, p: packed(p, starts(p)), {"document_ids": True, "right": 0}),
    "packed, by index": (
        lambda a, d, p: packed(counting(), starts(p)),
        {
            "document_ids": True,
            "right": 0,
        },
    ),
    "packed, one document": (
        lambda a, d, p: packed(counting(), starts(counting())),
        {"right": 0},
    ),
    "packed, window": (
        lambda a, d, p: packed(p, starts(p)) & (at_j(p) > at_i(p) - 3),
        {"document_ids": True, "left": 2, "right": 0},
    ),
    "packed, chunks of positions": (
        lambda a, d, p: packed(p, starts(p)) & (at_j(p) // 2 == at_i(p) // 2),
        {"document_ids": True, "right": 0},
    ),
}

DENSE: dict[str, tuple[Callable[..., Tensor], str]] = {
    "not oneself": (lambda a, d, p: j() < i(), "their indices"),
    "every second key": (lambda a, d, p: 2 * j() <= i(), "their indices"),
    "documents up to now": (lambda a, d, p: at_j(d) <= at_i(d), "compares query and key"),
    "positions without documents": (lambda a, d, p: at_j(p) <= at_i(p), "compares query and key"),
    "positions, other documents": (lambda a, d, p: packed(p, starts(d)), "compares query and key"),
    "positions, documents by drops": (
        lambda a, d, p: packed(p, (torch.diff(p, prepend=p[:, :1], dim=-1) < 0).cumsum(-1)),
        "compares query and key",
    ),
    "padding or oneself": (lambda a, d, p: at_j(a).bool() | (i() == j()), "compares query and key"),
    "queries hidden": (lambda a, d, p: at_i(a).bool() & (j() <= i()), "hides whole queries"),
    "heads differ": (
        lambda a, d, p: torch.arange(H)[:, None, None] * 2 > (i() - j()).abs(),
        "differs between heads",
    ),
    "numbers": (lambda a, d, p: (i() * j()) * 0.5, "a bias with a number for each pair is kept"),
    "padding by the least float": (
        lambda a, d, p: torch.where(at_j(a).bool(), 0.0, MIN),
        "a query might see no key",
    ),
    "large numbers": (lambda a, d, p: torch.where(j() <= i(), 0.0, 1e9), "not known to be 0"),
}


def tensors(length: int = S) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, length, D, generator=g) for _ in range(3)]


def attend(mask: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, a: Tensor, d: Tensor, p: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(a, d, p))

    return run


def recovered(fn: Callable[..., Any], *inputs: Tensor) -> tuple[fx.GraphModule, list[str], int]:
    """The graph after the pass, its notes and count; equal in value to ``fn``."""
    gm, notes = trace(fn, *inputs), Notes()
    merge_equals(gm, notes)
    count = recover_masks(gm, notes)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*inputs), fn(*inputs), rtol=TOLERANCE, atol=TOLERANCE)
    return gm, notes.notes, count


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_understood(name: str) -> None:
    mask, expected = UNDERSTOOD[name]
    gm, notes, count = recovered(attend(mask), *tensors(), ATTENTION_MASK, DOCUMENTS, POSITIONS)
    (node,) = calls(gm)
    assert spec(node) == expected
    assert (count, notes, dense_values(gm, S)) == (1, [], [])
    for place, dtype in ((3, torch.bool), (4, torch.int64)):
        if (x := node.args[place]) is not None:
            assert x.meta["val"].dtype == dtype and x.meta["val"].shape == (B, S)


@pytest.mark.parametrize("name", DENSE)
def test_dense_mask_is_kept_whole(name: str) -> None:
    mask, reason = DENSE[name]
    gm, notes, count = recovered(attend(mask), *tensors(), ATTENTION_MASK, DOCUMENTS, POSITIONS)
    (node,) = calls(gm)
    assert (spec(node), count) == ({"bias": True}, 1)
    assert len(notes) == 1 and reason in notes[0]


def random_mask(rng: random.Random) -> Callable[..., Tensor]:
    """A combination of conditions, understood or not."""
    pieces: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
        lambda a, d, p: j() <= i(),
        lambda a, d, p: j() <= i() + 2,
        lambda a, d, p: j() > i() - 5,
        lambda a, d, p: (i() - j()).abs() < 4,
        lambda a, d, p: i() // 5 == j() // 5,
        lambda a, d, p: at_j(a) != 0,
        lambda a, d, p: at_i(a) != 0,
        lambda a, d, p: at_j(d) > 2,
        lambda a, d, p: at_i(d) == at_j(d),
        lambda a, d, p: at_j(p) <= at_i(p),
        lambda a, d, p: at_i(starts(p)) == at_j(starts(p)),
        lambda a, d, p: at_i(a) == at_j(a),
        lambda a, d, p: i() == j(),
        lambda a, d, p: torch.ones(S, S, dtype=torch.bool),
    ]

    def build(depth: int) -> Callable[..., Tensor]:
        if depth == 0 or rng.random() < 0.2:
            return rng.choice(pieces)
        kind, x, y = (
            rng.choice(["and", "and", "and", "or", "not"]),
            build(depth - 1),
            build(depth - 1),
        )
        if kind == "and":
            return lambda *t: x(*t) & y(*t)
        if kind == "or":
            return lambda *t: x(*t) | y(*t)
        return lambda *t: ~x(*t)

    return build(3)


@pytest.mark.parametrize("seed", range(60))
def test_any_combination_is_exact(seed: int) -> None:
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    a = torch.randint(0, 2, (B, S), generator=g)
    d = torch.randint(0, 4, (B, S), generator=g)
    p = torch.where(
        torch.rand(B, S, generator=g) < 0.3, torch.randint(0, 9, (B, S), generator=g), 0
    )
    p = torch.stack([_counting(row) for row in p.tolist()])
    gm, notes, _ = recovered(attend(random_mask(rng)), *tensors(), a, d, p)
    (node,) = calls(gm)
    assert ("bias" in spec(node)) == bool(notes)


def _counting(row: list[int]) -> Tensor:
    """Positions that count up, and jump to each number of ``row`` that is not 0."""
    out = [row[0]]
    for x in row[1:]:
        out.append(x or out[-1] + 1)
    return torch.tensor(out)


# How attention is called.


def test_no_mask_and_is_causal() -> None:
    q, k, v = tensors()
    gm, _, _ = recovered(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), q, k, v)
    assert [spec(n) for n in calls(gm)] == [{}]
    causal = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)  # noqa: E731
    gm, _, _ = recovered(causal, q, k, v)
    assert [spec(n) for n in calls(gm)] == [{"right": 0}]


def _grouped(x: Tensor) -> Tensor:
    return x[:, :, None].expand(B, 2, 2, S, D).reshape(B, 4, S, D)


@pytest.mark.parametrize(
    ("repeat", "heads", "kept"),
    [
        (_grouped, 2, 2),
        (lambda x: _grouped(x).contiguous().to(torch.float32), 2, 2),
        (lambda x: x.repeat_interleave(2, dim=1), 2, 2),
        (lambda x: x.expand(B, 4, S, D), 1, 1),
        (lambda x: x.repeat(1, 2, 1, 1), 2, 4),
        (lambda x: x[:, None].expand(B, 2, 2, S, D).reshape(B, 4, S, D), 2, 4),
    ],
)
def test_repeated_heads(repeat: Callable[[Tensor], Tensor], heads: int, kept: int) -> None:
    q, k, v = tensors()
    fn = lambda q, k, v: F.scaled_dot_product_attention(q, repeat(k), repeat(v), is_causal=True)  # noqa: E731
    gm, _, _ = recovered(fn, q, k[:, :heads], v[:, :heads])
    (node,) = calls(gm)
    assert [x.meta["val"].shape[1] for x in node.args[1:3]] == [kept, kept]


def test_grouped_heads_stay_grouped() -> None:
    q, k, v = tensors()
    fn = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # noqa: E731
    gm, _, _ = recovered(fn, q, k[:, :2], v[:, :2])
    (node,) = calls(gm)
    assert node.args[1].meta["val"].shape[1] == 2


def test_left_to_pytorch() -> None:
    q, k, v = tensors()
    short = lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :5], k, v, is_causal=True)  # noqa: E731
    later = lambda q, k, v: F.scaled_dot_product_attention(q[:, :, 8:], k, v, j() <= i()[8:])  # noqa: E731
    one = lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :1], k, v)  # noqa: E731
    flat = lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0])  # noqa: E731
    reasons = {short: "5 queries see 13 keys", later: "5 queries", one: "1 queries", flat: "3 dims"}
    for fn, reason in reasons.items():
        gm, notes, count = recovered(fn, q, k, v)
        assert (count, len(calls(gm, SDPA))) == (0, 1) and reason in notes[0]


@pytest.mark.parametrize("fill", [None, -torch.inf, MIN])
def test_keys_of_another_sequence(fill: float | None) -> None:
    """Hidden for all queries alike; where a finite number hides, the input has to show some."""

    def fn(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
        mask = ((torch.arange(5) >= 0)[:, None] & (at_j(a) != 0)).expand(B, 1, 5, S)
        if fill is not None:
            mask = torch.where(mask, torch.zeros(1, H, 5, S), fill)
        return F.scaled_dot_product_attention(q[:, :, :5], k, v, attn_mask=mask)

    gm, notes, count = recovered(fn, *tensors(), ATTENTION_MASK)
    (node,) = calls(gm)
    call = AttentionCall.of(node)
    assert (count, notes) == (1, []) and call.is_cross and call.bias is None
    assert call.key_padding.meta["val"].shape == (B, S)
    checked = [n.name for n in gm.graph.nodes if n.meta.get("shows_keys")]
    assert len(checked) == (fill == MIN)


def test_learned_mask_is_left_to_pytorch() -> None:
    bias = torch.randn(1, H, S, S, requires_grad=True)
    gm, notes, count = recovered(
        lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, attn_mask=b * 2),
        *tensors(),
        bias,
    )
    assert (count, len(calls(gm, SDPA))) == (0, 1) and "is learned" in notes[0]


def test_layers_share_what_was_found() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
        for _ in range(3):  # each layer builds its own mask
            mask = (at_j(a) != 0) & (j() <= i()) & (at_i(a.cumsum(-1)) == at_j(a.cumsum(-1)))
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return q

    gm, _, count = recovered(fn, *tensors(), ATTENTION_MASK)
    assert count == 3
    assert len({n.args[3:5] for n in calls(gm)}) == 1


def test_grad_mode_survives() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            mask = j() <= i()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    gm, _, _ = recovered(fn, *tensors())
    assert len(calls(gm, torch._C._set_grad_enabled)) == 2
