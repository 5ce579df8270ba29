"""Analytic prior: time and memory of one block under each strategy, from its shapes and the
machine.

time = operations / rate + bytes / bandwidth + latency per message + overhead per operator, forward
and, when training, backward. The bytes each strategy sends are those of REFERENCES (DESIGN 4.7),
recomputed from the block's own shapes: grouped KV heads, gated MLPs, windows, padding of the
sequence and of the heads.

Peak memory of a plan (DESIGN 6) is static + communicators + what blocks save and need while they
run, at the moment when that is most: ``peak_bytes``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paradyse.strategies.groups.heads import deal_heads
from paradyse.types import ATTENTION_STRATEGIES, BlockSpec, MaskSpec, Workload

Z_STRATEGIES = ("megatron_cz", "ulysses_z", "colossal_z")
"""Strategies that hold tokens local and weights whole; for an MLP they are one variant."""

ATTENTION_BACKWARD = 2.5
"""Matmuls of flash attention, backward over forward: five against two (arXiv 2205.14135)."""

PIECE_OPS = 35
"""Python time of entering one compiled piece, in launches of a small operator: 0.1 ms in both
directions (shared design, section 9: a nested compiled region costs about 0.2 ms a step)."""

CORE_OPS, RING_STEP_OPS, EXCHANGE_OPS = 130, 40, 80
"""The same of an attention operator, of each step of a ring in it, and of an all-to-all's moves.

Thread time (``time.thread_time``) of ``attention_ring`` and ``attention_ulysses`` at 32 tokens on
two gloo ranks: 580 and 620 us forward, 930 and 700 us backward; a small add takes 2.8 us."""

GATHER_OPS = 40
"""The same of gathering or scattering tokens: an operator and one message."""

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ring_exchange")
"""Names that ``distributed.collectives`` books bytes under, and ``Machine.links`` is keyed by."""


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
    left_bytes: int = 0
    """Held from the block's backward to the end of the step: gradients of whole weights, which are
    summed over ranks when all are there."""
    source: str = "prior"
    """What the time comes from: "prior", "forest" or "polynomial" (``cost_curves``), "online"."""
    memory_source: str = ""
    """"online" where the bytes were corrected by this run; empty where they are as predicted."""


@dataclass
class _Tally:
    """What one block does on one rank."""

    flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    num_ops: float = 0.0
    sent_bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    messages: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    saved_bytes: float = 0.0
    workspace_bytes: float = 0.0

    def send(self, collective: str, num_bytes: float, messages: float = 1) -> None:
        """``num_bytes`` in all, in so many messages."""
        if messages:
            self.sent_bytes[collective] += num_bytes
            self.messages[collective] += messages

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


@dataclass(frozen=True)
class _Shape:
    """Sizes of one block's values on one rank."""

    block: BlockSpec
    w: Workload

    @property
    def e(self) -> int:
        return self.w.dtype.itemsize

    @property
    def p(self) -> int:
        return self.w.num_ranks

    @property
    def back(self) -> int:
        """1 when there is a backward pass."""
        return int(self.w.training)

    @property
    def s(self) -> int:
        return local_len(self.w.seq_len, self.p)

    @property
    def tokens(self) -> int:
        return self.w.batch * self.s

    @property
    def x_bytes(self) -> int:
        """Of the rank's tokens of the residual stream."""
        return self.tokens * self.block.hidden * self.e

    def heads_bytes(self, num_heads: float) -> float:
        return self.tokens * num_heads * self.block.head_dim * self.e

    @property
    def group(self) -> tuple[int, int]:
        """Query and KV heads of one of p groups."""
        slots = deal_heads(self.block.num_heads, self.block.num_kv_heads, self.p)
        return slots.queries_per_rank, slots.slots_per_rank

    def core_flops(self, num_heads: float, pairs: float) -> float:
        """Scores and their product with V: two matmuls over the pairs, and backward."""
        forward = 4.0 * self.w.batch * self.block.head_dim * num_heads * pairs
        return forward * (1 + ATTENTION_BACKWARD * self.back)


