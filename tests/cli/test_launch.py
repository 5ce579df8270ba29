"""Local ranks: results in order, reports as they come, failures told quickly and whole."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from paradyse.cli import launch
from paradyse.cli.launch import Rank, RanksFailed, Setting, run_ranks
from paradyse.cli.main import main

SETTING = Setting(timeout_s=60, env={"PYTHONPATH": str(Path(__file__).parent)})


def add_ranks(rank: Rank, start: int) -> int:
    import torch
    import torch.distributed as dist

    total = torch.tensor(start + rank.rank)
    dist.all_reduce(total)
    rank.send(f"rank {rank.rank} of {rank.size} on {rank.device}")
    return int(total)


def raise_on_rank_one(rank: Rank) -> None:
    import torch.distributed as dist

    print("what rank", rank.rank, "had to say", flush=True)
    if rank.rank == 1:
        raise LookupError("the cause")
    dist.barrier()


def raise_value_error(rank: Rank) -> None:
    raise ValueError("of another library")


def die_on_rank_one(rank: Rank) -> None:
    import torch.distributed as dist

    if rank.rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()


def sleep_for_ever(rank: Rank) -> None:
    time.sleep(1000)


def child_pid(rank: Rank) -> None:
    rank.send(os.getpid())
    time.sleep(1000)


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_allocator_of_gpus_is_set_unless_the_user_has(monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = launch.ALLOCATOR_VARIABLES
    for name in (new, old):
        monkeypatch.delenv(name, raising=False)
    assert launch.environment(0, 2, SETTING)[new] == "expandable_segments:True"
    monkeypatch.setenv(old, "max_split_size_mb:64")
    assert new not in launch.environment(0, 2, SETTING)


def test_ranks_hash_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert launch.environment(1, 2, SETTING)["PYTHONHASHSEED"] == "0"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert launch.environment(1, 2, SETTING)["PYTHONHASHSEED"] == "7"


@pytest.mark.broad
def test_results_come_in_order_and_reports_with_their_rank() -> None:
    heard: dict[int, Any] = {}
    results = run_ranks("test_launch:add_ranks", 2, {"start": 10}, SETTING, heard.__setitem__)
    assert results == [21, 21]
    assert heard == {0: "rank 0 of 2 on cpu", 1: "rank 1 of 2 on cpu"}


def test_a_rank_that_raises_ends_the_others_and_shows_its_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as e:
        run_ranks("test_launch:raise_on_rank_one", 2, {}, SETTING)
    assert time.monotonic() - start < 45
    text = str(e.value)
    assert text.startswith("rank 1 of 2 failed:\nTraceback")
    assert "LookupError: the cause" in text and "raise_on_rank_one" in text
    assert "what rank 1 had to say" in text


@pytest.mark.slow
def test_what_this_package_refuses_is_told_without_a_traceback() -> None:
    with pytest.raises(ValueError, match=r"^the plan: unknown strategy Rank\(rank=0"):
        target = "paradyse.config:check_strategy"  # which is given the rank as a name
        run_ranks(target, 1, {"where": "the plan"}, SETTING)
    with pytest.raises(RanksFailed, match="(?s)Traceback.*of another library"):
        run_ranks("test_launch:raise_value_error", 1, {}, SETTING)


@pytest.mark.broad
def test_a_rank_that_dies_is_named_with_its_signal() -> None:
    with pytest.raises(RanksFailed, match="rank 1 of 2 was ended by signal SIGKILL; out of memory"):
        run_ranks("test_launch:die_on_rank_one", 2, {}, SETTING)


@pytest.mark.broad
def test_a_hang_ends_in_time_with_the_stacks() -> None:
    from harness import PATIENCE  # which the ranks, that import this file, do not find

    setting = Setting(timeout_s=20 * PATIENCE, env=SETTING.env)  # imports take up to half of it
    text = rf"not finished in {setting.timeout_s:.0f} s(?s:.*)sleep_for_ever"
    with pytest.raises(RanksFailed, match=text):
        run_ranks("test_launch:sleep_for_ever", 1, {}, setting)


@pytest.mark.parametrize("command", ["verify --model {}", "plan --model {}", "bench", "demo"])
def test_ranks_may_be_silent_as_long_as_the_timeout(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2}))
    monkeypatch.chdir(tmp_path)
    given: list[Setting] = []

    def note(target: str, num_ranks: int, arguments: Any, setting: Setting, hear: Any) -> None:
        given.append(setting)
        raise RanksFailed("enough")

    monkeypatch.setattr(launch, "run_ranks", note)
    flags = ["--timeout", "7200", "--device", "cpu"]
    flags += ["--link", "1gbit"] if command == "demo" else []
    monkeypatch.setattr(launch.links, "why_not", lambda: "")
    assert main([*command.format(tmp_path / "config.json").split(), *flags]) == 1
    assert [(s.timeout_s, s.silence_s) for s in given] == [(7200, 7200)]


def test_an_interrupt_leaves_no_rank_behind() -> None:
    pids: list[int] = []

    def interrupt(rank: int, pid: int) -> None:
        pids.append(pid)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ranks("test_launch:child_pid", 1, {}, SETTING, interrupt)
    assert pids and all(map(_gone, pids))


def test_more_ranks_than_the_cores_can_bear_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "num_cores", lambda: 2)
    assert launch.choose_device("cpu", 8) == "cpu"
    with pytest.raises(ValueError, match="--ranks 9: at most 8 CPU ranks .* 2 cores"):
        launch.choose_device("cpu", 9)


def test_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert launch.choose_device("auto", 2) == "cpu"
    with pytest.raises(ValueError, match="torch sees no GPU; use --device cpu"):
        launch.choose_device("cuda", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert launch.choose_device("auto", 1) == "cuda"
    with pytest.raises(ValueError, match="2 ranks need as many GPUs, and there are 1"):
        launch.choose_device("cuda", 2)
