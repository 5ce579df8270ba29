"""Attention by chunks from the host: equal to attention at once, two chunks of keys at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from host_pages import CountedMemory
from torch import Tensor

from paradyse.distributed.axis import Runs, TokenLayout
from paradyse.kernels.attention import attention_backward, attention_forward, bias_gradient
from paradyse.kernels.attention_core import Backward
from paradyse.kernels.attention_mask import AttentionSpec, position_intervals
from paradyse.kernels.sinks import sink_gradient, with_sinks
from paradyse.strategies import host_memory
from paradyse.strategies.attention import in_chunks
from paradyse.strategies.attention.chunked_call import places_of
from paradyse.strategies.attention.in_chunks import (
    Kept,
    attend,
    attend_backward,
    by_heads,
    by_tokens,
    may_see,
)
from paradyse.strategies.host_memory import Fetched, HostMemory, HostRows
from paradyse.strategies.work import count_chunk_pairs
from paradyse.types import MaskSpec

BATCH, HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 2, 4, 2, 8, 8
LENGTHS = (5, 4, 6, 5)
CHUNKS: Runs = tuple((sum(LENGTHS[:i]), n) for i, n in enumerate(LENGTHS))
NUM_ROWS, SEQ_LEN = sum(LENGTHS), 17
"""The last tokens are padding."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PAGE_BYTES", 200)


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[1])).to(
        dtype
    )


def on_host(host: HostMemory, x: Tensor) -> HostRows:
    rows = HostRows(host, x.shape[2], (*x.shape[:2], *x.shape[3:]), x.dtype)
    rows.write(CHUNKS, by_tokens(x))
    return rows


def whole(rows: HostRows) -> Tensor:
    return by_heads(rows.read(CHUNKS).get())


PADDING = torch.arange(SEQ_LEN) >= torch.tensor([[3], [0]])
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 10, [0] * 2 + [1] * 3 + [2] * 12])
SPEC = AttentionSpec(SEQ_LEN, 0.3)
SPECS = {
    "full": SPEC,
    "causal": replace(SPEC, right=0),
    "window": replace(SPEC, left=3, right=0),
    "both sides": replace(SPEC, left=2, right=4),
    "chunk": replace(SPEC, right=0, chunk=7),
    "key padding": replace(SPEC, right=0, key_padding=PADDING),
    "documents": replace(SPEC, right=0, document_ids=DOCUMENTS),
    "softcap": replace(SPEC, right=0, softcap=2.0),
    "dropout": replace(SPEC, right=0, dropout_p=0.3, seed=torch.tensor(5)),
    "bias": replace(SPEC, bias=drawn(1, HEADS, SEQ_LEN, SEQ_LEN)),
    "bias by distance": replace(SPEC, bias=drawn(HEADS, 2, SEQ_LEN)),
    "sinks": replace(SPEC, right=0, key_padding=PADDING, sinks=drawn(1, HEADS)[0]),
}


def at_once(spec: AttentionSpec, dtype: torch.dtype) -> tuple[Any, Any]:
    """q, k, v and the gradient of out; and what attention over all of them gives."""
    q, k = drawn(BATCH, HEADS, NUM_ROWS, WIDTH), drawn(BATCH, KV_HEADS, NUM_ROWS, WIDTH)
    v, d_out = k.flip(2) * 2, q.flip(3) - 1
    given = tuple(x.to(dtype) for x in (q, k, v, d_out))
    q, k, v, d_out = given
    runs = ((0, NUM_ROWS),)
    out, lse = with_sinks(*attention_forward(q, k, v, runs, runs, spec), spec)
    args = Backward(d_out, q, k, v, out, lse), runs, runs, spec
    d_bias = bias_gradient(*args) if spec.bias is not None else None
    d_sinks = sink_gradient(d_out, out, lse, spec) if spec.sinks is not None else None
    return given, (out, lse, *attention_backward(*args), d_bias, d_sinks)


def by_chunks(spec: AttentionSpec, given: Any) -> list[Any]:
    host = HostMemory(torch.device("cpu"))
    q, k, v, d_out = (on_host(host, x) for x in given)
    out, lse = attend(q, k, v, CHUNKS, spec)
    kept = Kept(q, k, v, out, lse)
    grads, *others = attend_backward(kept, d_out, CHUNKS, spec, spec.bias is not None)
    return [*map(whole, (out, lse, *grads)), *others]


