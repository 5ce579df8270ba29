"""A frame: one call, by the maker in scope; its values go; its context is the step's alone."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import Tiny, tokens
from torch import Tensor

from paradyse.kernels import attention_op
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


class Padded(Tiny):
    """Keys that are no padding are told by a tensor of the caller's own, bool [B, S]."""

    def forward(self, ids: Tensor, real: Tensor, mask: Any = None) -> Any:
        at = torch.arange(ids.shape[1])
        return super().forward(ids, mask=(at <= at[:, None]) & real[:, None, None])


def test_what_is_kept_of_a_mask_goes_with_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's own tensor lives on, and may be filled by a collective, which no counter of
    writes shows."""
    given = list[Any]()
    forward = attention_op.attention_forward

    def seen(*args: Any) -> Any:
        given.append(weakref.ref(args[-1].key_padding))
        assert args[-1].key_padding.data_ptr() == real.data_ptr()
        return forward(*args)

    monkeypatch.setattr(attention_op, "attention_forward", seen)
    torch._dynamo.reset()
    compiled: Any = torch.compile(Padded(), backend="paradyse", options={"inner": "eager"})
    ids, real = tokens(2, 7), torch.ones(2, 7, dtype=torch.bool)
    with torch.no_grad():
        compiled(ids, real)
    assert given and all(ref() is None for ref in given)


def test_calls_run_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels go to PyTorch's current device, whatever tensors they are given."""
    entered, device = list[Any](), torch.device("cuda", 1)

    class Here(Frame):
        def __init__(self) -> None:
            self.program: Any = SimpleNamespace(device=device)

        def _run(self) -> Any:
            entered.append("ran")

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(entered.append(device)))
    Here().run()
    assert entered == [device, "ran"]
