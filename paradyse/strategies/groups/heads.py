"""Which heads each group computes, for any numbers of heads and groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Slots:
    """Which heads each group computes: KV heads first, each with a part of its query heads.

    All groups are of equal size; -1 stands for a head that is missing. Columns of an MLP are KV
    heads with one query head each.
    """

    num_kv: int
    ratio: int
    """Query heads of one KV head."""
    kv: tuple[tuple[int, ...], ...]
    """Per group the KV head of each slot."""
    q: tuple[tuple[int, ...], ...]
    """Per group the query heads, ``q_sub`` of each slot in turn."""

    @property
    def num_slots(self) -> int:
        return len(self.kv[0])

    @property
    def q_sub(self) -> int:
        return len(self.q[0]) // len(self.kv[0])


@lru_cache(maxsize=64)
def head_slots(num_kv: int, ratio: int, num_groups: int) -> Slots:
    """Share ``num_kv`` KV heads of ``ratio`` query heads each out to groups.

    A KV head is replicated where that makes the groups smaller, as it must where there are fewer
    of them than groups; its query heads are then divided among the replicas.
    """

    def load(replicas: int) -> tuple[int, int]:
        slots = -(-num_kv * replicas // num_groups)
        return slots * -(-ratio // replicas) + slots, replicas

    replicas = min(range(1, min(ratio, num_groups) + 1), key=load)
    n, q_sub = -(-num_kv * replicas // num_groups), -(-ratio // replicas)
    kv, q = [], []
    for g in range(num_groups):
        kvs: list[int] = []
        qs: list[int] = []
        for slot in range(g * n, (g + 1) * n):
            head, part = divmod(slot, replicas)
            real = head < num_kv
            places = range(part * q_sub, (part + 1) * q_sub)
            mine = [head * ratio + i if real and i < ratio else -1 for i in places]
            kvs.append(head if max(mine) >= 0 else -1)
            qs += mine
        kv.append(tuple(kvs))
        q.append(tuple(qs))
    return Slots(num_kv, ratio, tuple(kv), tuple(q))


@lru_cache(maxsize=512)
def shared(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """One object for equal tables: a deep model has many blocks alike."""
    return groups
