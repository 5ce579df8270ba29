"""Which rank computes which heads, for any numbers of heads and ranks: every strategy deals them
here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from paradyse.kernels.head_slots import HeadSlots


def deal_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> HeadSlots:
    """Deal KV heads to ranks, each with (a part of) its query heads.

    KV heads come first, so that the ratio of query heads to KV heads is the same everywhere. A KV
    head is replicated, and its query heads shared out, where that leaves the busiest rank fewer
    query heads (the work that grows with the square of the length), as it must where there are
    fewer KV heads than ranks; among equals the fewest KV heads per rank win (bytes, projections).

    Args:
        num_heads: query heads, a multiple of ``num_kv_heads``. Columns of an MLP are query heads
            with a KV head each.
        num_ranks: of the axis; there are as many groups.
    Returns:
        slots of equal number and size on all ranks, so with padding; what is real is in
        ``HeadSlots.q``.
    """
    most = min(num_heads // num_kv_heads, num_ranks)
    dealings = [HeadSlots(num_heads, num_kv_heads, num_ranks, r) for r in range(1, most + 1)]
    return min(dealings, key=lambda s: (s.queries_per_rank, s.slots_per_rank, s.replicas))


MOST_TURNS = 4
"""Of an exchange: with so many, a quarter of it is waited for with nothing to compute."""

LEAST_TURN_BYTES = {"gloo": 2**19, "nccl": 2**22}
"""Of a turn's queries, keys and values to each rank: the latency of smaller messages is more than
what hides of them. Half of it gains no more over gloo on links of 83 MB/s, and costs on loopback,
where the processors that compute carry the messages; for NCCL it is an estimate."""

_at_once: ContextVar[bool] = ContextVar("heads_at_once", default=False)


@contextmanager
def heads_at_once() -> Iterator[None]:
    """Inside, this thread's heads go in one turn, whatever the length."""
    token = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(token)


def deal_in_turns(slots: HeadSlots, num_bytes: float, on_host: bool) -> tuple[HeadSlots, int]:
    """Deal heads in turns, so that those of one are computed while those of another travel.

    The turns are as many heads each, one share of them behind the other, and dealt alike: as many
    as ``MOST_TURNS`` and ``LEAST_TURN_BYTES`` allow without a rank having more heads than in one.

    Args:
        slots: of ``deal_heads``, of all heads at once.
        num_bytes: of all queries, keys and values that a rank sends to each.
        on_host: whether messages go over gloo.
    Returns:
        the slots of one turn, and the number of turns.
    """
    most = int(num_bytes // LEAST_TURN_BYTES["gloo" if on_host else "nccl"])
    if slots.num_ranks == 1 or _at_once.get():
        most = 1
    for turns in range(min(most, MOST_TURNS, slots.num_kv_heads), 1, -1):
        if slots.num_kv_heads % turns:
            continue
        share = slots.num_heads // turns, slots.num_kv_heads // turns
        each = deal_heads(*share, slots.num_ranks)
        heads = each.queries_per_rank * turns, each.slots_per_rank * turns
        if heads == (slots.queries_per_rank, slots.slots_per_rank):
            return each, turns
    return slots, 1
