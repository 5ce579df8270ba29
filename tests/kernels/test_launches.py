"""What calls launch, without a GPU: grids that a device takes, and nothing that could be kept.

Tensors are on the meta device, which stands for a GPU: what is made on the host and copied to it
shows as it would there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from aot import grids
from host_traffic import HostTraffic
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import SINGLE, Axis
from paradyse.kernels import (
    attention,
    flash_plan,
    flash_runs,
    head_exchange,
    triton_exchange,
    triton_merge,
)
from paradyse.kernels.attention_core import Backward
from paradyse.kernels.attention_mask import AttentionSpec
from paradyse.kernels.dropout import seeds_of
from paradyse.kernels.flash_backward import launch_backward
from paradyse.kernels.flash_forward import launch_forward
from paradyse.kernels.flash_tiles import describe_mask
from paradyse.offline.capture import fake_world
from paradyse.strategies.attention.method import Context
from paradyse.strategies.attention.operators import METHODS
from paradyse.strategies.groups.heads import deal_heads
from paradyse.weights.slices import MANY_RUNS, Rows

pytest.importorskip("triton")

MOST = (2**31 - 1, 65_535, 65_535)
"""Programs that a grid may have along x, y and z (CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability")."""


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_plan, "_capability", lambda index: (9, 0))


def heads(b: int, n: int, tokens: int, width: int = 64) -> Tensor:
    """[b, n, tokens, width], laid out as models have it."""
    shape = b, tokens, n, width
    return torch.empty(shape, dtype=torch.bfloat16, device="meta").transpose(1, 2)


