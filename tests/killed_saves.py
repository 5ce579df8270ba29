"""Saves killed at random moments: the newest whole checkpoint loads, with the values of its step.

    python tests/killed_saves.py [--kills 100] [--seed 0]

Two ranks save step after step, some steps twice, and keep two. SIGKILL ends the one, the other or
both after a random time. Then one process, and two new ranks that go on from there, load the newest
checkpoint: its checksums hold, its weights and moments are those of the step that it claims, and
that step is no earlier than the last one whose save had returned. A rank that is left says who is
gone.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness import PATIENCE, RankFailure, RankPool
from models import whole
from torch import Tensor, nn

import paradyse

LONGEST_S = 0.25
"""Until the kill, counted from when both ranks have loaded: some saves long."""
ROUND_S = 60.0
"""Of a round, before it is taken for hung."""
VICTIMS = ((0,), (1,), (0, 1))

Run = tuple[nn.Module, torch.optim.Optimizer]


def new_run() -> Run:
    """A model and an optimizer that has state."""
    model = paradyse.shard(nn.Sequential(nn.Embedding(101, 64), nn.Linear(64, 33)))
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer


def values_at(run: Run, step: int) -> Iterator[tuple[Tensor, float]]:
    """All weights and moments of ``run``, and what each is full of after ``step``."""
    model, optimizer = run
    parameters = list(model.parameters())
    moments = [x for p in parameters for _, x in sorted(optimizer.state[p].items())]
    for i, x in enumerate((*parameters, *moments)):
        yield x.detach(), step + i / 64


def load(folder: Path, run: Run) -> int:
    """The step of the newest checkpoint, which is as it was saved; 0 if none was saved yet."""
    done = int((folder / "journal").read_text().split()[-1])
    try:
        found = paradyse.load_checkpoint(folder / "run", *run)
    except FileNotFoundError:
        assert not done, f"the checkpoint of step {done} is gone"
        return 0
    assert found.step == found.extra["step"] >= done, f"step {found.step} after step {done}"
    for x, value in values_at(run, found.step):
        assert (whole(x) == value).all(), f"a tensor of step {found.step} is not {value}: {x}"
    return found.step


def save_until_killed(folder: Path) -> None:
    """Save step after step from the newest checkpoint on, every third one twice."""
    rank, run = dist.get_rank(), new_run()
    step = load(folder, run)
    (folder / f"loaded{rank}").touch()
    for i in itertools.count():
        step += i % 4 != 3
        for x, value in values_at(run, step):
            x.fill_(value)
        paradyse.save_checkpoint(folder / "run", *run, step=step, extra={"step": step}, keep=2)
        if rank == 0:
            with open(folder / "journal", "a") as journal:
                journal.write(f"{step}\n")


def kill(victims: list[Any], folder: Path, after_s: float, over: Event) -> None:
    """End the processes ``victims`` so long after both ranks have loaded, unless it is over."""
    marks = [folder / f"loaded{rank}" for rank in (0, 1)]
    while not all(mark.exists() for mark in marks):
        if over.wait(0.002):
            return
    if not over.wait(after_s):
        for process in victims:
            process.kill()


def one_round(pool: RankPool, folder: Path, victims: tuple[int, ...], after_s: float) -> None:
    """Save until ``victims`` are killed.

    Raises:
        RankFailure: a rank failed that was to survive, but not by saying who is gone.
    """
    for mark in folder.glob("loaded*"):
        mark.unlink()
    pool.start()
    over, doomed = Event(), [pool.processes[rank] for rank in victims]
    killer = Thread(target=kill, args=(doomed, folder, after_s, over))
    killer.start()
    try:
        pool.run(save_until_killed, folder, timeout_s=ROUND_S)
    except RankFailure as failure:
        told = {r: e for r, e in failure.errors.items() if e.type_name == "CollectiveError"}
        said = f" did not complete: rank {victims[0]} died"
        named = all("saving checkpoint" in e.text and said in e.text for e in told.values())
        if failure.timed_out or told.keys() != {0, 1} - set(victims) or not named:
            raise
    finally:
        over.set()
        killer.join()


def left_behind(folder: Path) -> str:
    """What a kill left beside whole checkpoints, in words."""
    suffixes = {path.suffix for path in (folder / "run").glob("step-*")} - {""}
    return " and ".join(sorted(suffixes)) or "nothing"


def main(arguments: list[str] | None = None) -> None:
    """Kill as often as asked; print what was killed and left; raise where anything is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of who is killed, and when")
    args = parser.parse_args(arguments)
    draw, seen, start = random.Random(args.seed), Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="killed-saves-") as name, RankPool(2) as pool:
        folder = Path(name)
        (folder / "journal").write_text("0\n")
        step = 0
        for _ in range(args.kills):
            victims, after_s = draw.choice(VICTIMS), draw.uniform(0, LONGEST_S) * PATIENCE
            one_round(pool, folder, victims, after_s)
            seen[f"killed: {'both ranks' if len(victims) == 2 else f'rank {victims[0]}'}"] += 1
            seen[f"left behind: {left_behind(folder)}"] += 1
            found = load(folder, new_run())
            assert found >= step
            step = found
    for what, count in sorted(seen.items()):
        print(f"{count:5}  {what}")
    took = time.monotonic() - start
    print(
        f"{args.kills} kills in {took:.0f} s: each newest checkpoint was whole, up to step {step}"
    )


if __name__ == "__main__":
    from killed_saves import main as main_of_module  # which ranks can import

    harness.PRELOAD.append("killed_saves")
    main_of_module()