@pytest.mark.parametrize("name", SPECS)
def test_equal_to_attention_at_once(name: str) -> None:
    given, want = at_once(SPECS[name], torch.float64)
    for got, x in zip(by_chunks(SPECS[name], given), want, strict=True):
        assert (got is None) == (x is None)
        if x is not None:
            torch.testing.assert_close(got, x, rtol=1e-12, atol=1e-12)


def test_sums_of_16_bit_gradients_have_32_bits() -> None:
    given, want = at_once(SPECS["causal"], torch.bfloat16)
    out, lse, dq, dk, dv, *_ = by_chunks(SPECS["causal"], given)
    assert (out.dtype, dq.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (lse.dtype, dk.dtype, dv.dtype) == (torch.float32,) * 3
    for got, x in zip((out, lse, dq, dk, dv), want, strict=False):
        seen = x.isfinite()
        assert (got.float() - x.float())[seen].norm() < 0.01 * x[seen].float().norm()


def test_a_rank_without_heads_has_rows_of_nothing() -> None:
    host = CountedMemory(torch.device("cpu"))
    q, k, v, d_out = (on_host(host, torch.empty(BATCH, 0, NUM_ROWS, WIDTH)) for _ in range(4))
    out, lse = attend(q, k, v, CHUNKS, SPEC)
    grads, d_bias, _ = attend_backward(Kept(q, k, v, out, lse), d_out, CHUNKS, SPEC, True)
    assert whole(out).shape == (BATCH, 0, NUM_ROWS, WIDTH) and d_bias is None
    assert host.num_used == 0 and not any(whole(x).numel() for x in grads)


@pytest.mark.parametrize(("name", "pairs"), [("full", 16), ("causal", 10), ("window", 7)])
def test_pairs_that_see_nothing_are_not_fetched_and_two_chunks_are_there_at_most(
    name: str, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, alive, most, runs_read = SPECS[name], list[Any](), list[int](), list[Runs]()
    read = HostRows.read

    def watched(self: HostRows, runs: Runs) -> Fetched:
        fetched = read(self, runs)
        if self is keys:
            runs_read.append(runs)
            alive.append(weakref.ref(fetched._x[0].untyped_storage()))
        return fetched

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            most.append(sum(ref() is not None for ref in alive))
            return run(*args)

        return wrapped

    given, _ = at_once(spec, torch.float32)
    host = HostMemory(torch.device("cpu"))
    queries, keys, values, d_out = (on_host(host, x) for x in given)
    monkeypatch.setattr(HostRows, "read", watched)
    for step in ("attention_forward", "attention_backward"):
        monkeypatch.setattr(in_chunks, step, counted(getattr(in_chunks, step)))
    out, lse = attend(queries, keys, values, CHUNKS, spec)
    assert len(runs_read) == pairs
    attend_backward(Kept(queries, keys, values, out, lse), d_out, CHUNKS, spec, False)
    assert len(runs_read) == 2 * pairs
    assert all(len(runs) == 1 for runs in runs_read) and max(most) == 2


MASKS = [*product((None, 0, 3, 9), (None, 0, 5), (None, 4, 7))]


def test_pairs_that_may_see_each_other_are_those_that_do() -> None:
    for left, right, chunk in MASKS:
        spec = AttentionSpec(SEQ_LEN, 1.0, left, right, chunk)
        for queries, keys in product(CHUNKS, CHUNKS):
            found = position_intervals((queries,), (keys,), spec)
            sees = bool((found.hi > found.lo).any())
            assert may_see(spec, queries, keys) == sees, (left, right, chunk, queries, keys)


def test_pairs_are_counted_by_shapes() -> None:
    chunks = [(4 * i, 4) for i in range(6)]
    for left, right, chunk in product((None, 0, 3, 9), (None, 0, 5), (None, 4, 8)):
        spec = AttentionSpec(24, 1.0, left, right, chunk)
        pairs = sum(may_see(spec, a, b) for a, b in product(chunks, chunks))
        mask = MaskSpec(left, right, chunk)
        assert count_chunk_pairs(mask, 6, 4) == pairs, mask
    assert count_chunk_pairs(None, 6, 4) == 36


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [1, 5, 23, 30])
def test_tiles_of_all_ranks_have_every_place_once(p: int, num_tokens: int) -> None:
    layout, found = TokenLayout(p, num_tokens), list[int]()
    n = layout.local_len
    tiles, start = [n] if n % 2 and p > 1 else [2] * (n // 2) + [1] * (n % 2), 0
    for n in tiles:
        places = places_of(layout, start, n)
        assert sum(length for _, length in places) == n * p
        found += [at + i for at, length in places for i in range(length)]
        start += n
    assert sorted(found) == list(range(layout.local_len * p))