def _gather_and_scatter(t: _Tally, z: _Shape) -> None:
    """megatron_ts around any block: all-gather in, reduce-scatter out; backward the reverse."""
    passes = 1 + z.back
    t.send("all_gather", (z.p - 1) * z.x_bytes * passes, passes)
    t.send("reduce_scatter", (z.p - 1) * z.x_bytes * passes, passes)
    t.moved_bytes += 8 * z.p * z.x_bytes * passes
    t.num_ops += 2 * GATHER_OPS * passes
    t.saved_bytes += (z.p - 1) * z.x_bytes  # the gathered input, for the weights' gradients
    t.workspace_bytes += 2 * z.p * z.x_bytes


def _ring(t: _Tally, z: _Shape, kv_bytes: float, num_heads: float, messages: int = 1) -> None:
    """K and V once round; in backward again, their gradients with them and one hop home."""
    t.send("ring_exchange", (z.p - 1) * kv_bytes, (z.p - 1) * messages)
    if z.back:  # gradients travel in float32 at least
        grads = kv_bytes * max(z.e, 4) / z.e
        sent = (z.p - 1) * kv_bytes + z.p * grads
        t.send("ring_exchange", sent, (2 * z.p - 1) * messages)
    merged = z.tokens * num_heads * z.block.head_dim * 4
    t.moved_bytes += 2 * z.p * merged * (1 + z.back)
    t.num_ops += (CORE_OPS + z.p * RING_STEP_OPS) * (1 + z.back)
    t.workspace_bytes += (2 + 2 * z.back) * kv_bytes + merged


def _attention(block: BlockSpec, strategy: str, w: Workload) -> _Tally:
    t, z = _Tally(), _Shape(block, w)
    h, heads, kv = block.hidden, block.num_heads, block.num_kv_heads
    own, own_kv = z.group
    qkv_bytes, out_bytes = z.heads_bytes(heads + 2 * kv), z.heads_bytes(heads)
    lse_bytes = z.tokens * heads * 4
    pairs = visible_pairs(block.mask, w.seq_len)
    in_out = 2 * h + (2 * heads + 2 * kv) * block.head_dim
    weights, padded = block.num_weight_elements, block.num_weight_elements * own * z.p / heads

    # Norm, rotary embedding, residual; the block is one compiled piece, metp one for each group.
    t.moved_bytes += z.tokens * (6 * h + 4 * (heads + kv) * block.head_dim) * z.e * (1 + 2 * z.back)
    t.num_ops += PIECE_OPS * (1 + z.back)
    t.saved_bytes += 2 * z.x_bytes + out_bytes + lse_bytes
    if strategy == "megatron_ts":
        _projections(t, z.tokens * z.p, padded / z.p, in_out / z.p, z.e, 1 + 2 * z.back)
        _gather_and_scatter(t, z)
        t.attention_flops += z.core_flops(own, pairs)
        t.num_ops += CORE_OPS * (1 + z.back)
        t.saved_bytes += qkv_bytes
        t.workspace_bytes += qkv_bytes + out_bytes
        return t
    if strategy == "metp":  # recomputes q, k, v in backward
        recompute = (heads + 2 * kv) / (2 * heads + 2 * kv)
        _projections(t, z.tokens, padded, in_out, z.e, 1 + z.back * (2 + recompute))
        t.num_ops += (z.p - 1) * PIECE_OPS * (1 + 2 * z.back)
        for _ in range(z.p):
            _ring(t, z, z.heads_bytes(2 * kv / z.p if own_kv * z.p == kv else 2 * own_kv), own)
        t.workspace_bytes = t.workspace_bytes / z.p + qkv_bytes / z.p + out_bytes  # one at a time
        t.attention_flops += z.core_flops(own, pairs)
        return t

    _projections(t, z.tokens, weights, in_out, z.e, 1 + 2 * z.back)
    t.saved_bytes += qkv_bytes
    if strategy == "ulysses_z":  # q, k, v in one message, the output in another
        moved = z.heads_bytes((2 * own + 2 * own_kv) * z.p)
        t.send("all_to_all", moved * (z.p - 1) / z.p * (1 + z.back), 2 * (1 + z.back))
        t.attention_flops += z.core_flops(own, pairs)
        t.moved_bytes += 12 * moved * (1 + z.back)  # six copies, each read and written
        t.num_ops += (CORE_OPS + EXCHANGE_OPS) * (1 + z.back)
        t.saved_bytes += out_bytes  # own heads and own tokens, for the core and the projection
        t.workspace_bytes += 2 * moved
    elif strategy == "megatron_cz":
        _ring(t, z, z.heads_bytes(2 * kv), heads)
        t.attention_flops += z.core_flops(heads, pairs / z.p)
        t.workspace_bytes += out_bytes
    else:  # colossal_z: K goes round, then V; rows [s, p s] of the scores are dense, in float32
        _ring(t, z, z.heads_bytes(2 * kv), heads, messages=2)
        t.attention_flops += z.core_flops(heads, z.s * z.s * z.p)
        scores = 4.0 * w.batch * heads * z.s * z.s * z.p
        t.moved_bytes += scores * (4 + 6 * z.back)
        t.workspace_bytes += scores * (2 + z.back) + out_bytes
    return t


