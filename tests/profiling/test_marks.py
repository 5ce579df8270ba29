"""What the marks of a step make of times and of memory."""

from __future__ import annotations

import torch

from paradyse.planning.costs import BlockCost, peak_bytes
from paradyse.profiling.marks import (
    DONE,
    END,
    ENTER,
    EXIT,
    FETCH,
    FETCHED,
    FREED,
    GRAD,
    LOSS,
    SEND,
    SENT,
    START,
    TAKEN,
    HostAllocations,
    Level,
    Watch,
    memory_of,
    times_of,
)


class Script:
    """Marks of two blocks, a reading at each."""

    MARKS = (
        (START, -1),
        (FETCH, -1),
        (FETCHED, -1),
        (ENTER, 1),
        (TAKEN, -1),
        (EXIT, 1),
        (FREED, 1),
        (ENTER, 2),
        (EXIT, 2),
        (FREED, 2),
        (LOSS, -1),
        (GRAD, 2),
        (DONE, 2),
        (GRAD, 1),
        (DONE, 1),
        (END, -1),
    )

    def note(self) -> None:
        """Read from a table."""

    def watch(self) -> Watch:
        return Watch(self, list(self.MARKS))


def test_times_add_up() -> None:
    seconds = [0, 1, 1, 2, 2.5, 4, 5, 5, 8, 9, 12, 14, 19, 20, 26, 30]
    times = times_of(Script().watch(), seconds)
    assert times.forward_s == {1: 2, 2: 3, -1: 12 - 5}
    assert times.backward_s == {2: 5, 1: 6, -1: 18 - 11}


def test_memory_adds_up() -> None:
    #        start       fetched enter 1     exit freed e2  exit freed loss
    held = [0, 10, 40, 40, 40, 60, 25, 25, 60, 55, 65] + [55, 25, 25, 12, 12]
    peak = [0, 12, 45, 40, 80, 70, 61, 25, 90, 60, 70] + [99, 85, 25, 44, 50]
    levels = [Level(h, p) for h, p in zip(held, peak, strict=True)]
    memory = memory_of(Script().watch(), levels, {})
    # 30 bytes came ahead for block 1 and are its own to hold: it began with 10, not with 40.
    assert memory.saved_bytes == {1: 25 - 10, 2: 55 - 25, -1: 55 - 15 - 30}
    assert memory.workspace_bytes == {1: 70 - 25, 2: 90 - 55, -1: 99 - 55}
    assert memory.ahead_bytes == {1: 30, 2: 0}
    assert memory.peak_bytes == 99 and memory.floor_bytes == 50


def test_gradients_under_way_are_workspace_and_what_the_caller_holds_is_none() -> None:
    """Two blocks and a head whose logits, 20 bytes, are held to the end. In backward the head sends
    gradients of 8 bytes, which are there until block 2 sends its own, of 6."""
    head = -8
    marks = [(START, -1), (ENTER, 1), (EXIT, 1), (FREED, 1), (ENTER, 2), (EXIT, 2), (FREED, 2)]
    marks += [(ENTER, head), (EXIT, head), (FREED, head), (LOSS, -1), (GRAD, head), (SEND, -1)]
    marks += [(SENT, -1), (DONE, head), (GRAD, 2), (SEND, -1), (SENT, -1), (DONE, 2), (GRAD, 1)]
    marks += [(DONE, 1), (END, -1)]
    held = [0, 0, 10, 10, 10, 22, 22, 22, 45, 45, 45, 45] + [45, 53, 50, 50, 42, 48, 36, 36, 20, 20]
    peak = [*held]
    peak[8], peak[13], peak[16], peak[20] = 60, 57, 70, 66  # forward of the head, backward of each
    watch = Watch(Script(), marks)
    levels = [Level(h, p) for h, p in zip(held, peak, strict=True)]
    memory = memory_of(watch, levels, {})
    assert memory.saved_bytes == {1: 10, 2: 12, head: 23, -1: 0}
    # Of block 2, beyond what it and block 1 save and what is held of the head; of block 1 likewise.
    workspace = {1: 66 - 10 - 20, 2: 70 - 22 - 20, head: 60 - 45, -1: 50 - 45}
    assert memory.workspace_bytes == workspace
    costs = [
        BlockCost(0.0, memory.saved_bytes[i], memory.workspace_bytes[i], 0) for i in (1, 2, head)
    ]
    assert memory.peak_bytes == 70 and peak_bytes(costs) + 20 >= 70
    # 5 of the 20 bytes are the gradient that the head hands on to block 2: no more the caller's.
    watch.gradient_bytes[2] = 5
    memory = memory_of(watch, levels, {})
    assert memory.workspace_bytes == workspace | {1: 66 - 10 - 15, 2: 70 - 22 - 15}


def test_gradients_that_blocks_hand_on_are_workspace_and_what_they_leave_is_none() -> None:
    """Blocks save 15 and 30 bytes, and what is in none of them 10; the gradient of each block's
    output has 4 bytes, and block 2 leaves 6 until the end of the step."""
    held = [0, 10, 10, 10, 10, 25, 25, 25, 55, 55, 55] + [59, 35, 35, 20, 10]
    peak = [*held]
    peak[12], peak[14] = 80, 70
    watch = Script().watch()
    watch.gradient_bytes.update({1: 4, 2: 4})
    levels = [Level(h, p) for h, p in zip(held, peak, strict=True)]
    left = {2: 6}
    memory = memory_of(watch, levels, left)
    assert memory.saved_bytes == {1: 15, 2: 30, -1: 59 - 45}
    assert memory.workspace_bytes == {1: 70 - 6 - 29, 2: 80 - 59, -1: 0}
    costs = [
        BlockCost(0.0, memory.saved_bytes[i], memory.workspace_bytes[i], 0, left.get(i, 0))
        for i in (1, 2)
    ]
    assert peak_bytes(costs, BlockCost(0.0, memory.saved_bytes[-1], 0, 0)) == 80
    # On a device the gradients that this step made, of 9 bytes at most, are static.
    made = memory_of(watch, levels, left, new_bytes=9)
    assert made.workspace_bytes[1] == 70 - 6 - 29


def test_host_memory_is_exact() -> None:
    with HostAllocations() as probe:
        probe.note()
        x = torch.empty(1000, dtype=torch.uint8)
        y = torch.empty(500, dtype=torch.uint8)
        del y
        probe.note()
        z = torch.empty(300, dtype=torch.uint8)
        del x, z
        probe.note()
    assert probe.read() == [Level(0, 0), Level(1000, 1500), Level(0, 1300)]
