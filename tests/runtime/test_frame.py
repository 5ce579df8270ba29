"""A frame: one call, by the maker in scope; its values go; its context is the step's alone."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from tiny import Tiny, tokens

from paradyse.runtime.frame import Frame
from paradyse.runtime.frame_maker import frames_by
from paradyse.runtime.registry import captures_of


class Noted(Frame):
    """Notes its steps and what is left of values."""

    steps: list[tuple[str, int]]
    left: set[Any]

    def run_step(self, step: Any, strategy: str) -> None:
        super().run_step(step, strategy)
        self.steps.append((strategy, step.position))

    def _run(self) -> Any:
        out = super()._run()
        self.left.update(self.env)
        return out


@pytest.fixture
def compiled() -> Any:
    torch._dynamo.reset()
    return torch.compile(Tiny().double(), backend="paradyse", options={"inner": "eager"})


def test_the_maker_in_scope_makes_the_frames_of_calls_inside_it_alone(compiled: Any) -> None:
    noted = type("Here", (Noted,), {"steps": [], "left": set()})
    ids = tokens(2, 7)
    plain = compiled(ids, ids)
    with frames_by(noted):
        watched = compiled(ids, ids)
    compiled(ids, ids)
    (capture,) = captures_of(compiled)
    (graph,) = capture.graphs.values()
    program = graph.program
    assert torch.equal(plain, watched)
    assert [p for _, p in noted.steps] == list(range(len(program.steps)))
    assert [s for s, _ in noted.steps if s] == ["replicated"] * 4
    inputs = set(program.placeholders) | set(program.constants)
    assert noted.left - inputs == set(program.schedule.returned)  # all others are gone


def test_the_context_of_a_step_cannot_be_changed(compiled: Any) -> None:
    found: list[Any] = []

    class Here(Frame):
        def context(self, *args: Any) -> Any:
            found.append(super().context(*args))
            return found[-1]

    with frames_by(Here):
        compiled(tokens(2, 7))
    assert sorted({c.position for c in found}) == list(range(len(found)))
    assert all(int(c.common[3][1]) == c.block_id for c in found)
    with pytest.raises(FrozenInstanceError):
        found[0].block_id = 7
