"""The harness itself: a failing rank fails the test, soon, and says where."""

from __future__ import annotations

import os
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from harness import MOST_THREADS, PATIENCE, RankFailure, RankPool, run_ranks


def rank_times(factor: int) -> tuple[int, int, torch.Tensor]:
    total = torch.tensor([dist.get_rank() * factor])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total


def raise_on_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("seven is not a prime of this rank")
    dist.barrier()


def hang_on_first_rank() -> None:
    if dist.get_rank() != 0:
        wait_for_a_rank_that_does_not_come()


def wait_for_a_rank_that_does_not_come() -> None:
    dist.barrier()


def die_on_first_rank() -> None:
    if dist.get_rank() == 0:
        print("last words", flush=True)
        os._exit(7)
    dist.barrier()


def warn() -> None:
    warnings.warn("something is amiss", UserWarning, stacklevel=1)


def process_id() -> int:
    return os.getpid()


def leave_threads(number: int) -> None:
    for _ in range(number):
        threading.Thread(target=threading.Event().wait, daemon=True).start()


def change_defaults() -> None:
    torch.set_default_dtype(torch.float64)
    torch.rand(3)


def first_random_number() -> torch.Tensor:
    return torch.rand(1)


def group_of_its_own() -> bool:
    return dist.is_initialized()


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_results_come_in_the_order_of_ranks(ranks, nproc: int) -> None:
    total = 10 * nproc * (nproc - 1) // 2
    for rank, got in enumerate(ranks(nproc).run(rank_times, 10)):
        assert got[:2] == (rank, nproc) and got[2].tolist() == [total]


def test_an_exception_shows_the_rank_and_its_traceback(pool2: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        pool2.run(raise_on_last_rank)
    text = str(failure.value)
    assert "rank 1 of 2 raised" in text and "seven is not a prime" in text
    assert "in raise_on_last_rank" in text, text
    assert "rank 0 has not returned" in text and "barrier" in text
    assert failure.value.errors[1].type_name == "ValueError" and not failure.value.timed_out


def test_a_hang_fails_in_bounded_time_with_stacks(pool2: RankPool) -> None:
    pool2.run(process_id)  # starting is not what is measured
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        pool2.run(hang_on_first_rank, timeout_s=4.0)
    assert time.monotonic() - start < 10 * PATIENCE
    text = str(failure.value)
    assert f"no result from rank 1 of 2 in {4 * PATIENCE:g} s" in text
    assert "in wait_for_a_rank_that_does_not_come" in text, text
    assert failure.value.timed_out and not failure.value.errors


def test_a_rank_that_dies_is_named_with_its_output(pool2: RankPool) -> None:
    with pytest.raises(RankFailure, match="rank 0 of 2 died, exit code 7") as failure:
        pool2.run(die_on_first_rank)
    assert "last words" in str(failure.value)


@pytest.mark.broad
def test_a_pool_keeps_its_processes_until_a_failure(pool2: RankPool) -> None:
    before = pool2.run(process_id)
    assert pool2.run(process_id) == before
    with pytest.raises(RankFailure):
        pool2.run(raise_on_last_rank)
    after = pool2.run(process_id)
    assert not set(before) & set(after)


def test_ranks_crowded_with_threads_are_replaced_between_tests() -> None:
    with RankPool(1) as pool:
        (before,) = pool.run(process_id)
        pool.renew()
        assert pool.run(process_id) == [before]
        pool.run(leave_threads, MOST_THREADS)
        pool.renew()
        assert pool.run(process_id) != [before]


def test_warnings_are_errors_on_the_ranks_too(pool1: RankPool) -> None:
    with pytest.raises(RankFailure, match="something is amiss"):
        pool1.run(warn)


def test_a_case_does_not_see_the_defaults_of_the_one_before(pool1: RankPool) -> None:
    (before,) = pool1.run(first_random_number)
    pool1.run(change_defaults)
    (after,) = pool1.run(first_random_number)
    assert after.dtype == torch.float32 and torch.equal(before, after)


def test_fresh_ranks_can_leave_the_group_to_the_function() -> None:
    assert run_ranks(group_of_its_own, 2) == [True, True]
    assert run_ranks(group_of_its_own, 2, init=False) == [False, False]
