"""The attention operators over ranks equal the one-rank operator: outputs, gradients, dropout,
bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import RankPool
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import SINGLE, Axis, local_positions, resolve_axis
from paradyse.graph.attention_call import AttentionCall
from paradyse.strategies.attention import ulysses
from paradyse.strategies.attention.operators import METHODS, attend_across_ranks
from paradyse.strategies.groups import heads

# The project's bounds (relative norm of outputs and of each gradient).
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class Case:
    """One call: sizes, and the mask by name. Equal on all ranks."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    seq_len: int = 37
    width: int = 4
    value_width: int = 4
    left: int = -1
    right: int = 0
    chunk: int = -1
    padding: str = ""
    documents: str = ""
    bias: str = ""
    softcap: float = 0.0
    dropout_p: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float64
    keys: int = 0
    """Tokens of another sequence, which keys are of; 0: they are of the queries'."""

    @property
    def num_keys(self) -> int:
        return self.keys or self.seq_len

    def mask(self) -> tuple[Any, ...]:
        """key_padding, document_ids, bias, seed, left, right, chunk, scale, softcap, dropout_p."""
        b, s, n, at = self.batch, self.seq_len, self.num_keys, torch.arange(self.num_keys)
        padding = {
            "": None,
            "left": at >= torch.randint(0, n, (b, 1)),
            "right": at <= torch.randint(0, n, (b, 1)),
            "holes": torch.rand(b, n) > 0.3,
            "all": torch.zeros(b, n, dtype=torch.bool),
        }[self.padding]
        documents = {
            "": None,
            "packed": (torch.rand(b, s) < 0.1).cumsum(1),
            "mixed": torch.randint(0, 3, (b, s)),
        }[self.documents]
        bias = None
        if self.bias == "bool":
            bias = torch.rand(1, 1, s, n) > 0.3
        elif self.bias:
            shape = {
                "dense": (b, 1, s, n),
                "heads": (1, self.heads, s, n),
                "keys": (1, self.heads, 1, n),
                "distance": (self.heads, 2, s),
            }
            bias = torch.randn(shape[self.bias], dtype=self.dtype, requires_grad=True)
        seed = torch.tensor(7) if self.dropout_p else None
        scale = self.width**-0.5
        numbers = (self.left, self.right, self.chunk, scale, self.softcap, self.dropout_p)
        return (padding, documents, bias, seed, *numbers)


def sizes() -> Iterator[Case]:
    """Lengths shorter than p or that nothing divides; KV heads fewer and more than p, or not a
    multiple.
    """
    for s, (h, h_kv) in itertools.product(
        (1, 2, 3, 5, 16, 37), ((1, 1), (3, 1), (4, 2), (6, 3), (5, 5))
    ):
        yield Case(batch=1 + 2 * (s % 2), heads=h, kv_heads=h_kv, seq_len=s)
    yield Case(heads=8, kv_heads=1, width=6, value_width=3, seq_len=130)
    yield Case(batch=3, heads=7, kv_heads=7, width=3, value_width=5, seq_len=64, right=-1)


def masks() -> Iterator[Case]:
    """Every kind of mask and what they combine to."""
    positions: tuple[dict[str, int], ...] = (
        {},
        {"right": -1},
        {"left": 5},
        {"left": 4, "right": 3},
        {"chunk": 8},
        {"left": 20, "chunk": 16},
    )
    for at in positions:
        for padding, documents in (("", ""), ("left", ""), ("right", "packed"), ("holes", "mixed")):
            yield Case(batch=3, heads=4, kv_heads=2, padding=padding, documents=documents, **at)
        yield Case(batch=3, heads=4, kv_heads=2, bias="dense", **at)
    yield Case(padding="all")
    for h, h_kv in ((4, 2), (5, 5)):
        yield Case(batch=3, heads=h, kv_heads=h_kv, left=9, padding="holes", softcap=2.0)
    yield Case(heads=4, kv_heads=2, bias="heads", softcap=2.0, dropout_p=0.3)
    for bias, p in itertools.product(("bool", "dense", "heads", "keys", "distance"), (0.0, 0.3)):
        yield Case(
            batch=3, heads=4, kv_heads=2, seq_len=29, padding="holes", bias=bias, dropout_p=p
        )
    for h, h_kv in ((4, 2), (5, 5), (1, 1)):
        for s, right in ((1, 0), (5, -1), (37, 0)):
            yield Case(batch=2, heads=h, kv_heads=h_kv, seq_len=s, right=right, bias="distance")
            yield Case(heads=h, kv_heads=h_kv, seq_len=s, right=right, sinks=True)
    yield Case(batch=3, heads=6, kv_heads=3, padding="left", left=7, sinks=True, dropout_p=0.3)


