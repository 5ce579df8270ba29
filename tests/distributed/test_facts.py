"""What errors say of facts that differ."""

from __future__ import annotations

from paradyse.distributed.facts import (
    DOING,
    OPTIMIZERS,
    SAME_BATCH,
    WAYS_OUT,
    difference,
    digest,
)

CALLS, SKIPS = "calls the model (training call 3)", "runs backward of training call 2"


def told(doing: str, leader: int = 0, **facts: object) -> tuple[int, dict, dict, None]:
    shared = {DOING: doing}
    return leader, shared, {**shared, **facts}, None


def test_what_all_ranks_share_is_named_first() -> None:
    text = difference([told(CALLS, size=1), told(SKIPS, size=2)], [4, 6])
    assert f"{DOING}: rank 4: {CALLS}, rank 6: {SKIPS}. {WAYS_OUT[DOING]}" in text


def test_axes_are_compared_each_for_itself() -> None:
    text = difference(
        [told(CALLS, a, size=n) for a, n in ((0, 7), (0, 7), (2, 7), (2, 9))], [*"0123"]
    )
    assert f"size: rank 2: 7, rank 3: 9. {SAME_BATCH}" in text


def test_a_fact_that_one_rank_lacks_differs() -> None:
    facts = {OPTIMIZERS: 1}
    text = difference(
        [told(CALLS), told(CALLS)[:2] + ({DOING: CALLS, **facts}, None)][::-1], [0, 1]
    )
    assert f"{OPTIMIZERS}: rank 0: 1, rank 1: nothing. {WAYS_OUT[OPTIMIZERS]}" in text


def test_a_digest_is_the_same_in_every_process() -> None:
    assert digest({"length": 7}) == -7851164132131680101
    assert digest({"length": 7}) != digest({"length": 8})