def flash(b: int, num_heads: int, tokens: int, documents: bool = False) -> None:
    """Forward and backward of attention, two query heads a KV head."""
    q, k = heads(b, num_heads, tokens), heads(b, num_heads // 2, tokens)
    ids = torch.empty(b, tokens, dtype=torch.int64, device="meta") if documents else None
    spec = AttentionSpec(tokens, 0.1, right=0, document_ids=ids)
    positions = torch.empty(tokens, dtype=torch.int32, device="meta")
    visibility = describe_mask(positions, positions, spec)
    out, lse = launch_forward(q, k, k, visibility, spec)
    launch_backward(Backward(torch.empty_like(out), q, k, k, out, lse), visibility, spec)


def exchange(p: int, num_heads: int, num_kv_heads: int) -> None:
    """All four directions of Ulysses' messages."""
    slots, tokens = deal_heads(num_heads, num_kv_heads, p), 8
    local = [heads(1, n, tokens) for n in (num_heads, num_kv_heads, num_kv_heads)]
    triton_exchange.launch_receive_tokens(triton_exchange.launch_send_heads(slots, local))
    own = [heads(1, n, tokens * p) for n in slots.message_heads(3)]
    message = triton_exchange.launch_send_tokens(slots, own)
    triton_exchange.launch_receive_heads(slots, message, [64] * 3)


def merge(b: int, num_heads: int, tokens: int) -> None:
    out, lse = heads(b, num_heads, tokens), torch.empty(b, num_heads, tokens, device="meta")
    triton_merge.launch_merge(out, lse, heads(b, num_heads, tokens), lse, torch.float32)


@pytest.mark.parametrize(
    "run",
    [
        lambda: flash(2200, 32, 40),  # 70,400 heads of all sequences
        lambda: flash(70_000, 2, 40, documents=True),  # as many masks
        lambda: flash(2, 32, 2**23),  # tiles
        lambda: exchange(8, 2**15, 2**15),
        lambda: merge(2200, 32, 40),
    ],
    ids=["heads", "sequences", "tokens", "exchange", "merge"],
)
def test_grids_are_ones_that_a_device_takes(run: Callable[[], None]) -> None:
    found = grids(run)
    assert found
    for kernel, grid in found:
        assert all(0 < n <= most for n, most in zip(grid, MOST)), (kernel, grid)
    assert max(math.prod(grid) for _, grid in found) > 65_535


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors on the meta device are computed with as those on a GPU: by Triton's kernels."""
    for cache in (flash_runs._POSITIONS, flash_runs._QUERIES, flash_runs._KEYS, flash_runs._TABLES):
        cache.clear()
    monkeypatch.setattr(attention, "_triton_kernels", lambda *_: flash_runs)
    monkeypatch.setattr(head_exchange, "_kernels", lambda *_: triton_exchange)

    def arrived(x: Tensor, axis: Axis, block_id: int) -> collectives.Pending:
        return collectives.Pending([], x, "ring_exchange", axis, block_id, None)

    # No process group takes tensors of this device point to point.
    monkeypatch.setattr(collectives, "ring_exchange", arrived)
    yield
    for cache in (flash_runs._POSITIONS, flash_runs._QUERIES, flash_runs._KEYS, flash_runs._TABLES):
        cache.clear()


def traffic_of(run: Callable[[], object], warm_up: int = 1) -> tuple[Counter[str], Counter[str]]:
    """Copies and reads of a call of ``run`` after others, and its launches by kernel."""
    launched: list[tuple[str, tuple[int, ...]]] = []
    with HostTraffic() as traffic:
        for _ in range(warm_up + 1):
            traffic.found.clear()
            launched = grids(run)
    return traffic.found, Counter(kernel for kernel, _ in launched)


TOKENS, HEADS, KV_HEADS, WIDTH = 1024, 8, 4, 64


def call_of(axis: Axis, method: str, spec: AttentionSpec) -> Callable[[], None]:
    """Forward and backward of attention across the ranks of ``axis``."""
    at, of = Context(spec, axis, collectives.AGREEMENT, KV_HEADS, WIDTH), METHODS[method]
    local = axis.layout(TOKENS).local_len
    q, k = heads(2, HEADS, local, WIDTH), heads(2, KV_HEADS, local, WIDTH)

    def run() -> None:
        out, kept = of.forward(q, k, k, at)
        saved = [q, k, k, out, *kept] if of.keeps_inputs else kept
        of.backward(torch.empty_like(out), saved, at, False)

    return run


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "causal": dict,
    "window": lambda: {"left": 99},
    "documents": lambda: {"document_ids": meta(2, TOKENS, dtype=torch.int64)},
    "padding": lambda: {"key_padding": meta(2, TOKENS, dtype=torch.bool)},
    "dropout": lambda: {"dropout_p": 0.1, "seed": meta(dtype=torch.int64)},
    "bias": lambda: {"bias": meta(1, HEADS, TOKENS, TOKENS, dtype=torch.float32)},
    "sinks": lambda: {"sinks": meta(HEADS, dtype=torch.float32)},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", METHODS)
def test_attention_copies_nothing_to_the_device_and_makes_no_table_again(
    method: str, mask: str, on_device: None
) -> None:
    spec = AttentionSpec(TOKENS, 0.1, right=0, **MASKS[mask]())
    with fake_world(4) as axis:
        copies, launched = traffic_of(call_of(axis, method, spec))
    assert not copies, copies
    assert launched["_queries_kernel"] and launched["_keys_kernel"]
    assert not {"_describe_queries", "_describe_keys", "_find_segments"} & set(launched), launched


def test_a_ring_of_many_ranks_describes_no_mask_again(on_device: None) -> None:
    with fake_world(48) as axis:
        spec = AttentionSpec(TOKENS, 0.1, right=0)
        _, first = traffic_of(call_of(axis, "ring", spec), warm_up=0)
        copies, launched = traffic_of(call_of(axis, "ring", spec), warm_up=0)
    assert first["_describe_keys"] == 48 and first["_describe_queries"] == 1
    assert not copies and launched["_forward_kernel"] == 48
    assert not {"_describe_queries", "_describe_keys", "_find_segments"} & set(launched), launched


def test_a_mask_that_was_written_to_is_described_anew(on_device: None) -> None:
    spec = AttentionSpec(TOKENS, 0.1, right=0, **MASKS["documents"]())
    assert spec.document_ids is not None
    run = call_of(SINGLE, "ring", spec)
    traffic_of(run)
    spec.document_ids.add_(1)
    assert traffic_of(run, warm_up=0)[1]["_describe_keys"] == 1


def test_rows_of_weights_by_index_are_found_on_the_device() -> None:
    rows = tuple(range(1, 2 * MANY_RUNS + 9, 2))
    form = Rows(0, (rows, tuple(-1 if r % 3 == 0 else r - 1 for r in rows)))
    weight = meta(2 * MANY_RUNS + 9, 4, dtype=torch.float32)

    def run() -> None:
        for group in (0, 1):
            form.add(weight, group, form.take(weight, group))

    assert len(form.runs[0]) > MANY_RUNS
    copies, _ = traffic_of(run)
    assert not copies, copies


def test_seeds_of_dropout_go_along_with_a_kernel() -> None:
    copies, _ = traffic_of(lambda: seeds_of(12345, 7, 2, torch.device("meta")), warm_up=0)
    assert not copies, copies
