"""What ranks choose plans by is the same on all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from tiny import Tiny, tokens

import paradyse
from paradyse.choice import Choice
from paradyse.runtime.frame import Frame
from paradyse.runtime.registry import captures_of
from paradyse.types import Plan


def compiled_tiny(sharded: bool, **options: Any) -> tuple[Tiny, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Tiny(layers=1)
    if sharded:
        paradyse.shard(model)
    return model, torch.compile(model, backend="paradyse", options={"inner": "eager", **options})


def call(compiled: Any, seq_len: int) -> torch.Tensor:
    return compiled(tokens(2, seq_len), tokens(2, seq_len, seed=1))


def choice_of(compiled: Any) -> Choice:
    return next(g.choice for c in captures_of(compiled) for g in c.graphs.values())


def held() -> list[tuple[int, int]]:
    """Bytes of this rank and those that plans count with, before a step of SGD and after."""
    model, compiled = compiled_tiny(True, levers=[])
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for seq_len in (7, 9):
        call(compiled, seq_len).backward()
        choice = choice_of(compiled)
        found.append((choice.optimizers.static_bytes(), choice.planner.static_bytes))
        optimizer.step()
    return found


@pytest.mark.broad
def test_plans_count_with_what_the_rank_holds_that_holds_most(pool3: RankPool) -> None:
    """An embedding of 50 rows gives the first of three ranks the fewest."""
    for of_ranks in zip(*pool3.run(held), strict=True):
        own, counted = zip(*of_ranks, strict=True)
        assert min(own) < max(own) and set(counted) == {max(own)}


def test_one_rank_counts_what_its_optimizer_holds_and_evaluation_weights_alone() -> None:
    model, compiled = compiled_tiny(False, levers=[])
    weights = sum(w.nbytes for w in model.parameters())
    with torch.no_grad():
        call(compiled, 7)
    planner = choice_of(compiled).planner
    need = [planner.least_bytes(choice_of(compiled).workload(2, 9, t)) for t in (False, True)]
    assert need[0] < 2 * weights and need[1] > 4 * weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call(compiled, 7).backward()
    optimizer.step()
    assert [c.planner.static_bytes for c in (choice_of(compiled),)] == [2 * weights]


def test_a_model_that_is_not_trained_fits_where_its_weights_do() -> None:
    model, _ = compiled_tiny(False)
    weights = sum(w.nbytes for w in model.parameters())
    compiled: Any = torch.compile(
        model, backend="paradyse", options={"inner": "eager", "memory_limit": 2 * weights}
    )
    with torch.no_grad():
        call(compiled, 7)
    with pytest.raises(ValueError, match="no plan fits"):
        call(compiled, 7)


def by_function() -> list[str]:
    """Plans by a function that returns "auto", where each rank by itself would have another."""
    names = ["ulysses_z", "megatron_ts"]
    _, compiled = compiled_tiny(False, plan=lambda w: "auto", strategies=names)
    call(compiled, 7)
    planner = choice_of(compiled).planner
    planner.options = replace(planner.options, strategies=(names[dist.get_rank()],))
    planner._free.cache_clear()
    for seq_len in (9, 12, 9):
        call(compiled, seq_len)
    plans = paradyse.stats(compiled).plan_per_length
    return [plans[9], plans[12]]


def test_where_a_function_leaves_the_plan_open_the_first_rank_chooses(pool2: RankPool) -> None:
    for plans in pool2.run(by_function):
        assert {s for key in plans for s in Plan.of_key(key).strategies} == {"ulysses_z"}


def test_where_a_function_leaves_the_plan_open_memory_may_run_out() -> None:
    """Then the plan is the smallest, as where the option leaves it open."""
    _, compiled = compiled_tiny(False, plan=lambda w: "auto", levers=["recompute"])
    keys = []
    for _ in range(2):
        call(compiled, 9)
        keys.append(paradyse.stats(compiled).plan_per_length[9])
        choice = choice_of(compiled)
        choice.ran_out(choice.workload(2, 9, training=True))
    assert ["recompute" in key for key in keys] == [False, True]


def a_file_measured_twice(path: str) -> list[list[int]]:
    """Lengths that plans go by, before and after more were measured into the file."""
    found = []
    for seq_len in (8, 12):
        torch._dynamo.reset()
        model = MODELS.setdefault(path, Tiny(layers=1))
        make = {
            "make_batch": lambda batch, n: {"ids": tokens(batch, n), "labels": tokens(batch, n)}
        }
        paradyse.profile(model, path, [seq_len], repeats=1, options={"inner": "eager"}, **make)
        options = {"inner": "eager", "cost_model": path}
        compiled = torch.compile(model, backend="paradyse", options=options)
        call(compiled, 10).backward()
        known = [g.choice for c in captures_of(compiled) for g in c.graphs.values()][-1].cost_model
        assert known is not None
        found.append(sorted({m.seq_len for m in known.profile.measurements}))
    return found


MODELS: dict[str, Tiny] = {}


def test_a_profile_that_was_measured_anew_is_read_anew(tmp_path: Path) -> None:
    assert a_file_measured_twice(str(tmp_path / "p.jsonl")) == [[8], [8, 12]]


def no_memory_to_choose_by(who: int) -> str:
    """The second rank runs out of memory, and ``who`` as it plans what all are to do instead."""
    options = {"strategies": ["megatron_cz", "metp"], "splits": []}
    _, compiled = compiled_tiny(False, **options)
    call(compiled, 9).backward()
    rank, choice, said = dist.get_rank(), choice_of(compiled), ""
    plans, run_step = choice.splits.plan_for, Frame.run_step
    left = [torch.OutOfMemoryError("no memory for a step")] if rank == 1 else []

    def no_step(self: Frame, step: Any, strategy: str) -> None:
        if step.position == 2 and rank == who:
            choice.splits.plan_for = no_plan  # type: ignore[method-assign]
        if step.position == 2 and left:
            raise left.pop()
        run_step(self, step, strategy)

    def no_plan(*args: Any) -> Any:
        choice.splits.plan_for = plans  # type: ignore[method-assign]
        raise MemoryError("no memory for a plan")

    try:
        with patch.object(Frame, "run_step", no_step):
            call(compiled, 9)
    except Exception as e:
        said = f"{type(e).__name__}: {e}"
    choice.splits.plan_for = plans  # type: ignore[method-assign]
    call(compiled, 9).backward()
    return said


def test_a_rank_without_memory_to_plan_takes_part_all_the_same(pool2: RankPool) -> None:
    """All do what the first rank plans; where that one has no plan, all hear of it."""
    assert pool2.run(no_memory_to_choose_by, 1, timeout_s=60) == ["", ""]
    first, second = pool2.run(no_memory_to_choose_by, 0, timeout_s=60)
    assert "no memory for a plan" in first and second, (first, second)


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"plan": "megatron_cz", "memory_limit": "1MiB"}, True),
        ({"plan": "megatron_cz", "host_memory": "1MiB"}, True),
        ({"plan": "megatron_cz"}, False),
        ({"plan": lambda workload: "auto", "memory_limit": "1GiB"}, False),
        ({"memory_limit": "1GiB"}, False),
    ],
)
def test_limits_beside_a_plan_that_is_named_are_warned_of(
    options: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _, compiled = compiled_tiny(False, **options)
    call(compiled, 7)
    assert any("runs whatever it needs" in r.message for r in caplog.records) == warned