def _mlp(block: BlockSpec, strategy: str, w: Workload) -> _Tally:
    t, z = _Tally(), _Shape(block, w)
    h, weights = block.hidden, block.num_weight_elements
    inputs = max(1, round(weights / max(1, h * block.intermediate)) - 1)  # 2 when gated, else 1
    values = (inputs + 1) * block.intermediate
    mid_bytes = z.tokens * values * z.e

    t.moved_bytes += z.tokens * (6 * h + 2 * values) * z.e * (1 + 2 * z.back)
    t.num_ops += PIECE_OPS * (1 + z.back)
    t.saved_bytes += 2 * z.x_bytes
    if strategy == "megatron_ts":
        in_out = (2 * h + values) / z.p
        _projections(t, z.tokens * z.p, weights / z.p, in_out, z.e, 1 + 2 * z.back)
        _gather_and_scatter(t, z)
        t.saved_bytes += mid_bytes
        t.workspace_bytes += mid_bytes
    elif strategy == "metp":  # recomputes the intermediate columns in backward
        recompute, in_out = inputs / (inputs + 1), 2 * h * z.p + values
        _projections(t, z.tokens, weights, in_out, z.e, 1 + z.back * (2 + recompute))
        t.num_ops += (z.p - 1) * PIECE_OPS * (1 + 2 * z.back)
        t.workspace_bytes += z.x_bytes + mid_bytes / z.p * (1 + z.back)
    else:
        _projections(t, z.tokens, weights, 2 * h + values, z.e, 1 + 2 * z.back)
        t.saved_bytes += mid_bytes
        t.workspace_bytes += mid_bytes
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
    t = (_attention if block.kind == "attention" else _mlp)(block, strategy, workload)
    _weights(t, block, strategy, workload, sharded)
    return BlockCost(
        time_s=t.time_s(machine),
        saved_bytes=int(t.saved_bytes) if workload.training else 0,
        workspace_bytes=int(t.workspace_bytes),
        comm_bytes=int(sum(t.sent_bytes.values())),
        left_bytes=gradient_bytes(block, workload, sharded),
    )


def gradient_bytes(block: BlockSpec, workload: Workload, sharded: bool) -> int:
    """Of a block's whole weights: held until the ranks' are summed, at the end of backward."""
    if sharded or not workload.training:
        return 0
    return block.num_weight_elements * workload.dtype.itemsize


def gradient_sum_s(block: BlockSpec, strategy: str, workload: Workload, machine: Machine) -> float:
    """Seconds in which the ranks' gradients of whole weights are brought together, predicted.

    They are at the end of the backward of the model, so in no block's measured time.
    """
    t = _Tally()
    _weights(t, block, strategy, workload, sharded=False)
    return t.time_s(machine)


def peak_bytes(
    costs: Iterable[BlockCost],
    static_bytes: int,
    machine: Machine,
    rest: Iterable[BlockCost] = (),
) -> int:
    """Peak memory of a plan: static + communicators + the most held at any moment of a step.

    While a block runs, that is what it and the blocks before it save, what the blocks after it left
    behind when their backward was done, and its workspace: so no more than the sum of all that is
    saved + the largest workspace (DESIGN 6), by much in a model of few layers.

    Args:
        costs: of the blocks, in the order of computation.
        rest: of what is in no block: saved all the time; its workspace is needed when all blocks
            have saved.
    """
    costs, rest = tuple(costs), tuple(rest)
    saved, left, most = 0, sum(c.left_bytes for c in costs), 0
    for c in costs:
        saved, left = saved + c.saved_bytes, left - c.left_bytes
        most = max(most, saved + left + c.workspace_bytes)
    most = max(most, saved + max((c.workspace_bytes for c in rest), default=0))
    fixed = static_bytes + machine.communicator_bytes
    return fixed + sum(c.saved_bytes for c in rest) + most
