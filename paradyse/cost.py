"""Analytic prior: time and memory of one block under each strategy, from its shapes and the
machine.

time = operations / rate + bytes / bandwidth + latency per message + overhead per operator, forward
and, when training, backward. The bytes each strategy sends are those of REFERENCES (DESIGN 4.7),
recomputed from the block's own shapes: grouped KV heads, gated MLPs, windows, padding of the
sequence and of the heads.

Peak memory of a plan (DESIGN 6) is static + sum of what blocks save + the largest workspace +
communicators: ``peak_bytes``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paradyse.types import ATTENTION_STRATEGIES, BlockSpec, MaskSpec, Workload

Z_STRATEGIES = ("megatron_cz", "ulysses_z", "colossal_z")
"""Strategies that hold tokens local and weights whole; for an MLP they are one variant."""

ATTENTION_BACKWARD = 2.5
"""Matmuls of flash attention, backward over forward: five against two (arXiv 2205.14135)."""

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ring_exchange")
"""Names that ``paradyse.comm`` books bytes under, and ``Machine.links`` is keyed by."""


@dataclass(frozen=True)
class Link:
    """How long one collective takes: ``latency_s + sent / bandwidth_bytes``."""

    latency_s: float
    """Seconds for an empty message."""
    bandwidth_bytes: float
    """Bytes per second that a rank sends."""


@dataclass(frozen=True)
class Machine:
    """Rates of one rank while all ranks work. ``measure_machine`` fills it; equal on all ranks."""

    matmul_flops: float
    """Floating-point operations per second of a large matmul in the workload's dtype."""
    memory_bandwidth: float
    """Bytes per second read plus written by an elementwise operator."""
    latency_s: float
    """Seconds of a small collective; for those that ``links`` does not list."""
    bandwidth_bytes: float
    """Bytes per second a rank sends; for those collectives that ``links`` does not list."""
    attention_flops: float | None = None
    """Operations per second of the attention kernel, forward; None: as a matmul."""
    op_overhead_s: float = 5e-6
    """Seconds to launch one operator."""
    overlap: float = 0.0
    """Share of a ring's attention time that its messages can hide behind: 0 to 1."""
    links: Mapping[str, Link] = field(default_factory=dict)
    """Per collective (``COLLECTIVES``), where measured."""
    capacity_bytes: int | None = None
    """Memory of a rank less a reserve; None: unknown."""
    communicator_bytes: int = 0
    """Memory a process group takes on its device."""
    source: str = ""
    """Where the numbers come from."""

    def link(self, collective: str) -> Link:
        return self.links.get(collective) or Link(self.latency_s, self.bandwidth_bytes)


@dataclass(frozen=True)
class BlockCost:
    """Predicted for one block on one rank, forward and, when training, backward."""

    time_s: float
    saved_bytes: int
    """Held from the block's forward to its backward; 0 when not training."""
    workspace_bytes: int
    """Held only while the block runs."""
    comm_bytes: int
    """Sent by this rank."""


@dataclass
class _Tally:
    """What one block does on one rank."""

    flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    num_ops: float = 0.0
    sent_bytes: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    saved_bytes: float = 0.0
    workspace_bytes: float = 0.0

    def send(self, collective: str, num_bytes: float, messages: float = 1) -> None:
        """``num_bytes`` in all, in so many messages."""
        if messages:
            self.sent_bytes[collective] += num_bytes  # type: ignore[assignment]
            self.messages[collective] += messages  # type: ignore[assignment]

    def time_s(self, m: Machine) -> float:
        attention_s = self.attention_flops / (m.attention_flops or m.matmul_flops)
        compute_s = (
            self.flops / m.matmul_flops + self.moved_bytes / m.memory_bandwidth + attention_s
        )
        comm_s = 0.0
        for name, count in self.messages.items():
            link = m.link(name)
            wait_s = count * link.latency_s + self.sent_bytes[name] / link.bandwidth_bytes
            comm_s += (
                max(0.0, wait_s - m.overlap * attention_s) if name == "ring_exchange" else wait_s
            )
        return compute_s + comm_s + self.num_ops * m.op_overhead_s


def canonical_strategy(kind: str, strategy: str) -> str:
    """The variant that ``strategy`` means: for an MLP the Z names are one."""
    return Z_STRATEGIES[0] if kind == "mlp" and strategy in Z_STRATEGIES else strategy


