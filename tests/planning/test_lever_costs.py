"""What levers change of a block's cost, and what the head costs, by shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_costs import GPU, attention, mlp, work

from paradyse.planning.prior import head_cost, prior_cost
from paradyse.strategies import STRATEGIES, count_work
from paradyse.strategies.groups.heads import heads_at_once
from paradyse.strategies.tiles import CHUNK_TOKENS
from paradyse.types import HeadSpec, MaskSpec, Point

LONG = work(131_072, b=1)
X_BYTES = 131_072 // 4 * 256 * 2
"""The residual stream on one of four ranks, in bfloat16."""
FREE = replace(GPU, op_overhead_s=0.0, latency_s=0.0, overlap=0.0)
STREAMED = [s.name for s in STRATEGIES if s.weights == "streamed"]
OTHERS = [s.name for s in STRATEGIES if s.weights != "streamed"]


@pytest.mark.parametrize("strategy", OTHERS)
def test_selective_keeps_what_attention_made(strategy: str) -> None:
    block = attention(kv=2)
    plain, selective, again = (
        prior_cost(block, f"{strategy}{v}", LONG, FREE) for v in ("", "+selective", "+recompute")
    )
    assert again.saved_bytes < selective.saved_bytes < plain.saved_bytes
    lse = 131_072 // 4 * 8 * 4
    own_output = X_BYTES * (strategy == "ulysses_z")  # in heads, beside that on the rank's tokens
    rows = block.num_split_weight_elements // 4 * 2 * (strategy == "megatron_ts")
    assert selective.saved_bytes == 2 * X_BYTES + lse + own_output + rows
    held = plain.saved_bytes + plain.workspace_bytes
    assert selective.saved_bytes + selective.workspace_bytes == pytest.approx(held, abs=2)
    assert plain.time_s < selective.time_s < again.time_s
    # attention is not computed again, which is most of so long a sequence
    assert selective.time_s - plain.time_s < 0.2 * (again.time_s - plain.time_s)


def test_selective_gathers_tokens_again_and_sends_no_keys() -> None:
    ring, ts = (
        [prior_cost(attention(), f"{s}{v}", LONG, FREE).comm_bytes for v in ("", "+selective")]
        for s in ("megatron_cz", "megatron_ts")
    )
    assert ring[0] == ring[1]
    assert ts[1] - ts[0] == 3 * X_BYTES  # of the four ranks the other three's tokens


@pytest.mark.parametrize("strategy", ["megatron_ts", "megatron_cz"])
def test_tiles_need_a_chunk_whatever_the_length(strategy: str) -> None:
    block, n = mlp(matrices=3), [131_072, 262_144]
    costs = [prior_cost(block, f"{strategy}+tiled", work(s, b=1), FREE) for s in n]
    plain = prior_cost(block, strategy, LONG, FREE)
    rows = block.num_split_weight_elements // 4 * 2 * (strategy == "megatron_ts")
    assert [c.saved_bytes for c in costs] == [X_BYTES + rows, 2 * X_BYTES + rows]
    beyond = [c.workspace_bytes - 2 * (c.saved_bytes - rows) for c in costs]
    assert beyond[0] == beyond[1] < plain.workspace_bytes / 3
    again = prior_cost(block, f"{strategy}+selective", LONG, FREE)  # the same, not in chunks
    assert costs[0].comm_bytes == again.comm_bytes
    assert costs[0].time_s == pytest.approx(again.time_s)


def test_one_tile_is_no_longer_than_the_sequence() -> None:
    few = work(512, b=1)
    plain, tiled, again = (
        prior_cost(mlp(), f"megatron_cz{v}", few, FREE) for v in ("", "+tiled", "+recompute")
    )
    assert again.time_s > tiled.time_s > plain.time_s  # without the last linear


def test_tiles_save_memory_without_backward_too() -> None:
    forward = replace(LONG, training=False)
    plain, tiled = (prior_cost(mlp(), f"megatron_cz{v}", forward, FREE) for v in ("", "+tiled"))
    assert tiled.workspace_bytes < plain.workspace_bytes / 2
    assert tiled.saved_bytes == 0 and tiled.time_s == pytest.approx(plain.time_s)


HEAD = HeadSpec(256, 32_768, returned=True)


def test_logits_are_what_the_head_needs() -> None:
    """[tokens, V] in bfloat16, in float32, and logarithms; tiles hold one chunk of rows."""
    whole, tiled = (head_cost(HEAD, v, LONG, FREE) for v in ("", "tiled"))
    logits = 131_072 // 4 * 32_768
    assert whole.workspace_bytes == pytest.approx(logits * 10, rel=0.01)
    chunk = 4096 * 32_768 * 10
    weight = 256 * 32_768
    assert tiled.workspace_bytes + tiled.saved_bytes < chunk + 3 * X_BYTES + 8 * weight
    assert tiled.time_s == pytest.approx(whole.time_s)  # nothing is done again
    tokens = 131_072 // 4 * 256 * 2  # of which logits can be made until the end
    assert whole.left_bytes == tiled.left_bytes == 2 * weight + tokens
    assert head_cost(HEAD, "", LONG, FREE, sharded=True).left_bytes == tokens
    alone = replace(LONG, num_ranks=1)  # gradients are at once in .grad, which is static
    assert head_cost(HEAD, "", alone, FREE).left_bytes == 4 * tokens
    assert head_cost(HEAD, "tiled", replace(LONG, training=False), FREE).left_bytes == 0
    unread = replace(HEAD, returned=False)
    assert head_cost(unread, "tiled", LONG, FREE).left_bytes == 2 * weight


def test_rows_of_the_vocabulary_are_not_gathered() -> None:
    sharded = [head_cost(HEAD, v, work(512, b=1), FREE, sharded=True) for v in ("", "vocabulary")]
    weight = 256 * 32_768 * 2 * 3 // 4
    assert sharded[0].comm_bytes == 3 * weight
    assert sharded[1].comm_bytes < weight / 10  # few tokens
    long = [head_cost(HEAD, v, work(2**22, b=1), FREE, sharded=True) for v in ("", "vocabulary")]
    assert long[1].comm_bytes > long[0].comm_bytes
    both = head_cost(HEAD, "tiled+vocabulary", LONG, FREE, sharded=True)
    alone = head_cost(HEAD, "vocabulary", LONG, FREE, sharded=True)
    assert both.workspace_bytes < alone.workspace_bytes / 8


def test_rows_of_the_embedding_are_not_gathered() -> None:
    few, table = work(512, b=1), 256 * 32_768
    both = replace(HEAD, num_looked_up=table)
    for levers in ("", "tiled"):
        plain, looked_up = (head_cost(h, levers, few, FREE, sharded=True) for h in (HEAD, both))
        assert looked_up.comm_bytes - plain.comm_bytes == 2 * table * 2 * 3 // 4
        assert looked_up.time_s > plain.time_s
    plain, looked_up = (head_cost(h, "vocabulary", few, FREE, sharded=True) for h in (HEAD, both))
    assert 0 < looked_up.comm_bytes - plain.comm_bytes < table / 10
    whole = [head_cost(h, v, few, FREE) for h in (HEAD, both) for v in ("", "vocabulary")]
    assert whole[:2] == whole[2:], "they are there"


def test_more_tokens_never_cost_less() -> None:
    points = [f"{s}+{v}" for s in OTHERS for v in ("recompute", "selective")]
    for point in [*points, *(f"{s}+recompute" for s in STREAMED)]:
        costs = [prior_cost(attention(), point, work(n), FREE) for n in (7, 512, 65_536)]
        assert all(a.time_s <= b.time_s for a, b in zip(costs, costs[1:]))
        assert all(0 < a.saved_bytes <= b.saved_bytes for a, b in zip(costs, costs[1:]))
    for levers in ("", "tiled", "vocabulary", "tiled+vocabulary"):
        costs = [head_cost(HEAD, levers, work(n), FREE) for n in (7, 512, 65_536)]
        assert all(0 < a.time_s <= b.time_s for a, b in zip(costs, costs[1:]))


def test_one_rank_sends_nothing() -> None:
    alone = work(4096, p=1)
    for point in ("replicated", "replicated+recompute"):
        for block in (attention(), mlp()):
            assert prior_cost(block, point, alone, GPU).comm_bytes == 0
    assert head_cost(HEAD, "", alone, GPU).comm_bytes == 0


@pytest.mark.parametrize("point", ["megatron_cz", "metp+recompute", "ulysses_z"])
def test_what_goes_to_the_host_is_on_the_device_of_two_blocks(point: str) -> None:
    plain, moved = (prior_cost(attention(), f"{point}{v}", LONG, FREE) for v in ("", "+offload"))
    assert (moved.saved_bytes, moved.host_bytes) == (0, plain.saved_bytes)
    assert moved.workspace_bytes == plain.workspace_bytes + 2 * plain.saved_bytes
    assert plain.host_bytes == 0
    forward = replace(LONG, training=False)
    assert prior_cost(attention(), f"{point}+offload", forward, FREE) == prior_cost(
        attention(), point, forward, FREE
    )


def test_copies_hide_behind_the_block_as_far_as_they_can() -> None:
    block, machines = mlp(), [replace(FREE, host_bandwidth=b) for b in (1e15, 1e9)]
    plain = prior_cost(block, "megatron_cz", LONG, FREE)
    fast, slow = (prior_cost(block, "megatron_cz+offload", LONG, m) for m in machines)
    read_and_written = 2 * plain.saved_bytes / FREE.memory_bandwidth
    assert fast.time_s == pytest.approx(plain.time_s + read_and_written)
    assert slow.time_s == pytest.approx(2 * plain.saved_bytes / 1e9, rel=0.01)


@pytest.mark.parametrize("p", [1, 4])
def test_chunks_need_a_chunk_whatever_the_length(p: int) -> None:
    block, point = attention(kv=2), "ulysses_z+chunked" if p > 1 else "replicated+chunked"
    costs = [prior_cost(block, point, work(n, b=1, p=p), FREE) for n in (2**20, 2**21)]
    x_bytes = 2**20 // p * 256 * 2
    assert [c.saved_bytes for c in costs] == [x_bytes, 2 * x_bytes]
    beyond = [c.workspace_bytes - 2 * c.saved_bytes for c in costs]
    plain = prior_cost(block, Point.parse(point).strategy, work(2**20, b=1, p=p), FREE)
    assert beyond[0] == beyond[1] < plain.workspace_bytes
    lse = 2**20 // p * 8 * 4
    own_kv = 2 if p == 1 else 4  # a KV head for each rank
    qkv_and_out = x_bytes * (2 + 2 * own_kv / 8)
    assert costs[0].host_bytes == qkv_and_out + lse
    again = prior_cost(block, point.replace("+", "+recompute+"), work(2**20, b=1, p=p), FREE)
    assert (again.saved_bytes, again.host_bytes) == (x_bytes, 0)
    assert again.workspace_bytes == costs[0].workspace_bytes and again.time_s > costs[0].time_s


def test_keys_are_fetched_for_every_chunk_of_queries_that_sees_them() -> None:
    """Under a causal mask half of the pairs of chunks, n (n + 1) / 2; in a window two a chunk."""
    num_bytes, n = list[float](), 32
    seq_len = n * CHUNK_TOKENS * 4
    for mask in (MaskSpec(right=0), MaskSpec(left=1000, right=0), None):
        forward, backward = count_work(
            attention(mask=mask), "ulysses_z+chunked", work(seq_len, b=1), sharded=True
        ).copied_bytes
        x_bytes, lse = seq_len // 4 * 256 * 2, seq_len // 4 * 8 * 4
        num_bytes += [(forward - lse) / x_bytes, (backward - lse) / x_bytes]
    pairs = [n * (n + 1) / 2, 2 * n - 1, n * n]
    for i, count in enumerate(pairs):
        fetched = 2 * count / n  # keys and values; in backward sums of 32 bits come and go too
        assert num_bytes[2 * i] == pytest.approx(6 + fetched)
        assert num_bytes[2 * i + 1] == pytest.approx(7 + 5 * fetched)


def test_queries_of_chunks_are_waited_for_however_long_attention_takes() -> None:
    point, bandwidth = "ulysses_z+chunked", 1e10
    slow = replace(FREE, attention_flops=1e3)  # beside which no copy of keys takes any time
    found = count_work(attention(), point, LONG, sharded=True)
    assert all(0 < w < c for w, c in zip(found.waited_bytes, found.copied_bytes, strict=True))
    times = [
        prior_cost(attention(), point, LONG, replace(slow, host_bandwidth=b)).time_s
        for b in (bandwidth, 1e30)
    ]
    assert times[0] - times[1] == pytest.approx(sum(found.waited_bytes) / bandwidth, rel=1e-3)


def test_two_chunks_take_longer_than_computing_attention_again() -> None:
    """As an H100 said of a Llama of 1.1 billion parameters (``lever_work.chunked``)."""
    rates = {"matmul_flops": 6.2e14, "attention_flops": 4.6e14, "memory_bandwidth": 2.5e12}
    h100 = replace(FREE, **rates, host_bandwidth=5.5e10)
    block = attention(h=2048, heads=32, kv=4)
    ratios = []
    for n in (2, 32):
        work_ = work(n * CHUNK_TOKENS, b=1, p=1)
        chunked, again = (
            prior_cost(block, f"replicated+{v}", work_, h100).time_s
            for v in ("chunked", "recompute")
        )
        ratios.append(chunked / again)
    assert ratios[0] > 1.3 and ratios[1] < 0.95


def test_copies_of_chunks_hide_behind_long_attention_alone() -> None:
    link = replace(FREE, host_bandwidth=2.5e10)
    beyond = []
    for n in (2**12, 2**16, 2**20):
        plain, chunked = (
            prior_cost(attention(kv=2), f"ulysses_z{v}", work(n, b=1), link)
            for v in ("", "+chunked")
        )
        assert chunked.time_s > plain.time_s  # a sequence of one chunk never gains
        beyond.append(chunked.time_s / plain.time_s)
    assert beyond[0] > 1.5 and beyond[2] < 1.1


def test_chunks_with_offload_keep_nothing_on_the_device() -> None:
    chunked, both = (
        prior_cost(attention(), f"ulysses_z+chunked{v}", LONG, FREE) for v in ("", "+offload")
    )
    assert both.saved_bytes == 0
    assert both.host_bytes == chunked.host_bytes + chunked.saved_bytes
    assert both.workspace_bytes == chunked.workspace_bytes + 2 * chunked.saved_bytes
    forward = prior_cost(attention(), "ulysses_z+chunked", replace(LONG, training=False), FREE)
    assert (forward.saved_bytes, forward.host_bytes) == (0, 0)


@pytest.mark.parametrize("lever, at_once", [("chunked", True), ("recompute", False)])
def test_heads_of_chunks_go_at_once(lever: str, at_once: bool) -> None:
    block, point = attention(1024, 32), f"ulysses_z+{lever}"
    found = prior_cost(block, point, LONG, GPU).time_s
    with heads_at_once():
        slower = prior_cost(block, point, LONG, GPU).time_s
    assert (found == slower) if at_once else (found < slower)
