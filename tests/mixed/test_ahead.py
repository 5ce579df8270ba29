"""Plans one batch ahead: those of the solver, in order; errors of the process reach the caller."""

from __future__ import annotations

import pytest
from step_search import ways_by_formula

from paradyse.mixed.ahead import Ahead
from paradyse.mixed.step_plan import plan_step

WAYS = ways_by_formula([1, 2, 3, 4], 2048, 0.01)
BATCHES = [[100, 200, 3000], [7], [500] * 9]


def test_plans_are_those_of_the_solver_in_order() -> None:
    with Ahead(WAYS, 4) as ahead:
        for batch in BATCHES:
            ahead.ask(batch)
        assert [ahead.take() for _ in BATCHES] == [plan_step(b, WAYS, 4) for b in BATCHES]


def test_batches_larger_than_a_pipe() -> None:
    """The second is asked for while the first one's plan waits to be taken."""
    with Ahead(WAYS, 4, limit_s=0.1) as ahead:
        for _ in range(2):
            ahead.ask([7] * 40_000)
        assert all(ahead.take().time_s > 0 for _ in range(2))


def test_a_batch_that_cannot_be_planned_leaves_the_others() -> None:
    with Ahead(WAYS, 4) as ahead:
        for batch in ([9000], BATCHES[0]):
            ahead.ask(batch)
        with pytest.raises(ValueError, match="9000 tokens fits no group"):
            ahead.take()
        assert ahead.take() == plan_step(BATCHES[0], WAYS, 4)
        with pytest.raises(ValueError, match="ask for one"):
            ahead.take()


def test_a_process_that_is_gone_is_told_of() -> None:
    with Ahead(WAYS, 4) as ahead:
        ahead._process.kill()
        ahead._process.wait()
        with pytest.raises(RuntimeError, match="exit code -9"):
            ahead.ask(BATCHES[0])
            ahead.take()
