"""Which rank computes which heads, for any numbers of heads and ranks: every strategy deals them
here.
"""

from __future__ import annotations

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
