"""Collectives: what they give, whom their bytes are booked to, and what a failure says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from harness import RankPool
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.agreement import agreement_of
from paradyse.distributed.axis import SINGLE, Axis, resolve_axis
from paradyse.distributed.collectives import CollectiveError, Pending, register_block, traffic


def everything(n: int) -> dict[str, Any]:
    """Results of all collectives on this rank's [r, r+1, ..], and the bytes that each sent."""
    axis = resolve_axis()
    x = torch.arange(float(n)) + axis.rank
    stacked = torch.stack([x + 10 * i for i in range(axis.size)])
    calls = {
        "all_gather": lambda b: collectives.all_gather(x, axis, b),
        "all_to_all": lambda b: collectives.all_to_all(stacked, axis, b),
        "reduce_scatter": lambda b: collectives.reduce_scatter(stacked, axis, b),
        "all_reduce": lambda b: collectives.all_reduce(x, axis, b),
        "broadcast": lambda b: collectives.broadcast(x.clone(), axis, 1, b).wait(),
        "reduce": lambda b: collectives.reduce_to(x.clone(), axis, 1, b).wait(),
        "ring_exchange": lambda b: collectives.ring_exchange(x, axis, b).wait(),
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        block = register_block(axis, name)
        found[name] = call(block).clone()
        booked = traffic(axis, block)
        assert dict(booked.calls) == {name: 1}, booked
        found[f"{name} bytes"] = booked.sent_bytes[name]
    return found


@pytest.mark.parametrize("n", [3, 1 << 15])
def test_values_and_bytes(n: int, pool3: RankPool) -> None:
    results = pool3.run(everything, n)
    mine = [torch.arange(float(n)) + r for r in range(3)]
    size = 4 * n
    for r, got in enumerate(results):
        want: dict[str, Tensor] = {
            "all_gather": torch.stack(mine),
            "all_to_all": torch.stack([x + 10 * r for x in mine]),
            "reduce_scatter": sum(mine) + 30 * r,
            "all_reduce": sum(mine),
            "broadcast": mine[1],
            "ring_exchange": mine[r - 1],
        }
        if r == 1:
            want["reduce"] = sum(mine)
        for name, value in want.items():
            assert torch.equal(got[name], value), name
        for name in ("all_gather", "all_to_all", "reduce_scatter"):
            assert got[f"{name} bytes"] == 2 * size
        assert got["ring_exchange bytes"] == size
        assert got["all_reduce bytes"] == 4 * size // 3
        assert got["broadcast bytes"] == (2 * size if r == 1 else 0)
        assert got["reduce bytes"] == (0 if r == 1 else size)


def carried(dtype: torch.dtype) -> dict[str, list[int]]:
    """What comes of whole numbers of ``dtype``, by collective."""
    axis = resolve_axis()
    x = torch.arange(6).reshape(3, 2).to(dtype) + axis.rank
    counts = ((1, 2, 0), (0, 1, 2), (1, 1, 1))
    found = {
        "all_gather": collectives.all_gather(x, axis, collectives.MACHINE),
        "all_to_all": collectives.all_to_all(x, axis, collectives.MACHINE),
        "all_reduce": collectives.all_reduce(x, axis, collectives.MACHINE),
        "ring_exchange": collectives.ring_exchange(x, axis, collectives.MACHINE).wait(),
        "rows": collectives.start_rows(x, counts, axis, collectives.MACHINE).wait(),
    }
    assert all(y.dtype == dtype for y in found.values())
    return {name: y.tolist() for name, y in found.items()}


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.float8_e5m2])
def test_values_of_any_dtype_travel(dtype: torch.dtype, pool3: RankPool) -> None:
    """Also of those that the process group does not send."""
    if dtype.is_floating_point:
        got = pool3.run(gathered, dtype)
        assert got == [[[float(r), 1.0] for r in range(3)]] * 3
        return
    got = pool3.run(carried, dtype)
    mine = [torch.arange(6).reshape(3, 2) + r for r in range(3)]
    counts = torch.tensor(((1, 2, 0), (0, 1, 2), (1, 1, 1)))
    for r, found in enumerate(got):
        assert found["all_gather"] == torch.stack(mine).tolist()
        assert found["all_to_all"] == torch.stack([x[r] for x in mine]).tolist()
        assert found["all_reduce"] == sum(mine).tolist()
        assert found["ring_exchange"] == mine[r - 1].tolist()
        parts = [x.split(counts[i].tolist())[r] for i, x in enumerate(mine)]
        assert found["rows"] == torch.cat(parts).tolist()


def gathered(dtype: torch.dtype) -> Any:
    axis = resolve_axis()
    x = torch.tensor([axis.rank, 1.0]).to(dtype)
    return collectives.all_gather(x, axis, collectives.MACHINE).float().tolist()


COUNTS = ((2, 0, 3), (0, 0, 1), (4, 1, 0))
"""Rows from each rank to each: one has none for any other but one, one none for itself."""


