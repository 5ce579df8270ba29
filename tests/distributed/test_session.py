"""State of an axis: one instance of each kind, gone with the process group; bounded caches."""

from __future__ import annotations

from paradyse.distributed.session import Recent, Session


class Counter:
    def __init__(self) -> None:
        self.value = 0


def test_a_session_has_one_of_each_kind_and_shares_none() -> None:
    one, other = Session(), Session()
    one.of(Counter).value = 3
    assert one.of(Counter).value == 3 and other.of(Counter).value == 0
    assert one.of(list) is one.of(list) is not other.of(list)
    one.forget(Counter)
    assert one.of(Counter).value == 0


def test_a_cache_of_lengths_holds_the_latest() -> None:
    cache: Recent[int, int] = Recent()
    for n in range(2 * Recent.CAPACITY):
        cache[n] = n
        cache[n] = -n  # the same entry
    assert len(cache) == Recent.CAPACITY
    assert list(cache)[0] == Recent.CAPACITY and cache[Recent.CAPACITY] == -Recent.CAPACITY
