"""What ranks tell each other beside their messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import PATIENCE, RankPool

from paradyse.distributed import collectives, control
from paradyse.distributed.axis import resolve_axis
from paradyse.distributed.together import Together


def has_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((t / "stat").read_text().rpartition(")")[2].split()[0] == "T" for t in tasks)


def ask_a_stopped_store() -> tuple[list[Any], float]:
    """What a store answers on a rank that runs, then, asked twice, on one that is stopped, and on
    one that runs again; and the seconds that it took."""
    is_host, port = dist.get_rank() == 0, [0]
    if is_host:
        store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        port = [store.port, os.getpid()]
    told = [port, port]
    dist.all_gather_object(told, port)
    answers, start = [], time.monotonic()
    if not is_host:
        port_there, pid = told[0]
        store = dist.TCPStore("127.0.0.1", port_there, 2, timeout=timedelta(seconds=5))
        with patch.object(control, "default_store", lambda: store):
            asked = control.WorldStore()

            def ask() -> None:
                answers.append(asked.ask(lambda store: store.check(["a"])))

            ask()
            os.kill(pid, signal.SIGSTOP)
            try:
                while not has_stopped(pid):  # threads that run go on for a moment
                    time.sleep(0.001)
                ask()
                ask()
            finally:
                os.kill(pid, signal.SIGCONT)
            ask()
    took = time.monotonic() - start
    dist.barrier()
    return answers, took


def test_a_stopped_store_does_not_keep_its_clients(pool2: RankPool) -> None:
    answers, took = pool2.run(ask_a_stopped_store, timeout_s=20)[1]
    assert answers == [False, None, None, False]
    assert took < 5 * PATIENCE


def alarm_of_one() -> list[bool]:
    """Whether the alarm rings: beside other work of the ranks, once one rings it, once all know."""
    bell = control.control_of((0, 1)).alarm
    for _ in range(3):
        Together(resolve_axis(), "works").each(dist.get_rank)
    heard = [bell.rings()]
    dist.barrier()
    if dist.get_rank() == 0:
        bell.ring()
    dist.barrier()
    heard.append(bell.rings())
    bell.reset()
    return [*heard, bell.rings()]


def test_an_alarm_rings_from_when_a_rank_rings_it_until_all_know(pool2: RankPool) -> None:
    assert pool2.run(alarm_of_one) == [[False, True, False]] * 2


def group_that_hangs() -> tuple[str, float]:
    """What is raised where PyTorch does not come back from making a group, and after how long."""
    mine, fresh, start = (dist.get_rank(),), control.WorldStore(), time.monotonic()
    with (
        patch.object(dist, "new_group", lambda *args, **kwargs: time.sleep(20)),
        patch.object(collectives, "timeout", lambda: timedelta(seconds=0.2)),
        patch.object(control, "world_store", lambda: fresh),
        pytest.raises(collectives.CollectiveError) as raised,
    ):
        control.control_of(mine)
    resolve_axis().session.of(collectives.Started).broken = False  # no rank waits for another
    return str(raised.value), time.monotonic() - start


def test_a_group_that_nobody_makes_is_given_up(pool2: RankPool) -> None:
    for text, took in pool2.run(group_that_hangs, timeout_s=20):
        assert "making the group of block 'agreement'" in text and "does not answer" in text
        assert took < 5 * PATIENCE


def bound_while_made() -> list[Any]:
    """The device that the world is bound to, as PyTorch sees it where a group of this rank alone
    and one of all are made, and behind that."""
    world, seen = dist.group.WORLD, list[Any]()

    def make(ranks: Any, **how: Any) -> Any:
        seen.append(world.bound_device_id)
        return "a group"

    world.bound_device_id = torch.device("cpu", 0)
    try:
        with patch.object(dist, "new_group", make):
            for ranks in ((dist.get_rank(),), (0, 1)):
                control.make_group(ranks, "gloo", timedelta(seconds=20))
        return [*seen, world.bound_device_id]
    finally:
        world.bound_device_id = None


def test_a_group_of_some_ranks_is_no_split_of_the_world(pool2: RankPool) -> None:
    """In a split of NCCL's all ranks of the world take part."""
    bound = torch.device("cpu", 0)
    assert pool2.run(bound_while_made, timeout_s=20) == [[None, bound, bound]] * 2


AT_THE_END = """
import atexit, threading, time
alive = lambda: [t for t in threading.enumerate() if t is not threading.main_thread()]
atexit.register(lambda: print("alive:", len(alive())))  # before any other, so it runs last

import torch.distributed as dist
store = dist.TCPStore("localhost", 0, 1, True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
from paradyse.distributed.control import world_store

def slow(store):
    time.sleep(0.4)
    return store.check(["x"])

kept = world_store()
print("answer:", kept.ask(slow, 0.1), "alive:", len(alive()))
"""


def test_no_question_is_under_way_when_python_ends() -> None:
    """A thread that comes back from C++ while Python ends aborts the process."""
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["answer: None alive: 1", "alive: 0"]