def across() -> Iterator[Case]:
    """Keys of another sequence: more, fewer, as many by chance; fewer than ranks; one."""
    lengths = ((9, 13), (13, 9), (37, 5), (3, 40), (16, 16), (2, 1), (1, 6))
    for (s, n), (h, h_kv) in itertools.product(lengths, ((4, 2), (5, 5), (3, 1))):
        yield Case(batch=2, heads=h, kv_heads=h_kv, seq_len=s, keys=n, right=-1)
    for padding, bias in itertools.product(("", "holes", "right"), ("", "keys", "dense", "heads")):
        at = {"padding": padding, "bias": bias, "dropout_p": 0.3 * (padding == "right")}
        yield Case(batch=3, heads=4, kv_heads=2, seq_len=11, keys=21, right=-1, value_width=6, **at)
    yield Case(heads=4, seq_len=30, keys=7, right=-1, softcap=2.0, sinks=True)


def others() -> Iterator[Case]:
    """Dropout, and float32."""
    for h, h_kv in ((2, 1), (6, 3), (4, 4)):
        yield Case(batch=3, heads=h, kv_heads=h_kv, dropout_p=0.4)
        yield Case(heads=h, kv_heads=h_kv, dropout_p=0.1, documents="packed", left=9)
    for at in ({}, {"right": -1}, {"left": 30}):
        yield Case(
            batch=3,
            heads=6,
            kv_heads=2,
            seq_len=133,
            width=16,
            value_width=16,
            dtype=torch.float32,
            **at,
        )


def local(x: Tensor, axis: Axis, seq_len: int) -> Tensor:
    """This rank's tokens of [B, H, S, D]; padding tokens hold NaN."""
    layout = axis.layout(seq_len)
    at = local_positions(layout, axis.rank)
    y = x.new_full((*x.shape[:2], layout.local_len, x.shape[3]), torch.nan)
    y[:, :, at < seq_len] = x[:, :, at[at < seq_len]]
    return y


def compare(op: str, case: Case, axis: Axis) -> str:
    """What differs from one rank; empty if nothing."""
    torch.manual_seed(3)
    b, s, n = case.batch, case.seq_len, case.num_keys
    shapes = [
        (s, case.heads, case.width),
        (n, case.kv_heads, case.width),
        (n, case.kv_heads, case.value_width),
        (s, case.heads, case.value_width),
    ]
    q, k, v, grad = (torch.randn(b, *x, dtype=case.dtype).transpose(1, 2) for x in shapes)
    rest = case.mask()
    sinks = None
    if case.sinks:
        sinks = torch.randn(case.heads, dtype=case.dtype, requires_grad=True)
    bias = [rest[2]] if rest[2] is not None and rest[2].requires_grad else []
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    bias += [sinks] if sinks is not None else []
    out0, _ = torch.ops.paradyse.attention(*whole, *rest, None, None, sinks)
    want = [out0.detach(), *torch.autograd.grad(out0, [*whole, *bias], grad)]

    mine = [local(x, axis, x.shape[2]).requires_grad_() for x in (q, k, v)]
    info = torch.tensor([s, 0, n] if case.keys else [s, 0])
    out, _ = torch.ops.paradyse.attention_across_ranks(
        *mine, op, axis.name, *rest, None, info, sinks
    )
    got = [out.detach(), *torch.autograd.grad(out, [*mine, *bias], local(grad, axis, s))]
    if axis.size > 1:  # a rank has its share of the gradients of bias and sinks
        got[4:] = [collectives.all_reduce(x, axis, 0) for x in got[4:]]

    for name, x, y in zip(("out", "dq", "dk", "dv", "dbias"), got, want, strict=False):
        if name != "dbias":
            length = n if name in ("dk", "dv") else s
            at = local_positions(axis.layout(length), axis.rank)
            real = at < length
            past, past_is = x[:, :, ~real], x.new_zeros(())
            if name == "out":  # of the rank's last value, which may be padding too
                groups, last = case.heads // case.kv_heads, mine[2].detach()[:, :, -1:]
                past_is = last.repeat_interleave(groups, 1)
            if not torch.allclose(past, past_is.expand_as(past), 0, 0, equal_nan=True):
                return f"{name}: padding tokens"
            x, y = x[:, :, real], y[:, :, at[real]]
        # The rank's error against the norm of the whole: a rank's own part may be nearly 0.
        scale = max(float(want[0].norm()), float(grad.norm())) / 10
        error = float((x - y).norm()) / max(float(y.norm()), scale)
        if not error <= TOLERANCE[case.dtype]:
            return f"{name}: error {error:.1e}"
    return ""


