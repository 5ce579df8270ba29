"""What blocks take while a model trains is fed back: a slow collective is planned around."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from harness import RankPool
from models import check, make_batch, make_model, run_step

SLOW_S = 0.02
"""What a slowed message takes more: tens of times what it takes here otherwise."""


def rates(axis: Any, dtype: torch.dtype) -> Any:
    """A machine on which rings cost more than all-to-alls."""
    from paradyse.cost import Link, Machine

    links = {"ring_exchange": Link(2e-3, 1e9), "all_to_all": Link(1e-5, 1e9)}
    return Machine(1e10, 1e10, 1e-5, 1e9, links=links)


def train(steps: int, slow_from: int | None, **options: Any) -> tuple[list[str], list[int], float]:
    """The first attention's strategy at each step, calls of ``forget``, and a factor of its kind.

    From step ``slow_from`` on every all-to-all takes ``SLOW_S`` more.
    """
    from paradyse import backend, comm
    from paradyse.backend import captures_of

    start = comm._all_to_all_async
    now = 0

    def slowed(x: Any, axis: Any, block_id: int, what: str, num_bytes: int) -> Any:
        if what == "all_to_all" and slow_from is not None and now >= slow_from:
            time.sleep(SLOW_S)
        return start(x, axis, block_id, what, num_bytes)

    model, reference = make_model("llama"), make_model("llama")
    given = {"strategies": ["ulysses_z", "megatron_cz"], "inner": "eager", **options}
    run: Any = torch.compile(model, backend="paradyse", options=given, dynamic=True)
    batch = make_batch("plain", 1, 24)
    want = run_step(reference, reference, batch)
    taken: list[str] = []
    planned: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "_all_to_all_async", slowed)
        patch.setattr(backend, "measure_machine", rates)
        for now in range(steps):
            got = run_step(run, model, batch)
            if now in (0, steps - 1) or (taken and now % 16 == 1):
                check(got, want, what=f"step {now}")
            (graph,) = [g for c in captures_of(run) for g in c.graphs.values()]
            if now == 0 and graph.feedback is not None:
                forget = graph.feedback.forget

                def note(forget: Any = forget) -> None:
                    planned.append(len(taken))
                    forget()

                graph.feedback.forget = note
            taken.append(graph.guard._last.strategies[0])
        sources = {
            row.strategy: row.source
            for row in backend.explain(run, 1, 24).blocks[0].rows
            if row.time_s is not None
        }
    assert sources["megatron_cz"] == ("online" if "megatron_cz" in taken else "prior")
    factors = graph.feedback.factors if graph.feedback is not None else {}
    kind = graph.planner.kinds[0]
    return taken, planned, factors.get((kind, "ulysses_z"), 0.0)


def test_a_slow_collective_is_planned_around(pool2: RankPool) -> None:
    """Within 50 steps of the collective's slowing, on both ranks at the same step."""
    first, second = pool2.run(train, 100, 40, timeout_s=200)
    assert first[0] == second[0] and first[1] == second[1]
    strategies = first[0]
    assert set(strategies[:40]) == {"ulysses_z"}
    assert set(strategies[90:]) == {"megatron_cz"}
    assert first[2] == second[2] > 1  # agreed, and known to be slow


def test_a_plan_that_is_given_is_not_touched(pool2: RankPool) -> None:
    for strategies, planned, factor in pool2.run(train_given, timeout_s=100):
        assert set(strategies) == {"ulysses_z"} and not planned and factor == 0


def train_given() -> tuple[list[str], list[int], float]:
    return train(20, 0, plan="ulysses_z")