def rows(width: int, absent: bool) -> tuple[Tensor, int]:
    """What came of rows that tell where they are from and to, and the bytes that were sent.

    Args:
        absent: the last rank takes part without values of its own, as one does that is behind.
    """
    axis = resolve_axis()
    agreement_of(axis)  # which opens the group of large messages to lower ranks
    block = register_block(axis, "rows")
    if absent and axis.rank == axis.size - 1:
        message = collectives.Message("rows", (5, width), torch.float32, "cpu", counts=COUNTS)
        message.take_part(axis)
        return torch.empty(0), 0
    numbers = [
        100 * axis.rank + 10 * to for to, n in enumerate(COUNTS[axis.rank]) for _ in range(n)
    ]
    x = torch.tensor(numbers, dtype=torch.float32)[:, None].expand(-1, width)
    return collectives.start_rows(x, COUNTS, axis, block).wait(), traffic(
        axis, block
    ).sent_bytes.total()


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("width", [3, 1 << 16])
def test_rows_of_any_number(width: int, absent: bool, pool3: RankPool) -> None:
    """Also where some messages are so large that they travel by another group, and some are not."""
    for rank, (came, sent) in enumerate(pool3.run(rows, width, absent, timeout_s=30)):
        if absent and rank == 2:
            continue
        sources = [(r, COUNTS[r][rank]) for r in range(3) for _ in range(COUNTS[r][rank])]
        want = [0 if absent and r == 2 else 100 * r + 10 * rank for r, _ in sources]
        assert came.shape == (len(want), width)
        assert came[:, 0].tolist() == want and came.eq(came[:, :1]).all()
        assert sent == 4 * width * (sum(COUNTS[rank]) - COUNTS[rank][rank])


def shares() -> tuple[int, int]:
    """Bytes of one message that are booked to two blocks."""
    axis = resolve_axis()
    one, two = register_block(axis, "one"), register_block(axis, "two")
    collectives.all_reduce_in_place(torch.ones(10), axis, {one: 30, two: 10})
    return traffic(axis, one).sent_bytes["all_reduce"], traffic(axis, two).sent_bytes["all_reduce"]


def test_a_message_of_several_blocks_is_booked_to_each(pool2: RankPool) -> None:
    assert pool2.run(shares) == [(30, 10)] * 2


def objects() -> list[Any]:
    axis = resolve_axis()
    return collectives.gather_objects(["x" * 100 * axis.rank, axis.rank], axis, collectives.PROFILE)


def test_objects_of_other_sizes_are_gathered(pool3: RankPool) -> None:
    assert pool3.run(objects) == [[["", 0], ["x" * 100, 1], ["x" * 200, 2]]] * 3
    assert collectives.gather_objects("alone", SINGLE, collectives.PROFILE) == ["alone"]


def test_blocks_of_an_axis_have_ids_of_their_own() -> None:
    ids = [register_block(SINGLE, name) for name in ("a", "b")]
    assert len({*ids, *range(len(collectives.RESERVED))}) == 2 + len(collectives.RESERVED)
    assert [traffic(SINGLE, i).name for i in ids] == ["a", "b"]


class Broken:
    """A collective under way that ends badly."""

    def __init__(self, error: str) -> None:
        self.error = error

    def wait(self, timeout: object) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return False

    def is_completed(self) -> bool:
        return True


@pytest.mark.parametrize("error", ["", "connection closed by peer"])
def test_a_failure_names_the_collective_the_block_and_the_rank(error: str) -> None:
    block = register_block(SINGLE, "layers.3.mlp")
    traffic(SINGLE, block).strategy = "metp"
    pending = Pending([None, Broken(error)], None, "all_gather", SINGLE, block, None)
    text = re.escape("rank 0 of 1: all_gather of block 'layers.3.mlp' (strategy metp) did not")
    with pytest.raises(CollectiveError, match=f"{text}.*{error}"):
        pending.wait()


class OutOfMemory:
    """A collective for which there is no memory."""

    def wait(self, timeout: object) -> bool:
        raise torch.OutOfMemoryError("no memory for a buffer")

    def is_completed(self) -> bool:
        return True


def test_out_of_memory_stays_what_it_is() -> None:
    block = register_block(SINGLE, "layers.3.mlp")
    pending = Pending([OutOfMemory()], None, "all_gather", SINGLE, block, None)
    with pytest.raises(torch.OutOfMemoryError, match="no memory for a buffer"):
        pending.wait()

    def launch() -> Any:
        raise torch.OutOfMemoryError("no memory to send")

    with pytest.raises(torch.OutOfMemoryError, match="no memory to send"):
        collectives._start("all_gather", torch.ones(1), SINGLE, block, 0, launch, None)


class JustInTime:
    """A collective that ends between the end of a wait and the question whether it has."""

    def __init__(self) -> None:
        self.waits = iter([RuntimeError("Operation timed out!"), True])

    def wait(self, timeout: object) -> bool:
        answer = next(self.waits)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    def is_completed(self) -> bool:
        return True


def test_what_ends_just_after_a_wait_has_ended_well() -> None:
    block = register_block(SINGLE, "layers.3.mlp")
    pending = Pending([JustInTime()], "received", "all_gather", SINGLE, block, None)
    assert pending.wait() == "received"


class Patient:
    """A collective that notes how it is waited for."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def wait(self, *timeout: object) -> bool:
        self.asked.append(timeout)
        return True


@pytest.mark.parametrize(("backend", "waits"), [("nccl", 0), ("gloo", 1)])
def test_the_host_polls_for_no_message_on_nccl(
    backend: str, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Axis, "backend", backend)
    axis = Axis("of a test of waiting", 2, 0, object())
    work = Patient()
    Pending([work], None, "all_gather", axis, register_block(axis, "a"), None).wait()
    assert [len(given) for given in work.asked] == [waits]


@pytest.mark.parametrize("text", ["abc", "", "nan", "inf", "-1", "0", "1e9"])
def test_a_time_out_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(collectives.TIMEOUT_VARIABLE, text)
    with pytest.raises(ValueError, match=f"{collectives.TIMEOUT_VARIABLE} is '{text}'.*above 0"):
        collectives.timeout()