def local_len(seq_len: int, num_ranks: int) -> int:
    """Tokens a rank holds of one sequence, padding included (``mesh.TokenLayout.local_len``)."""
    return seq_len if num_ranks == 1 else 2 * -(-seq_len // (2 * num_ranks))


def visible_pairs(mask: MaskSpec | None, seq_len: int) -> int:
    """Pairs (query, key) of a sequence that may see each other; padding and documents all seen."""

    def one_side(n: int, reach: int | None) -> int:
        reach = n - 1 if reach is None else min(max(reach, 0), n - 1)
        return reach * n - reach * (reach + 1) // 2

    def stretch(n: int) -> int:
        return n + one_side(n, mask.left) + one_side(n, mask.right) if mask and n else n * n

    chunk = min(mask.chunk, seq_len) if mask and mask.chunk else seq_len
    return seq_len // chunk * stretch(chunk) + stretch(seq_len % chunk)


def heads_per_rank(num_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[int, int]:
    """Query and KV heads of one of p groups, padding included.

    KV heads are padded to a multiple of p and queries follow at the same ratio; with fewer KV
    heads than ranks, queries are padded and each rank holds the KV heads of its own.
    """
    if num_kv_heads >= num_ranks:
        kv = -(-num_kv_heads // num_ranks)
        return kv * (num_heads // num_kv_heads), kv
    return -(-num_heads // num_ranks), 1


def _projections(
    t: _Tally, tokens: float, weights: float, in_out: float, e: int, passes: float
) -> None:
    """Linears of ``weights`` elements over ``tokens``: operations, bytes of weights and values."""
    t.flops += 2 * tokens * weights * passes
    t.moved_bytes += (weights + tokens * in_out) * e * passes


def _weights(t: _Tally, block: BlockSpec, strategy: str, w: Workload, sharded: bool) -> None:
    """Messages that fetch weights and bring their gradients together."""
    e, p = w.dtype.itemsize, w.num_ranks
    split = block.num_split_weight_elements if strategy == "megatron_ts" else 0
    whole = block.num_weight_elements - split
    share = (p - 1) / p * e
    groups = p if strategy == "metp" else 1
    if sharded:
        t.send(
            "all_gather",
            whole * share * (2 if w.training else 1),
            (2 if w.training else 1) * groups,
        )
        if w.training:
            t.send("reduce_scatter", whole * share, groups)
        t.workspace_bytes += (2 * whole / p if strategy == "metp" else whole) * e
    elif w.training:
        if split:
            t.send("all_gather", split * share)
        if whole:
            t.send("all_reduce", 2 * whole * share)
        t.moved_bytes += 4 * block.num_weight_elements * e
    if w.training:
        t.workspace_bytes += block.num_weight_elements * e


def _attention(block: BlockSpec, strategy: str, w: Workload, sharded: bool) -> _Tally:
    t = _Tally()
    e, p, b = w.dtype.itemsize, w.num_ranks, w.batch
    s_local = local_len(w.seq_len, p)
    tokens, h, d = b * s_local, block.hidden, block.head_dim
    heads, kv = block.num_heads, block.num_kv_heads
    own, own_kv = heads_per_rank(heads, kv, p)
    grouped, grouped_kv = (own * p, own_kv * p) if strategy != "megatron_cz" else (heads, kv)
    back = 1 if w.training else 0
    qkv_share = (heads + 2 * kv) / (2 * heads + 2 * kv)
    weights = block.num_weight_elements

    # Projections, norm and residual. Padded heads are computed; metp recomputes q, k, v in
    # backward.
    pad = own * p / heads if strategy in ("megatron_ts", "metp") else 1.0
    in_out = 2 * h + (2 * heads + 2 * kv) * d
    recompute = qkv_share if strategy == "metp" else 0.0
    if strategy == "megatron_ts":
        _projections(t, tokens * p, weights * pad / p, in_out / p, e, 1 + 2 * back)
    else:
        _projections(t, tokens, weights * pad, in_out, e, 1 + back * (2 + recompute))
    t.moved_bytes += tokens * (6 * h + 4 * (heads + kv) * d) * e * (1 + 2 * back)
    t.num_ops += 12 * (1 + 2 * back)

    # The core. Causal work is balanced over ranks; rows of colossal_z are dense.
    rows = 4.0 * b * d
    if strategy in ("megatron_ts", "ulysses_z"):
        core = rows * own * visible_pairs(block.mask, w.seq_len)
    elif strategy == "colossal_z":
        core = rows * heads * s_local * s_local * p
    else:
        core = rows * max(heads, pad * heads) * visible_pairs(block.mask, w.seq_len) / p
    t.attention_flops += core * (1 + ATTENTION_BACKWARD * back)

    kv_bytes = 2 * tokens * (grouped_kv if strategy == "metp" and own_kv * p == kv else kv) * d * e
    out_bytes = tokens * heads * d * e
    qkv_bytes = tokens * (heads + 2 * kv) * d * e
    lse_bytes = tokens * heads * 4
    x_bytes = tokens * h * e
    t.saved_bytes += 2 * x_bytes + out_bytes + lse_bytes + (0 if strategy == "metp" else qkv_bytes)
    if strategy == "megatron_ts":
        t.send("all_gather", (p - 1) * x_bytes * (1 + back), 1 + back)
        t.send("reduce_scatter", (p - 1) * x_bytes * (1 + back), 1 + back)
        t.moved_bytes += 8 * p * x_bytes * (1 + back)
        t.num_ops += 8 * (1 + back)
        t.saved_bytes += (p - 1) * x_bytes  # the gathered input, for the weights' gradients
        t.workspace_bytes += 2 * p * x_bytes + qkv_bytes + out_bytes
    elif strategy == "ulysses_z":
        moved = tokens * (2 * grouped + 2 * grouped_kv) * d * e
        t.send("all_to_all", moved * (p - 1) / p * (1 + back), 4 * (1 + back))
        t.moved_bytes += 4 * moved * (1 + back)
        t.num_ops += 16 * (1 + back)
        t.workspace_bytes += 2 * moved
    else:
        groups = p if strategy == "metp" else 1
        hops = (2 if strategy == "colossal_z" else 1) * groups
        t.send("ring_exchange", (p - 1) * kv_bytes, (p - 1) * hops)
        if back:  # keys and values go round again, their gradients with them, and one hop home
            t.send("ring_exchange", (2 * p - 1) * kv_bytes, p * hops)
        t.moved_bytes += groups * p * 2 * tokens * heads / groups * d * 4 * (1 + back)
        t.num_ops += groups * p * (10 + 14 * back)
        if strategy == "metp":
            t.num_ops += groups * 8 * (1 + 2 * back)
        t.workspace_bytes += (qkv_bytes if groups > 1 else 0) / groups + (
            2 + 2 * back
        ) * kv_bytes / groups
        t.workspace_bytes += out_bytes + 4 * tokens * heads / groups * d
        if strategy == "colossal_z":
            scores = 4.0 * b * heads * s_local * s_local * p
            t.moved_bytes += scores * (4 + 6 * back)
            t.workspace_bytes += scores * (2 + back) + kv_bytes
    return t


def _mlp(block: BlockSpec, strategy: str, w: Workload, sharded: bool) -> _Tally:
    t = _Tally()
    e, p = w.dtype.itemsize, w.num_ranks
    tokens, h = w.batch * local_len(w.seq_len, p), block.hidden
    width, weights = block.intermediate, block.num_weight_elements
    back = 1 if w.training else 0
    inputs = max(1, round(weights / max(1, h * width)) - 1)  # 2 when gated, else 1
    values = (inputs + 1) * width
    x_bytes, mid_bytes = tokens * h * e, tokens * values * e

    if strategy == "megatron_ts":
        _projections(t, tokens * p, weights / p, (2 * h + values) / p, e, 1 + 2 * back)
        t.send("all_gather", (p - 1) * x_bytes * (1 + back), 1 + back)
        t.send("reduce_scatter", (p - 1) * x_bytes * (1 + back), 1 + back)
        t.moved_bytes += 8 * p * x_bytes * (1 + back)
        t.num_ops += 8 * (1 + back)
        t.saved_bytes += (p + 1) * x_bytes + mid_bytes
        t.workspace_bytes += 2 * p * x_bytes + mid_bytes
    elif strategy == "metp":
        recompute = inputs / (inputs + 1)
        _projections(t, tokens, weights, 2 * h * p + values, e, 1 + back * (2 + recompute))
        t.num_ops += p * 6 * (1 + 2 * back)
        t.saved_bytes += 2 * x_bytes
        t.workspace_bytes += x_bytes + mid_bytes / p * (1 + back)
    else:
        _projections(t, tokens, weights, 2 * h + values, e, 1 + 2 * back)
        t.saved_bytes += 2 * x_bytes + mid_bytes
        t.workspace_bytes += mid_bytes
    t.moved_bytes += tokens * (6 * h + 2 * values) * e * (1 + 2 * back)
    t.num_ops += 6 * (1 + 2 * back)
    return t


def prior_cost(
    block: BlockSpec, strategy: str, workload: Workload, machine: Machine, sharded: bool = False
) -> BlockCost:
    """Predicted cost of ``block`` under ``strategy`` on one of ``workload.num_ranks`` ranks.

    Args:
        block: its widths and element counts; feasibility is not looked at.
        strategy: one of ``ATTENTION_STRATEGIES``.
        workload: batch, sequence length, dtype; ``training`` adds the backward pass and gradients.
        machine: rates of a rank.
        sharded: weights at rest are 1/p on each rank (ZeRO-3: gathered in forward and backward,
        gradients
            reduce-scattered). False: whole on every rank; gradients all-reduced, those that
            megatron_ts splits all-gathered.
    Raises:
        ValueError: the strategy is unknown.
    """
    if strategy not in ATTENTION_STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}; legal: {', '.join(ATTENTION_STRATEGIES)}")
    t = (_attention if block.kind == "attention" else _mlp)(block, strategy, workload, sharded)
    _weights(t, block, strategy, workload, sharded)
    return BlockCost(
        time_s=t.time_s(machine),
        saved_bytes=int(t.saved_bytes) if workload.training else 0,
        workspace_bytes=int(t.workspace_bytes),
        comm_bytes=int(sum(t.sent_bytes.values())),
    )


def peak_bytes(costs: Iterable[BlockCost], static_bytes: int, machine: Machine) -> int:
    """Peak memory of a plan: static + sum saved + largest workspace + communicators (DESIGN 6)."""
    costs = tuple(costs)
    workspace = max((c.workspace_bytes for c in costs), default=0)
    saved = sum(c.saved_bytes for c in costs)
    return static_bytes + saved + workspace + machine.communicator_bytes
