"""What one block does on one rank, counted from its shapes.

Each strategy counts its own work, beside its code; here is what they have in common.
``planning.prior`` turns the counts into seconds. The bytes that each strategy sends are those of
REFERENCES (DESIGN 4.7), recomputed from the block's own shapes: grouped KV heads, gated MLPs,
windows, padding of the sequence and of the heads.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from paradyse.distributed.axis import TokenLayout
from paradyse.distributed.token_linears import MIN_ROWS
from paradyse.strategies.groups.heads import deal_heads
from paradyse.types import EXPERTS, BlockSpec, MaskSpec, Workload

ATTENTION_BACKWARD = 2.5
"""Matmuls of flash attention, backward over forward: five against two (arXiv 2205.14135)."""

PIECE_OPS = 35
"""Python time of entering one compiled piece, in launches of a small operator: 0.1 ms in both
directions (shared design, section 9: a nested compiled region costs about 0.2 ms a step)."""

CORE_OPS, RING_STEP_OPS, EXCHANGE_OPS = 130, 40, 80
"""The same of an attention operator, of each step of a ring in it, and of an all-to-all's moves.

Thread time (``time.thread_time``) of attention by a ring and by Ulysses at 32 tokens on
two gloo ranks: 580 and 620 us forward, 930 and 700 us backward; a small add takes 2.8 us."""

GATHER_OPS = 40
"""The same of gathering or scattering tokens: an operator and one message."""


def count_visible_pairs(mask: MaskSpec | None, seq_len: int) -> int:
    """Pairs (query, key) of ``seq_len`` tokens that may see each other under ``mask``; None is all.

    What padding and documents hide is counted as seen.
    """

    def one_side(n: int, reach: int | None) -> int:
        reach = n - 1 if reach is None else min(max(reach, 0), n - 1)
        return reach * n - reach * (reach + 1) // 2

    def stretch(n: int) -> int:
        return n + one_side(n, mask.left) + one_side(n, mask.right) if mask and n else n * n

    chunk = min(mask.chunk, seq_len) if mask and mask.chunk else seq_len
    return seq_len // chunk * stretch(chunk) + stretch(seq_len % chunk)


def count_chunk_pairs(mask: MaskSpec | None, num_chunks: int, length: int) -> int:
    """Pairs of chunks of ``length`` tokens, of ``num_chunks`` in all, of which one may see the
    other under ``mask``; None is all.
    """
    if mask is None:
        return num_chunks**2

    def in_chunks(reach: int | None) -> int | None:
        return None if reach is None else -(-reach // length)

    left, right, chunk = map(in_chunks, (mask.left, mask.right, mask.chunk))
    whole = replace(mask, left=left, right=right, chunk=chunk)
    return count_visible_pairs(whole, num_chunks)


@dataclass(frozen=True)
class Exchange:
    """Heads of all ranks sent to those that compute them, and back; they may go in turns."""

    num_bytes: float
    messages: float
    """Of one turn."""
    each_bytes: float
    """As ``num_bytes`` of ``deal_in_turns``."""


class Work:
    """Operations, bytes and messages of one block on one rank, forward and, when training,
    backward; and the shapes that they are counted from.

    Args:
        block: its widths and numbers of elements.
        workload: batch, length, dtype, number of ranks, training or not.
    """

    def __init__(self, block: BlockSpec, workload: Workload):
        self.block, self.workload, self.p = block, workload, workload.num_ranks
        self.itemsize = workload.dtype.itemsize
        self.back = int(workload.training)
        """1 when there is a backward pass."""
        self.runs_again = 0
        """1 when backward begins with the forward."""
        self.local_len = TokenLayout(self.p, workload.seq_len).local_len
        """Tokens that a rank holds of one sequence, padding included."""
        self.tokens = workload.batch * self.local_len
        self.x_bytes = self.tokens * block.hidden * self.itemsize
        """Bytes of a value of the model's width on the rank's tokens."""
        wide = max(self.itemsize, workload.weight_itemsize)
        self.stream_bytes = self.tokens * block.hidden * wide
        """Of the residual stream, which autocast leaves in the dtype of weights."""
        key_len = workload.seq_len if workload.key_len is None else workload.key_len
        self.local_keys = TokenLayout(self.p, key_len).local_len
        """Tokens that a rank holds of one sequence of keys: its own, or another one."""
        self.key_tokens = workload.batch * self.local_keys
        across = workload.key_len is not None
        self.read_bytes = self.x_bytes + across * self.key_tokens * block.hidden * self.itemsize
        """Bytes of what the projections read: with the keys' sequence, where that is another."""
        self.out_bytes = self.heads_bytes(block.num_heads)
        """Bytes of attention's output on the rank's tokens; 0 for an MLP."""
        self.projected: float = self.tokens
        """Tokens of the rank that a weight is multiplied with, of all weights in the mean."""
        self.is_attention = block.kind == "attention"
        n = self.computed_weights = block.num_weight_elements
        """Elements of the weights that a token is multiplied with."""
        if self.is_attention:
            slots = self.slots = deal_heads(block.num_heads, block.num_kv_heads, self.p)
            self.own_heads, self.own_kv = slots.queries_per_rank, slots.slots_per_rank
            """Query and KV heads of one of p groups, padding and copies included."""
            self.padded_weights = n * self.own_heads * self.p / block.num_heads
            """Elements of the weights of all groups."""
            self.pairs: float = workload.seq_len * key_len
            if not across:
                self.pairs = count_visible_pairs(block.mask, workload.seq_len)
            if workload.over_len is not None:  # of as many sequences as the rank has tokens for
                seen = count_visible_pairs(block.mask, workload.over_len)
                self.pairs = seen * self.local_len * self.p / workload.over_len
            of_keys = 2 * block.num_kv_heads * block.head_dim
            downs = block.num_heads * block.head_dim
            ups = downs + of_keys
            self.between_bytes = (self.tokens * downs + self.key_tokens * of_keys) * self.itemsize
            self.projected += (self.key_tokens - self.tokens) * of_keys / (ups + downs)
        elif block.kind == EXPERTS:
            of_experts, k = block.num_split_weight_elements, block.experts_per_token
            each = of_experts / block.num_experts
            gated = max(1, round(each / max(1, block.hidden * block.intermediate)) - 1)
            downs, self.padded_weights = k * block.intermediate, n
            ups = gated * downs
            read = ups + downs + 2 * k * block.hidden  # rows in the order of experts, and results
            self.between_bytes = self.tokens * read * self.itemsize
            self.computed_weights = n - of_experts + round(k * each)
        else:
            gated = max(1, round(n / max(1, block.hidden * block.intermediate)) - 1)
            ups, downs, self.padded_weights = gated * block.intermediate, block.intermediate, n
            self.between_bytes = self.tokens * (ups + downs) * self.itemsize
            """Bytes of the values between the projections that backward reads: q, k, v or an
            MLP's."""
        self.columns = ups + downs
        """What projections give and take per token, besides the residual stream."""
        self.up_share = ups / max(1, ups + downs)
        """Share of the projections' operations that precede attention or the activation."""
        self.flops = self.attention_flops = 0.0
        """Operations of linears, and of attention."""
        self.moved_bytes = self.num_ops = 0.0
        """Bytes read and written in the rank's own memory; launches of small operators."""
        self.sent_bytes: dict[str, float] = defaultdict(float)
        """What this rank sends, per collective."""
        self.messages: dict[str, float] = defaultdict(float)
        self.ahead: dict[str, tuple[float, float]] = {}
        """Of these, per collective the bytes and the messages that are under way while neighbouring
        blocks compute: weights fetched ahead, and their gradients."""
        self.behind: list[tuple[str, float, float, float]] = []
        """Of these, messages that are under way while the block's own linears are computed:
        collective, bytes, messages, operations of these linears."""
        self.exchange: Exchange | None = None
        """Of these, what attention sends by its own ``all_to_all``."""
        self.ahead_bytes = 0.0
        """Whole weights that are on their way while a neighbouring block computes."""
        self.saved_bytes = self.workspace_bytes = 0.0
        """Bytes held from the block's forward to its backward, and those only while it runs."""
        self.host_bytes = 0.0
        """Bytes held on the host from the block's forward to its backward."""
        self.copied_bytes = 0.0, 0.0
        """Bytes that go between device and host, either way: in forward, and in backward."""
        self.waited_bytes = 0.0, 0.0
        """Of these, what the block waits for, whatever it computes."""
        self.attended_bytes = 0.0
        """Of what is saved, attention's output and what its backward reads beside q, k and v."""

    def heads_bytes(self, num_heads: float) -> float:
        """Bytes of ``num_heads`` heads on the rank's tokens."""
        return self.tokens * num_heads * self.block.head_dim * self.itemsize

    def keys_bytes(self, num_heads: float) -> float:
        """Bytes of ``num_heads`` heads of keys, or of values, on the rank's tokens."""
        return self.key_tokens * num_heads * self.block.head_dim * self.itemsize

    def send(
        self, collective: str, num_bytes: float, messages: float = 1, ahead: bool = False
    ) -> None:
        """Book ``num_bytes`` in all, in so many ``messages``, to ``collective``, ``ahead`` of their
        use or after it; a rank alone sends none."""
        if messages and self.p > 1:
            self.sent_bytes[collective] += num_bytes
            self.messages[collective] += messages
            if ahead:
                before = self.ahead.get(collective, (0.0, 0.0))
                self.ahead[collective] = before[0] + num_bytes, before[1] + messages

    def send_along(self, collective: str, num_bytes: float) -> None:
        """Book ``num_bytes`` to ``collective`` that go in a message which other blocks share."""
        if self.p > 1:
            self.sent_bytes[collective] += num_bytes
            self.messages[collective] += 0

    def send_behind(self, collective: str, num_bytes: float, messages: float, flops: float) -> None:
        """Book ``messages`` of ``num_bytes`` in all to ``collective``, under way while the block
        itself multiplies what does not need them, in so many ``flops``; few tokens are not
        multiplied apart (``token_linears.MIN_ROWS``)."""
        self.send(collective, num_bytes, messages)
        if self.p > 1 and TokenLayout(self.p, self.workload.seq_len).chunk >= MIN_ROWS:
            self.behind.append((collective, num_bytes, messages, flops))

    def surround(self) -> None:
        """Norm, rotary embedding or activation, residual; one compiled piece."""
        values = 6 * self.block.hidden + 2 * self.columns
        self.moved_bytes += self.tokens * values * self.itemsize * (1 + 2 * self.back)
        self.num_ops += PIECE_OPS * (1 + self.back)
        self.saved_bytes += 2 * self.stream_bytes
        if self.is_attention:
            self.save_attended(self.out_bytes + self.tokens * self.block.num_heads * 4)  # the lse

    def save_attended(self, num_bytes: float) -> None:
        """Book ``num_bytes`` that attention's own forward leaves to its backward."""
        self.attended_bytes += num_bytes
        self.saved_bytes += num_bytes

    def project(self, tokens: float, weights: float, in_out: float, passes: float) -> None:
        """Linears of ``weights`` elements over ``tokens``: operations, bytes of weights and values.

        Args:
            in_out: columns read and written per token.
            passes: 1 for forward, 2 for backward, and what is computed again.
        """
        self.flops += 2 * tokens * weights * passes
        self.moved_bytes += (weights + tokens * in_out) * self.itemsize * passes

    def project_here(self, passes: float, of_experts: float = 1) -> None:
        """The linears of the block over as many tokens as the rank has, so many ``passes`` of them.

        Args:
            passes: as of ``project``.
            of_experts: share of the experts that the rank computes. All of their weights are read,
                also for few tokens, each by a matmul of its own.
        """
        block, used = self.block, self.computed_weights
        self.project(self.projected, used, 2 * block.hidden + self.columns, passes)
        read = float(block.num_weight_elements - used)
        if block.kind == EXPERTS:
            read -= (1 - of_experts) * block.num_split_weight_elements
        self.moved_bytes += max(0, read) * self.itemsize * passes
        self.num_ops += 2 * block.num_experts * of_experts * passes

    def copy(
        self, forward: float, backward: float, waited: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        """Copy so many bytes between device and host in ``forward`` and in ``backward``, of which
        nothing hides those that are ``waited`` for."""
        before, waits = self.copied_bytes, self.waited_bytes
        self.copied_bytes = before[0] + forward, before[1] + backward
        self.waited_bytes = waits[0] + waited[0], waits[1] + waited[1]
        self.moved_bytes += forward + backward

    def repeat(self, forward: Work) -> None:
        """Do ``forward`` once more."""
        self.flops += forward.flops
        self.attention_flops += forward.attention_flops
        self.moved_bytes += forward.moved_bytes
        self.num_ops += forward.num_ops
        for collective, messages in forward.messages.items():
            self.send(collective, forward.sent_bytes[collective], messages)
        self.behind += forward.behind
        if self.exchange is not None and (more := forward.exchange) is not None:
            num_bytes = self.exchange.num_bytes + more.num_bytes
            messages = self.exchange.messages + more.messages
            self.exchange = replace(self.exchange, num_bytes=num_bytes, messages=messages)

    def keep_only(self, num_bytes: float) -> None:
        """Save ``num_bytes`` instead; the rest is there again while the block runs backward."""
        self.workspace_bytes += self.saved_bytes - num_bytes
        self.saved_bytes = num_bytes

    def attend(self, num_heads: float, pairs: float) -> None:
        """Scores and their product with V of ``num_heads`` heads: two matmuls over ``pairs`` of
        tokens, and backward.
        """
        forward = 4.0 * self.workload.batch * self.block.head_dim * num_heads * pairs
        self.attention_flops += forward * (1 + ATTENTION_BACKWARD * self.back)

    def ring(self, kv_bytes: float, num_heads: float, messages: int = 1) -> None:
        """K and V once round; in backward again, and their gradients one hop behind, back to where
        they came from.

        Args:
            kv_bytes: of the rank's K and V.
            num_heads: query heads.
            messages: sent per step of forward.
        """
        p, back = self.p, self.back
        if p == 1:
            self.num_ops += CORE_OPS * (1 + back)
            return
        self.send("ring_exchange", (p - 1) * kv_bytes, (p - 1) * messages)
        if back:  # gradients travel in float32 at least
            grads = kv_bytes * max(self.itemsize, 4) / self.itemsize
            self.send("ring_exchange", (p - 1) * (kv_bytes + grads), 2 * (p - 1))
        merged = self.tokens * num_heads * self.block.head_dim * 4
        self.moved_bytes += 2 * p * merged * (1 + back)
        self.num_ops += (CORE_OPS + p * RING_STEP_OPS) * (1 + back)
        self.workspace_bytes += (2 + 2 * back) * kv_bytes + merged

    def take_rows(self, weights: str, sharded: bool, kept: bool) -> None:
        """Copies of the rows that a rank takes of whole weights, which lie apart in them. Some lie
        together, and are no copies, so that this is the most.

        Args:
            weights: as of ``fetch_weights``.
            sharded: as of ``fetch_weights``.
            kept: from forward to backward; False: they are taken again.
        """
        if weights != "split" or sharded or not self.back:
            return
        padded = self.padded_weights / max(1, self.block.num_weight_elements)
        num_bytes = self.block.num_split_weight_elements * padded / self.p * self.itemsize
        self.saved_bytes += num_bytes * kept
        self.workspace_bytes += num_bytes * (not kept)

    def fetch_weights(self, weights: str, sharded: bool, compared: bool = False) -> None:
        """Messages that fetch weights and bring their gradients together: those of sharded weights
        in the dtype that they are added up in, in which metp holds them until its groups are done.

        Args:
            weights: ``Strategy.weights``.
            sharded: 1/p of the weights on each rank at rest; False: whole on every rank.
            compared: every rank has the gradients of whole weights; their bits are compared, with
                what ranks tell each other anyway.
        """
        e, n, training = self.itemsize, self.block.num_weight_elements, self.workload.training
        at_rest, reduced = self.workload.weight_itemsize, self.workload.reduce_dtype
        summed = at_rest if reduced is None else reduced.itemsize
        block = self.block
        own = block.num_split_weight_elements - block.num_shared_weight_elements
        whole, share = n - own * (weights == "split"), (self.p - 1) / self.p * e
        if sharded:
            if block.shares_vectors and weights != "whole":
                vectors = n - own
                whole -= vectors
                self.send_along("all_gather", vectors * share)
                if training:
                    self.send_along("reduce_scatter", vectors * share / e * summed)
                self.saved_bytes += vectors * e
            groups = self.p if weights == "streamed" else 1
            # of groups, those behind another such block; others wait for the first one in backward
            gathers = (1 + self.back) * groups * (whole > 0)
            self.send("all_gather", whole * share * (1 + self.back), gathers, ahead=True)
            if training and whole:
                self.send("reduce_scatter", whole * share / e * summed, groups, ahead=True)
                # on their way meanwhile: the gradients of the block behind, of its last group
                held = summed / groups + (max(0, summed - e) if groups > 1 else 0)
                self.workspace_bytes += whole * held
            self.workspace_bytes += (2 * whole / self.p if weights == "streamed" else whole) * e
            # of what is streamed the block itself fetches all but the first group
            behind_first = own * (groups - 1) / groups if weights == "streamed" else 0
            self.ahead_bytes += (whole - behind_first) * e
        elif training and compared:
            self.moved_bytes += n * at_rest
        elif training:
            self.send("all_reduce", 2 * n * share / e * at_rest, n > 0)
            self.moved_bytes += 4 * n * at_rest
        if at_rest != e:  # casts of what is read as it lies, and of gradients
            cast = own / self.p * (weights == "split") + whole * (not sharded)
            self.moved_bytes += cast * (e + at_rest) * (1 + self.back)
            self.saved_bytes += cast * e
        if training:
            self.workspace_bytes += n * e