def failures(cases: list[Case]) -> list[str]:
    """Runs on every rank."""
    axis = resolve_axis()
    return [
        f"{op} {case}: {text}"
        for case, op in itertools.product(cases, METHODS)
        if (text := compare(op, case, axis))
    ]


@pytest.mark.broad(but="2-others")
@pytest.mark.parametrize("cases", [sizes, masks, across, others], ids=lambda f: f.__name__)
@pytest.mark.parametrize("p", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_equal_to_one_rank(
    ranks: Callable[[int], RankPool], p: int, cases: Callable[[], Iterator[Case]]
) -> None:
    for rank, bad in enumerate(ranks(p).run(failures, list(cases()))):
        assert not bad, f"rank {rank}: {len(bad)} cases, first {bad[0]}"


@pytest.mark.parametrize("cases", [sizes, masks, across, others], ids=lambda f: f.__name__)
def test_equal_to_one_rank_on_one_rank(cases: Callable[[], Iterator[Case]]) -> None:
    assert failures(list(cases())) == []


def failures_in_turns(cases: list[Case], turns: dict[tuple[int, int], int]) -> list[str]:
    """As ``failures`` of Ulysses, where heads go in as many turns as there can be; and cases whose
    heads and KV heads did not go in as many as ``turns`` says."""
    axis, found, own = resolve_axis(), list[str](), ulysses.OwnHeads
    of_case, in_turns = list[int](), own.in_turns

    def noted(*args: Any) -> list[Any]:
        made = in_turns(*args)
        of_case.append(len(made))
        return made

    with (
        patch.object(heads, "LEAST_TURN_BYTES", {"gloo": 1}),
        patch.object(own, "in_turns", staticmethod(noted)),
    ):
        for case in cases:
            of_case.clear()
            found.append(text := compare("ulysses", case, axis))
            want = turns.get((case.heads, case.kv_heads))
            if not text and want and of_case != [want] * 2:
                found[-1] = f"turns {of_case}"
            found[-1] = found[-1] and f"{case}: {found[-1]}"
    return [text for text in found if text]


def of_many_heads() -> Iterator[Case]:
    """Heads that can go in several turns, with every argument that has heads."""
    for h, h_kv in ((8, 8), (8, 4), (24, 12), (12, 4)):
        for s in (5, 37):
            yield Case(batch=2, heads=h, kv_heads=h_kv, seq_len=s, value_width=6)
        yield Case(heads=h, kv_heads=h_kv, left=9, padding="holes", dropout_p=0.3)
        for bias in ("heads", "distance", "dense"):
            yield Case(batch=2, heads=h, kv_heads=h_kv, bias=bias, sinks=True)
        yield Case(heads=h, kv_heads=h_kv, seq_len=11, keys=21, right=-1, sinks=True)


TURNS = {
    2: {(8, 8): 4, (8, 4): 2, (24, 12): 3, (12, 4): 2, (5, 5): 1},
    3: {(8, 8): 1, (8, 4): 1, (24, 12): 4, (12, 4): 4, (6, 3): 1},
}
"""Ranks -> heads and KV heads -> turns, where no rank computes more heads than in one."""


@pytest.mark.parametrize("p", TURNS)
def test_heads_go_in_turns(ranks: Callable[[int], RankPool], p: int) -> None:
    cases = [*of_many_heads(), *sizes(), *others()]
    for rank, bad in enumerate(ranks(p).run(failures_in_turns, cases, TURNS[p])):
        assert not bad, f"rank {rank}: {len(bad)} cases, first {bad[0]}"


def in_order(turns: int) -> str:
    """Of a forward and a backward in so many turns: > a message starts, < it is there, and a dot
    where attention is computed."""
    axis, events = resolve_axis(), list[str]()
    start = collectives.start_exchange

    def noting(event: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (events.append(event), call(*args))[1]

    def started(*args: Any) -> collectives.Pending:
        events.append(">")
        return start(*args).then(noting("<", lambda came: came))

    n = axis.layout(64).local_len
    q, k, v = (torch.randn(1, turns * axis.size, n, 8, requires_grad=True) for _ in range(3))
    call = AttentionCall(q, k, v, right=0, scale=0.3, info=torch.tensor([64, 0]))
    with (
        patch.object(heads, "LEAST_TURN_BYTES", {"gloo": 1}),
        patch.object(collectives, "start_exchange", started),
        patch.object(ulysses, "attention_forward", noting(".", ulysses.attention_forward)),
        patch.object(ulysses, "attention_backward", noting(".", ulysses.attention_backward)),
    ):
        out, _ = attend_across_ranks(call, "ulysses", axis)
        out.sum().backward()
    return "".join(events)


def test_a_turns_heads_travel_while_attention_is_computed(pool2: RankPool) -> None:
    # The next turn's heads start when this turn's are there, results when they are computed.
    for turns, once in ((1, "><.><"), (2, "><>.><.><<"), (3, "><>.><>.><.><<<")):
        assert pool2.run(in_order, turns) == [once * 2] * 2


def step(op: str, s: int, b: int = 2, h: int = 4, h_kv: int = 2, d: int = 8) -> dict[str, int]:
    """Bytes this rank sent in a forward and a backward."""
    axis = resolve_axis()
    n = axis.layout(s).local_len
    q, k, v = (torch.randn(b, x, n, d, requires_grad=True) for x in (h, h_kv, h_kv))
    block = collectives.register_block(axis, "test")
    call = AttentionCall(q, k, v, right=0, scale=0.3, info=torch.tensor([s, block]))
    out, _ = attend_across_ranks(call, op, axis)
    forward = sum(collectives.traffic(axis, block).sent_bytes.values())
    out.sum().backward()
    return {"forward": forward, "both": sum(collectives.traffic(axis, block).sent_bytes.values())}


@pytest.mark.parametrize("p", [2, 4])
def test_bytes(ranks: Callable[[int], RankPool], p: int) -> None:
    s, b, h, d, e = 64, 2, 4, 8, 4
    h_kv = 2
    n = s // p
    q_bytes, kv_bytes = b * h * n * d * e, 2 * b * h_kv * n * d * e
    for got in ranks(p).run(step, "ring", s):
        assert got["forward"] == (p - 1) * kv_bytes
        # Keys and values again, and their gradients, the last hop of which is home.
        assert got["both"] == (p - 1) * kv_bytes * 3
    copies = max(1, p // h_kv)
    for got in ranks(p).run(step, "ulysses", s):
        assert got["forward"] == (2 * q_bytes + kv_bytes * copies) * (p - 1) // p
        assert got["both"] == 2 * got["forward"]


def compiled_equals_eager(op: str, backend: str) -> int:
    """On every rank: compiled with varying lengths; the number of compilations."""
    axis = resolve_axis()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

    def block(x: Tensor, info: Tensor) -> Tensor:
        q = (x * 2).unflatten(-1, (4, 8)).transpose(1, 2)
        rest = (None, None, None, None, -1, 0, -1, 0.3, 0.0, 0.0, None, info)
        operator = torch.ops.paradyse.attention_across_ranks
        out, _ = operator(q, q[:, ::2], q[:, 1::2], op, axis.name, *rest)
        return out.transpose(1, 2).flatten(2) + x

    compiled = torch.compile(block, backend=counter, dynamic=True)
    for s in (23, 40, 61):
        x = torch.randn(2, axis.layout(s).local_len, 32, requires_grad=True)
        info, grad = torch.tensor([s, 0]), torch.randn_like(x)
        got, want = compiled(x, info), block(x, info)
        torch.testing.assert_close(got, want)
        dx, dx0 = (torch.autograd.grad(y, x, grad)[0] for y in (got, want))
        torch.testing.assert_close(dx, dx0)
    return counter.frame_count


@pytest.mark.parametrize("op", METHODS)
def test_compiles_once_for_all_lengths(pool2: RankPool, op: str) -> None:
    assert pool2.run(compiled_equals_eager, op, "aot_eager") == [1, 1]


@pytest.mark.parametrize("op", METHODS)
def test_operators_are_well_formed(op: str) -> None:
    q = torch.randn(2, 4, 10, 8, requires_grad=True)
    k, v = (torch.randn(2, 2, 10, 8, requires_grad=True) for _ in range(2))
    bias = torch.randn(1, 4, 10, 10, requires_grad=True)
    info = torch.tensor([10, 0])
    plain = AttentionCall(q, k, v, right=0, scale=0.3, softcap=2.0, info=info)
    dropped = replace(plain, bias=bias, seed=torch.tensor(1), dropout_p=0.1)
    k, v = (torch.randn(2, 2, 7, 8, requires_grad=True) for _ in range(2))
    across = AttentionCall(q, k, v, scale=0.3, info=torch.tensor([10, 0, 7]))
    for call in (plain, dropped, across):
        target = torch.ops.paradyse.attention_across_ranks.default
        torch.library.opcheck(target, (*call.qkv, op, SINGLE.name, *call.rest))
