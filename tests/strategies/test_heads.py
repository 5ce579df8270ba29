"""Which rank computes which heads: one dealing, for what runs and for what it costs."""

from __future__ import annotations

import itertools

import torch

from paradyse.kernels.head_slots import HeadSlots
from paradyse.strategies.groups.heads import deal_heads

CASES = [
    *itertools.product(range(1, 13), range(1, 9), range(1, 17)),  # KV heads, ratio, ranks
    *itertools.product((1, 8, 50, 71), (1, 4, 71), (1, 3, 8, 32)),
]


def test_every_head_is_computed_once_beside_its_kv_head() -> None:
    for num_kv, ratio, p in CASES:
        slots = deal_heads(num_kv * ratio, num_kv, p)
        assert sorted(h for q in slots.q for h in q if h >= 0) == list(range(num_kv * ratio))
        assert {len(q) for q in slots.q} == {slots.queries_per_rank}
        assert {len(kv) for kv in slots.kv} == {slots.slots_per_rank}
        for rank, (kv, q) in enumerate(zip(slots.kv, slots.q, strict=True)):
            own = [h for h in q if h >= 0]
            assert {h // ratio for h in own} == {h for h in kv if h >= 0}
            assert all(
                h < 0 or kv[i // slots.heads_per_slot] == h // ratio for i, h in enumerate(q)
            )
            assert sum(h >= 0 for h in kv) == slots.real_slots(rank)
            assert set(own) <= set(slots.head_ids(rank, torch.device("cpu")).tolist())


def test_the_busiest_rank_has_the_least_to_do() -> None:
    """No other number of replicas leaves it fewer query heads, nor as many and fewer KV heads."""
    for num_kv, ratio, p in CASES:
        slots = deal_heads(num_kv * ratio, num_kv, p)
        work = slots.queries_per_rank, slots.slots_per_rank
        others = (HeadSlots(num_kv * ratio, num_kv, p, r) for r in range(1, min(ratio, p) + 1))
        assert work == min((s.queries_per_rank, s.slots_per_rank) for s in others)
        assert work[0] <= ratio * -(-num_kv // p)  # what whole KV heads would give it
        assert slots.replicas == 1 or work[0] < ratio * -(-num_kv // p)


def test_kv_heads_are_copied_where_that_balances_and_only_there() -> None:
    assert deal_heads(8, 4, 2).kv == ((0, 1), (2, 3))
    assert deal_heads(4, 2, 4).q == ((0,), (1,), (2,), (3,))
    assert deal_heads(2, 2, 3).q == ((0,), (1,), (-1,))
    assert deal_heads(71, 1, 4).queries_per_rank == 18
    assert deal_heads(12, 3, 2).queries_per_rank == 6  # where whole KV heads give 8 and 4
    assert deal_heads(9, 3, 2).queries_per_rank == 6  # copies would not help
    assert deal_heads(40, 10, 8).queries_per_rank == 5


def test_messages_hold_every_head() -> None:
    for num_kv, ratio, p in itertools.product(range(1, 9), range(1, 7), range(1, 9)):
        slots = deal_heads(num_kv * ratio, num_kv, p)
        x = torch.randn(2, 3, num_kv * ratio, 5)
        assert torch.equal(slots.collect_queries(slots.spread_queries(x).flatten(2), 5), x)
        y = torch.randn(2, 3, num_kv, 5)
        copied = slots.sum_keys(slots.spread_keys(y).flatten(2), 5)
        torch.testing.assert_close(copied, y * slots.replicas)
