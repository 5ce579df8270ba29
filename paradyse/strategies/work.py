"""What one block does on one rank, counted from its shapes.

Each strategy counts its own work, beside its code; here is what they have in common.
``planning.prior`` turns the counts into seconds. The bytes that each strategy sends are those of
REFERENCES (DESIGN 4.7), recomputed from the block's own shapes: grouped KV heads, gated MLPs,
windows, padding of the sequence and of the heads.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from paradyse.distributed.axis import TokenLayout
from paradyse.kernels.head_exchange import HeadSlots
from paradyse.strategies.groups.heads import deal_heads
from paradyse.types import BlockSpec, MaskSpec, Workload

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


def visible_pairs(mask: MaskSpec | None, seq_len: int) -> int:
    """Pairs (query, key) of a sequence that may see each other; padding and documents all seen."""

    def one_side(n: int, reach: int | None) -> int:
        reach = n - 1 if reach is None else min(max(reach, 0), n - 1)
        return reach * n - reach * (reach + 1) // 2

    def stretch(n: int) -> int:
        return n + one_side(n, mask.left) + one_side(n, mask.right) if mask and n else n * n

    chunk = min(mask.chunk, seq_len) if mask and mask.chunk else seq_len
    return seq_len // chunk * stretch(chunk) + stretch(seq_len % chunk)


@dataclass
class Work:
    """Operations, bytes and messages of one block on one rank, forward and, when training,
    backward; and the shapes that they are counted from.
    """

    block: BlockSpec
    workload: Workload
    flops: float = 0.0
    """Of linears."""
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    """Read and written in the rank's own memory."""
    num_ops: float = 0.0
    """Launches of small operators."""
    sent_bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Per collective, by this rank."""
    messages: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Per collective."""
    saved_bytes: float = 0.0
    """Held from the block's forward to its backward."""
    workspace_bytes: float = 0.0
    """Held only while the block runs."""

    # ---- shapes

    @property
    def is_attention(self) -> bool:
        return self.block.kind == "attention"

    @property
    def itemsize(self) -> int:
        return self.workload.dtype.itemsize

    @property
    def p(self) -> int:
        """Ranks."""
        return self.workload.num_ranks

    @property
    def back(self) -> int:
        """1 when there is a backward pass."""
        return int(self.workload.training)

    @property
    def local_len(self) -> int:
        """Tokens that a rank holds of one sequence, padding included."""
        return TokenLayout(self.p, self.workload.seq_len).local_len

    @property
    def tokens(self) -> int:
        return self.workload.batch * self.local_len

    @property
    def x_bytes(self) -> int:
        """Of the rank's tokens of the residual stream."""
        return self.tokens * self.block.hidden * self.itemsize

    @property
    def num_inputs(self) -> int:
        """Up projections of an MLP: 2 when gated, else 1."""
        b = self.block
        return max(1, round(b.num_weight_elements / max(1, b.hidden * b.intermediate)) - 1)

    @property
    def columns(self) -> int:
        """What the projections give and take per token, besides the residual stream."""
        b = self.block
        if self.is_attention:
            return (2 * b.num_heads + 2 * b.num_kv_heads) * b.head_dim
        return (self.num_inputs + 1) * b.intermediate

    @property
    def up_share(self) -> float:
        """Share of the projections' operations that are ahead of attention or the activation."""
        b = self.block
        if self.is_attention:
            return (b.num_heads + 2 * b.num_kv_heads) / (2 * b.num_heads + 2 * b.num_kv_heads)
        return self.num_inputs / (self.num_inputs + 1)

    @property
    def between_bytes(self) -> float:
        """Of the values between the projections that backward reads: q, k, v or an MLP's."""
        if self.is_attention:
            return self.heads_bytes(self.block.num_heads + 2 * self.block.num_kv_heads)
        return self.tokens * self.columns * self.itemsize

    @property
    def out_bytes(self) -> float:
        """Of attention's output on the rank's tokens; 0 for an MLP."""
        return self.heads_bytes(self.block.num_heads)

    def heads_bytes(self, num_heads: float) -> float:
        """Of the rank's tokens of so many heads."""
        return self.tokens * num_heads * self.block.head_dim * self.itemsize

    @property
    def slots(self) -> HeadSlots:
        return deal_heads(self.block.num_heads, self.block.num_kv_heads, self.p)

    @property
    def padded_weights(self) -> float:
        """Elements of the weights of all ranks' heads, padding and copies included."""
        n = self.block.num_weight_elements
        if not self.is_attention:
            return n
        return n * self.slots.queries_per_rank * self.p / self.block.num_heads

    @property
    def pairs(self) -> int:
        """Pairs (query, key) that the mask shows."""
        return visible_pairs(self.block.mask, self.workload.seq_len)

    # ---- counts

    def send(self, collective: str, num_bytes: float, messages: float = 1) -> None:
        """``num_bytes`` in all, in so many messages."""
        if messages:
            self.sent_bytes[collective] += num_bytes
            self.messages[collective] += messages

    def surround(self) -> None:
        """Norm, rotary embedding or activation, residual; one compiled piece."""
        values = 6 * self.block.hidden + 2 * self.columns
        self.moved_bytes += self.tokens * values * self.itemsize * (1 + 2 * self.back)
        self.num_ops += PIECE_OPS * (1 + self.back)
        self.saved_bytes += 2 * self.x_bytes
        if self.is_attention:
            self.saved_bytes += self.out_bytes + self.tokens * self.block.num_heads * 4  # the lse

    def project(self, tokens: float, weights: float, in_out: float, passes: float) -> None:
        """Linears of ``weights`` elements over ``tokens``: operations, bytes of weights and values.

        Args:
            in_out: columns read and written per token.
            passes: 1 for forward, 2 for backward, and what is computed again.
        """
        self.flops += 2 * tokens * weights * passes
        self.moved_bytes += (weights + tokens * in_out) * self.itemsize * passes

    def attend(self, num_heads: float, pairs: float) -> None:
        """Scores and their product with V: two matmuls over the pairs, and backward."""
        forward = 4.0 * self.workload.batch * self.block.head_dim * num_heads * pairs
        self.attention_flops += forward * (1 + ATTENTION_BACKWARD * self.back)

    def ring(self, kv_bytes: float, num_heads: float, messages: int = 1) -> None:
        """K and V once round; in backward again, their gradients with them and one hop home."""
        p, back = self.p, self.back
        self.send("ring_exchange", (p - 1) * kv_bytes, (p - 1) * messages)
        if back:  # gradients travel in float32 at least
            grads = kv_bytes * max(self.itemsize, 4) / self.itemsize
            self.send("ring_exchange", (p - 1) * kv_bytes + p * grads, (2 * p - 1) * messages)
        merged = self.tokens * num_heads * self.block.head_dim * 4
        self.moved_bytes += 2 * p * merged * (1 + back)
        self.num_ops += (CORE_OPS + p * RING_STEP_OPS) * (1 + back)
        self.workspace_bytes += (2 + 2 * back) * kv_bytes + merged

    def fetch_weights(self, weights: str, sharded: bool) -> None:
        """Messages that fetch weights and bring their gradients together.

        Args:
            weights: ``Strategy.weights``.
            sharded: 1/p of the weights on each rank at rest; False: whole on every rank.
        """
        e, n, training = self.itemsize, self.block.num_weight_elements, self.workload.training
        split = self.block.num_split_weight_elements if weights == "split" else 0
        whole, share = n - split, (self.p - 1) / self.p * e
        if sharded:
            groups = self.p if weights == "streamed" else 1
            self.send("all_gather", whole * share * (1 + self.back), (1 + self.back) * groups)
            if training:
                self.send("reduce_scatter", whole * share, groups)
            self.workspace_bytes += (2 * whole / self.p if weights == "streamed" else whole) * e
        elif training:
            if split:
                self.send("all_gather", split * share)
            if whole:
                self.send("all_reduce", 2 * whole * share)
            self.moved_bytes += 4 * n * e
        if training:
            self.workspace_bytes += n * e
