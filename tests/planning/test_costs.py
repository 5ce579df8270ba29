"""The analytic prior: its bytes are the published formulas, and it falls and rises where it
must."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import RankPool

from paradyse.distributed import collectives
from paradyse.distributed.axis import resolve_axis
from paradyse.graph.attention_call import AttentionCall
from paradyse.planning.costs import BlockCost, Link, Machine, peak_bytes
from paradyse.planning.prior import prior_cost
from paradyse.strategies import canonical_strategy
from paradyse.strategies.attention.operators import attend_across_ranks
from paradyse.strategies.groups import heads
from paradyse.strategies.work import count_visible_pairs
from paradyse.types import ATTENTION_STRATEGIES, EXPERTS, BlockSpec, MaskSpec, Workload

CAUSAL = MaskSpec(right=0)
GPU = Machine(3e14, 2e12, 1e-5, 2e11, overlap=0.9)
"""Round numbers of an A100 with NVLink: 312 TFLOP/s, 2 TB/s, 300 GB/s each way (data sheet)."""


def attention(h: int = 256, heads: int = 8, kv: int | None = None, **changes: Any) -> BlockSpec:
    kv = heads if kv is None else kv
    d = h // heads
    weights = h * d * (2 * heads + 2 * kv)
    block = BlockSpec(
        "layers.0.attention",
        "attention",
        0,
        "a",
        hidden=h,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=d,
        num_weight_elements=weights,
        num_split_weight_elements=weights,
        mask=CAUSAL,
    )
    return replace(block, **changes)


def mlp(h: int = 256, width: int = 1024, matrices: int = 2) -> BlockSpec:
    n = matrices * h * width
    return BlockSpec(
        "layers.0.mlp",
        "mlp",
        0,
        "m",
        hidden=h,
        intermediate=width,
        num_weight_elements=n,
        num_split_weight_elements=n,
    )


def experts(num: int = 8, top: int = 2, h: int = 256, width: int = 512) -> BlockSpec:
    """Gated ones, and their router."""
    n = 3 * num * h * width
    return replace(
        mlp(h, width),
        kind=EXPERTS,
        num_experts=num,
        experts_per_token=top,
        num_weight_elements=n + num * h,
        num_split_weight_elements=n,
    )


def work(s: int, p: int = 4, b: int = 2, training: bool = True) -> Workload:
    return Workload(b, s, torch.bfloat16, training, p)


def layer_bytes(strategy: str, w: Workload, h: int, sharded: bool) -> int:
    blocks = attention(h), mlp(h, 4 * h)
    return sum(prior_cost(b, strategy, w, GPU, sharded).comm_bytes for b in blocks)


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize(("b", "s", "h"), [(1, 1024, 256), (3, 4096, 512)])
def test_forward_bytes_of_a_layer_are_as_published(p: int, b: int, s: int, h: int) -> None:
    """DESIGN 4.7: multi-head attention, a 4h MLP, sharded weights; elements times (p-1)/p."""
    w = work(s, p, b, training=False)
    elements = {
        "megatron_ts": 4 * b * s * h,
        "megatron_cz": 12 * h * h + 2 * b * s * h,
        "metp": 12 * h * h + 2 * b * s * h,
        "colossal_z": 12 * h * h + 2 * b * s * h,
        "ulysses_z": 12 * h * h + 4 * b * s * h // p,
    }
    for strategy, n in elements.items():
        assert layer_bytes(strategy, w, h, sharded=True) == n * 2 * (p - 1) // p, strategy
    if p > 1:
        for strategy in ("megatron_cz", "ulysses_z", "metp"):  # whole weights need no gathering
            weights = 12 * h * h * 2 * (p - 1) // p
            whole = layer_bytes(strategy, w, h, sharded=False)
            assert whole == layer_bytes(strategy, w, h, sharded=True) - weights


def test_gradients_of_whole_weights_are_all_reduced() -> None:
    p, h, s = 4, 256, 1024
    w, block = work(s, p), mlp(h)
    share = block.num_weight_elements * 2 * (p - 1) // p
    assert prior_cost(block, "megatron_cz", w, GPU).comm_bytes == 2 * share
    tokens = 4 * w.batch * s * h * 2 * (p - 1) // p
    assert prior_cost(block, "megatron_ts", w, GPU).comm_bytes == 2 * share + tokens
    assert prior_cost(block, "megatron_cz", w, GPU, sharded=True).comm_bytes == 3 * share


def test_weights_that_several_ranks_take_travel_like_those_that_are_not_split() -> None:
    """A KV head for two ranks each: its rows are gathered twice, and their gradients added up, as
    those of all whole weights are."""
    p, h = 4, 256
    apart = attention(h, heads=8, kv=2)
    of_keys = 2 * 2 * apart.head_dim * h
    shared = replace(apart, num_shared_weight_elements=of_keys)
    for sharded, messages in ((True, 3), (False, 0)):
        own, both = (
            prior_cost(b, "megatron_ts", work(1024, p), GPU, sharded).comm_bytes
            for b in (apart, shared)
        )
        assert both - own == messages * of_keys * 2 * (p - 1) // p


@pytest.mark.parametrize("strategy", ["megatron_ts", "metp", "ulysses_z"])
def test_vectors_of_blocks_in_one_message_travel_once(strategy: str) -> None:
    """Gathered before forward and kept, where a gather of the block's own comes again in backward.
    Where the matrices travel as well, the vectors go with them."""
    p, h = 4, 256
    matrices = mlp(h)
    n = matrices.num_weight_elements
    apart = replace(matrices, num_weight_elements=n + h, num_split_weight_elements=n)
    together = replace(apart, shares_vectors=True)
    none, each, once = (
        prior_cost(b, strategy, work(1024, p), GPU, sharded=True)
        for b in (replace(apart, num_weight_elements=n), apart, together)
    )
    vector = h * 2 * (p - 1) // p
    assert each.comm_bytes - none.comm_bytes == 3 * vector
    travels = 3 if strategy == "ulysses_z" else 2
    assert once.comm_bytes - none.comm_bytes == travels * vector
    if strategy == "ulysses_z":
        assert once == each
    else:
        assert once.saved_bytes - each.saved_bytes == h * 2
        assert once.ahead_bytes == none.ahead_bytes
    if strategy == "megatron_ts":
        assert each.parts.weights_s > 3 * GPU.latency_s > once.parts.weights_s == 0


@pytest.mark.parametrize("strategy", ["megatron_cz", "metp"])
def test_gradients_are_counted_in_the_dtype_that_they_are_added_up_in(strategy: str) -> None:
    """Gathered in bfloat16 in forward and in backward, added up in float32. Of groups those of the
    last one of the block behind are there as well."""
    w, block = work(1024, 4), mlp()
    n, wide = block.num_weight_elements, replace(w, reduce_dtype=torch.float32)
    narrow, cost = (prior_cost(block, strategy, x, GPU, sharded=True) for x in (w, wide))
    assert cost.comm_bytes - narrow.comm_bytes == n * 2 * 3 // 4
    last = n * 2 // 4 if strategy == "metp" else 0
    assert cost.workspace_bytes - narrow.workspace_bytes == n * 2 + last
    assert cost.time_s > narrow.time_s
    for_whole = (prior_cost(block, strategy, x, GPU) for x in (w, wide))
    assert len(set(for_whole)) == 1


def test_experts_send_rows_where_they_are_apart_and_weights_where_they_are_not() -> None:
    """A row for each of a token's experts, there and back, in backward their gradients; and once
    how many rows each expert has."""
    p, h, s, top, itemsize = 4, 256, 1024, 2, 2
    block = experts(top=top, h=h)
    router = block.num_weight_elements - block.num_split_weight_elements
    w = work(s, p, training=False)
    counts = (p - 1) * block.num_experts * 8

    def sent(elements: int) -> int:
        return elements * itemsize * (p - 1) // p

    rows = w.batch * s // p * top * h
    apart = prior_cost(block, "megatron_ts", w, GPU, sharded=True)
    assert apart.comm_bytes == sent(2 * rows) + counts + sent(router)
    trained = prior_cost(block, "megatron_ts", work(s, p), GPU, sharded=True)
    assert trained.comm_bytes == sent(4 * rows) + counts + sent(3 * router)
    for name in ("megatron_cz", "metp"):
        gathered = prior_cost(block, name, w, GPU, sharded=True)
        assert gathered.comm_bytes == sent(block.num_weight_elements)
    names = {canonical_strategy(EXPERTS, name) for name in ATTENTION_STRATEGIES}
    assert names == {"megatron_ts", "megatron_cz", "metp"}


def test_a_token_costs_as_much_as_the_experts_that_it_has() -> None:
    far = replace(
        GPU, bandwidth_bytes=1e30, memory_bandwidth=1e30, op_overhead_s=0.0, latency_s=0.0
    )
    times = [
        prior_cost(experts(num, top), "megatron_cz", work(1 << 16), far).time_s
        for num, top in ((8, 1), (8, 4), (64, 4))
    ]
    assert times[1] == pytest.approx(4 * times[0], rel=0.02)  # the router is for all of them
    assert times[2] == pytest.approx(times[1], rel=0.05)


def test_few_tokens_go_to_their_experts_and_many_have_experts_come() -> None:
    block = experts(h=4096, width=14336)

    def best(s: int) -> str:
        costs = {n: prior_cost(block, n, work(s), GPU, True) for n in ATTENTION_STRATEGIES}
        return min(costs, key=lambda n: costs[n].time_s)

    assert best(64) == "megatron_ts"
    assert canonical_strategy(EXPERTS, best(1 << 17)) == "megatron_cz"


def test_grouped_kv_heads_and_padding_change_the_bytes() -> None:
    p, s, b, h = 2, 1024, 2, 256
    w = work(s, p, b, training=False)
    ring = prior_cost(attention(h, 8, 2), "megatron_cz", w, GPU).comm_bytes
    assert ring == 2 * b * s * 64 * 2 * (p - 1) // p  # 2 KV heads of width 32
    exchange = prior_cost(attention(h, 8, 2), "ulysses_z", w, GPU).comm_bytes
    assert exchange == (2 * 256 + 2 * 64) * b * s // p * 2 * (p - 1) // p
    odd = prior_cost(attention(h, 8, 2), "megatron_cz", work(1021, p, b, training=False), GPU)
    assert odd.comm_bytes == ring  # 1021 tokens travel padded to 1024


@pytest.mark.parametrize("s", [1, 5, 12, 13])
@pytest.mark.parametrize(
    "mask",
    [
        None,
        MaskSpec(),
        CAUSAL,
        MaskSpec(left=3, right=0),
        MaskSpec(left=2, right=4),
        MaskSpec(right=0, chunk=4),
        MaskSpec(left=2, chunk=5),
        MaskSpec(left=100, right=0),
    ],
)
def test_visible_pairs_are_counted_exactly(mask: MaskSpec | None, s: int) -> None:
    m = mask or MaskSpec()
    i, j = torch.arange(s)[:, None], torch.arange(s)[None]
    seen = torch.ones(s, s, dtype=torch.bool)
    if m.left is not None:
        seen &= j >= i - m.left
    if m.right is not None:
        seen &= j <= i + m.right
    if m.chunk is not None:
        seen &= i // m.chunk == j // m.chunk
    assert count_visible_pairs(mask, s) == int(seen.sum())


@pytest.mark.parametrize("strategy", ATTENTION_STRATEGIES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("block", [attention(), attention(kv=2), mlp(), mlp(matrices=3)])
def test_more_tokens_never_cost_less(
    strategy: str, training: bool, sharded: bool, block: BlockSpec
) -> None:
    lengths = [1, 7, 64, 65, 512, 4096, 100_000]
    costs = [prior_cost(block, strategy, work(s, training=training), GPU, sharded) for s in lengths]
    for a, b in zip(costs, costs[1:]):
        assert 0 < a.time_s <= b.time_s
        assert a.workspace_bytes <= b.workspace_bytes
        assert a.comm_bytes <= b.comm_bytes
        assert a.saved_bytes <= b.saved_bytes
    assert training == (costs[0].saved_bytes > 0)
    assert costs[0] == prior_cost(block, strategy, work(1, training=training), GPU, sharded)


@pytest.mark.parametrize("strategy", ATTENTION_STRATEGIES)
def test_training_costs_more_than_a_forward(strategy: str) -> None:
    for block in (attention(), mlp()):
        forward = prior_cost(block, strategy, work(4096, training=False), GPU)
        step = prior_cost(block, strategy, work(4096), GPU)
        assert step.time_s > 2 * forward.time_s
        assert step.comm_bytes > forward.comm_bytes


def best(w: Workload, blocks: tuple[BlockSpec, ...], m: Machine, sharded: bool) -> str:
    def seconds(strategy: str) -> float:
        return sum(prior_cost(b, strategy, w, m, sharded).time_s for b in blocks)

    return min(ATTENTION_STRATEGIES, key=seconds)


def test_which_strategy_wins_crosses_with_length() -> None:
    """Weights' bytes rule short sequences, tokens' bytes long ones."""
    layer = attention(4096, 32), mlp(4096, 16384)
    for sharded in (True, False):
        short, long = (best(work(s, 8, 1), layer, GPU, sharded) for s in (512, 131_072))
        assert short == "megatron_ts" or not sharded  # else gradients of all are summed anyway
        assert long in ("ulysses_z", "megatron_cz")
    # With whole weights at hand a forward moves nothing but tokens, and megatron_ts the most.
    assert best(work(16_384, 8, 1, training=False), layer, GPU, False) == "ulysses_z"


def test_latency_decides_small_messages() -> None:
    """A ring sends p - 1 messages where Ulysses sends few: with dear messages it loses."""
    slow = replace(GPU, latency_s=1e-2)
    w = work(64, 8, training=False)
    ring, exchange, metp = (
        prior_cost(attention(), s, w, slow).time_s for s in ("megatron_cz", "ulysses_z", "metp")
    )
    assert exchange < ring < metp
    assert metp > 7 * ring  # p times more messages
    links = replace(GPU, links={"ring_exchange": Link(1.0, 1e12)})
    assert prior_cost(attention(), "megatron_cz", w, links).time_s > 7
    assert prior_cost(attention(), "ulysses_z", w, links).time_s < 1


def test_metp_needs_the_least_memory_and_recomputes() -> None:
    for block in (attention(kv=4), mlp(matrices=3)):
        w = work(65_536, 4)
        costs = {s: prior_cost(block, s, w, GPU) for s in ATTENTION_STRATEGIES}
        memory = {s: c.saved_bytes for s, c in costs.items()}
        assert min(memory, key=memory.__getitem__) == "metp"
        assert costs["metp"].time_s > costs["megatron_cz"].time_s
        assert costs["metp"].workspace_bytes < costs["megatron_ts"].workspace_bytes


def test_dense_rows_make_colossal_the_most_expensive_under_a_causal_mask() -> None:
    w = work(32_768, 4)
    costs = {s: prior_cost(attention(), s, w, GPU) for s in ATTENTION_STRATEGIES}
    assert max(costs, key=lambda s: costs[s].time_s) == "colossal_z"
    scores = 4 * w.batch * 8 * (32_768 // 4) * 32_768
    assert costs["colossal_z"].workspace_bytes > 2 * scores


def test_a_window_is_cheaper_than_a_causal_mask() -> None:
    w = work(65_536)
    window = attention(mask=MaskSpec(left=127, right=0))
    full = attention(mask=None)
    for s in ("megatron_ts", "megatron_cz", "ulysses_z", "metp"):
        times = [prior_cost(b, s, w, GPU).time_s for b in (window, attention(), full)]
        assert times == sorted(times)
        assert times[0] < 0.7 * times[1]


def test_the_z_names_are_one_variant_of_an_mlp() -> None:
    costs = {s: prior_cost(mlp(), s, work(512), GPU) for s in ATTENTION_STRATEGIES}
    assert costs["megatron_cz"] == costs["ulysses_z"] == costs["colossal_z"]
    names = {canonical_strategy("mlp", s) for s in ATTENTION_STRATEGIES}
    assert names == {"megatron_ts", "megatron_cz", "metp"}
    assert {canonical_strategy("attention", s) for s in ATTENTION_STRATEGIES} == set(
        ATTENTION_STRATEGIES
    )


def test_peak_is_the_most_held_at_any_moment() -> None:
    wide, narrow = BlockCost(1.0, 10, 300, 0), BlockCost(1.0, 20, 100, 0)
    assert peak_bytes([wide, narrow]) == 10 + 300  # the rest is gone by then
    assert peak_bytes([narrow, wide]) == 30 + 300
    gradients = [replace(c, left_bytes=50) for c in (wide, narrow)]
    assert peak_bytes(gradients) == 10 + 50 + 300
    loss = BlockCost(1.0, 7, 400, 0)
    assert peak_bytes([wide, narrow], loss) == 7 + 30 + 400
    assert peak_bytes([]) == 0


def test_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown strategy 'ring'; legal: megatron_ts,"):
        prior_cost(attention(), "ring", work(8), GPU)


def sent_by_operator(
    method: str, heads: tuple[int, int], lengths: tuple[int, ...], dtype: torch.dtype
) -> list[int]:
    """Bytes this rank sent in a forward, and in a forward and a backward; ``lengths`` are of the
    tokens, and of the keys where they are of another sequence."""
    axis = resolve_axis()
    own, keys = (axis.layout(n).local_len for n in (lengths[0], lengths[-1]))
    q, k, v = (
        torch.randn(2, n, local, 16, dtype=dtype, requires_grad=True)
        for n, local in ((heads[0], own), (heads[1], keys), (heads[1], keys))
    )
    block_id = collectives.register_block(axis, "block")
    info = torch.tensor([lengths[0], block_id, *lengths[1:]])
    right = 0 if len(lengths) == 1 else -1
    call = AttentionCall(q, k, v, right=right, scale=0.25, info=info)
    out, _ = attend_across_ranks(call, method, axis)
    sent = collectives.traffic(axis, block_id).sent_bytes
    forward = sum(sent.values())
    out.sum().backward()
    return [forward, sum(sent.values())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("lengths", [(41,), (41, 7), (5, 90)])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(
    ("method", "strategy"), [("ring", "megatron_cz"), ("ulysses", "ulysses_z")]
)
def test_predicted_bytes_of_the_core_are_those_that_are_counted(
    pool3: RankPool,
    method: str,
    strategy: str,
    heads: tuple[int, int],
    lengths: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    block = replace(
        attention(heads[0] * 16, *heads), num_weight_elements=0, num_split_weight_elements=0
    )
    if len(lengths) > 1:
        block = replace(block, mask=MaskSpec(), keys=1)

    def predicted(training: bool) -> int:
        others = tuple((2, n) for n in lengths[1:])
        w = Workload(2, lengths[0], dtype, training, 3, others=others)
        return prior_cost(block, strategy, w.of(block), GPU).comm_bytes

    want = [predicted(False), predicted(True)]
    assert pool3.run(sent_by_operator, method, heads, lengths, dtype) == [want] * 3


def test_blocks_of_an_encoder_cost_what_its_length_costs() -> None:
    """A plan is for the lengths of all sequences: each block counts with its own."""
    w = replace(work(64), others=((2, 4096),))
    encoder, cross = (
        replace(attention(mask=None), sequence=1),
        replace(attention(mask=None), keys=1),
    )
    for s in ATTENTION_STRATEGIES:
        want = prior_cost(attention(mask=None), s, replace(work(4096), batch=2), GPU)
        assert prior_cost(encoder, s, w.of(encoder), GPU) == want
        decoder, seen = prior_cost(attention(), s, w, GPU), prior_cost(cross, s, w.of(cross), GPU)
        assert decoder.time_s < seen.time_s < want.time_s
        peaks = [c.saved_bytes + c.workspace_bytes for c in (decoder, seen, want)]
        assert peaks == sorted(set(peaks))
    assert w.of(attention()) is w and w.lengths == "64 and 4096"


SLOW = replace(GPU, latency_s=0.0, bandwidth_bytes=1e9, op_overhead_s=0.0)


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seq_len", [256, 1 << 18])
def test_weights_travel_while_blocks_compute(seq_len: int, overlap: float) -> None:
    """As far as there is something to hide behind; tokens hide behind the block's own linears."""
    w = Workload(1, seq_len, torch.bfloat16, True, 2)
    far = replace(SLOW, bandwidth_bytes=1e30)

    def time_s(point: str, machine: Machine) -> float:
        return prior_cost(mlp(), point, w, machine, sharded=True).time_s

    machine = replace(SLOW, overlap=overlap)
    compute_s = time_s("megatron_cz", far)
    message_s = prior_cost(mlp(), "megatron_cz", w, SLOW, sharded=True).comm_bytes / 1e9
    hidden_s = overlap * min(compute_s, message_s)
    assert (message_s > compute_s) == (seq_len == 256)
    assert time_s("megatron_cz", machine) == pytest.approx(compute_s + message_s - hidden_s)
    block, x_bytes = mlp(), seq_len // 2 * mlp().hidden * 2
    # a rank has half of the weights, and half of the tokens are its own
    each_s = 2 * (seq_len // 2) * (block.num_weight_elements / 4) / SLOW.matmul_flops
    # forward up and down; backward down, with the weight's gradient of own tokens, and up, with
    # that of all
    meanwhile = each_s, each_s, 2 * each_s, 3 * each_s
    hidden_s = overlap * sum(min(x_bytes / 1e9, s) for s in meanwhile)
    alone_s = time_s("megatron_ts", replace(SLOW, overlap=0.0))
    assert time_s("megatron_ts", machine) == pytest.approx(alone_s - hidden_s)


def test_few_tokens_wait_for_their_messages() -> None:
    """Too few to be multiplied apart."""
    w = Workload(1, 128, torch.bfloat16, True, 2)
    alone, hiding = (
        prior_cost(mlp(), "megatron_ts", w, replace(SLOW, overlap=o)).time_s for o in (0.0, 1.0)
    )
    assert alone == hiding


def test_a_ring_hides_behind_attention_and_weights_behind_the_rest() -> None:
    w = Workload(1, 1 << 16, torch.bfloat16, True, 4)
    of = {
        o: prior_cost(attention(), "megatron_cz", w, replace(SLOW, overlap=o)) for o in (0.0, 1.0)
    }
    far = prior_cost(attention(), "megatron_cz", w, replace(SLOW, bandwidth_bytes=1e30))
    sharded = prior_cost(attention(), "megatron_cz", w, replace(SLOW, overlap=1.0), sharded=True)
    assert of[0.0].time_s > of[1.0].time_s >= far.time_s
    assert sharded.time_s <= of[0.0].time_s


@pytest.mark.parametrize("s, kv, gains", [(8192, 32, True), (8192, 4, False), (64, 32, False)])
def test_attention_in_turns_hides_its_exchange(s: int, kv: int, gains: bool) -> None:
    block = attention(4096, 32, kv)

    def time_s(overlap: float) -> float:
        machine = replace(GPU, overlap=overlap)
        return prior_cost(block, "ulysses_z", work(s), machine).time_s

    turned = time_s(0.9), time_s(0.0)
    with heads.heads_at_once():
        at_once = time_s(0.9), time_s(0.0)
    assert (turned[0] < at_once[0], turned[1] > at_once[1]) == (gains, gains)
