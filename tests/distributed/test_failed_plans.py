"""A rank fails while plans are made: all hear of it, and go on in step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from test_failures import NO_MEMORY, Loop
from torch.distributed.device_mesh import init_device_mesh

from paradyse.distributed.agreement import agreement_of
from paradyse.distributed.axis import resolve_axis
from paradyse.distributed.collectives import CollectiveError, Started
from paradyse.distributed.failures import RankFailedError
from paradyse.planning import machine


def heard(loop: Loop, raised: type[Exception]) -> str:
    """What this rank hears of a step, before any message could time out; then it is in step with
    the others."""
    with pytest.raises(raised) as error:
        loop.step()
    text = str(error.value)
    del error
    assert loop.is_exact()
    return text


def while_rates_are_measured() -> str:
    loop = Loop(True, plan="auto", retry_out_of_memory=False)
    measured, left = machine._compute_rates, [NO_MEMORY] if loop.fails else []

    def fail_once(*args: Any) -> dict[str, float]:
        if left:
            raise left.pop()
        return measured(*args)

    resolve_axis().session.of(machine.Machines).clear()
    with patch.object(machine, "_compute_rates", fail_once):
        return heard(loop, torch.OutOfMemoryError)


def test_one_rank_has_no_memory_to_measure_rates(pool2: RankPool) -> None:
    first, second = pool2.run(while_rates_are_measured, timeout_s=60)
    assert first == second and "rank 1 ran out of memory in forward of training call" in first


def failing_once() -> Callable[[Any], str]:
    """A function that plans, and fails on the last of four ranks at first."""
    left = [ZeroDivisionError("division by zero")]

    def plan(workload: Any) -> str:
        if dist.get_rank() == 3 and left:
            raise left.pop()
        return "megatron_cz"

    return plan


def of_a_function() -> list[str]:
    """On one axis, and on replicas of it."""
    found = []
    for shape in ((1, 4), (2, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))
        loop = Loop(True, plan=failing_once(), mesh=mesh)
        found.append(heard(loop, ZeroDivisionError if loop.fails else RankFailedError))
    return found


@pytest.mark.broad
def test_a_function_that_plans_fails_on_one_rank_of_a_replica(pool4: RankPool) -> None:
    *others, own = pool4.run(of_a_function, timeout_s=120)
    assert own == ["division by zero"] * 2
    for texts in others:
        assert all("rank 3 failed in forward of training call" in text for text in texts), texts


def after_a_comparison_broke() -> None:
    agreement = agreement_of(resolve_axis())
    assert agreement is not None
    control = agreement._control[False].axis.session.of(Started)
    control.broken = True
    try:
        with pytest.raises(CollectiveError, match="a collective has failed before"):
            agreement.begin(False, {})
    finally:
        control.broken = False


def test_no_call_begins_after_a_comparison_broke(pool2: RankPool) -> None:
    pool2.run(after_a_comparison_broke)
