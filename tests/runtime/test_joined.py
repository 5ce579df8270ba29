"""Weights on their way to steps: which are summed over ranks, and where."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import RankPool
from tiny import Tiny, tokens

import paradyse
from paradyse.runtime.frame import Frame
from paradyse.runtime.frame_maker import frames_by
from paradyse.runtime.joined import JoinedGradients
from paradyse.weights import gradients


def summed_before(sharded: bool, frozen: bool) -> tuple[list[tuple[int, int, int]], set[str], int]:
    """Of each weight that is summed: the step before which it is, its first reader, and the number
    of weights that the same message brings. Then the names of weights that are not, and how many
    there are in all."""
    model = Tiny()
    if sharded:
        paradyse.shard(model)
    if frozen:
        next(model.parameters()).requires_grad_(False)
    options = {"inner": "eager", "plan": "megatron_cz"}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    ids, found = tokens(2, 11), list[tuple[int, int, int]]()
    original, frames = JoinedGradients.before, list[Frame]()

    def before(self: JoinedGradients, position: int) -> None:
        known = set(self.summed)
        original(self, position)
        now = [n for n in self.summed if n not in known]
        readers = self.program.schedule.first_readers
        found.extend((position, readers[n].position, len(now)) for n in now)

    class Kept(Frame):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            frames.append(self)

    # A byte is a bucket of its own: each weight is joined with its step's alone.
    with (
        patch.object(JoinedGradients, "before", before),
        patch.object(gradients, "TOGETHER_BYTES", 1),
        frames_by(Kept),
    ):
        compiled(ids, ids).backward()
    (frame,) = frames
    left = {n.name for n in frame.program.schedule.first_readers} - {
        n.name for n in frame._joined.summed
    }
    return found, left, len(list(model.parameters()))


@pytest.mark.parametrize("frozen", [False, True])
def test_every_whole_weight_is_summed_before_it_is_read(frozen: bool, pool2: RankPool) -> None:
    for found, left, number in pool2.run(summed_before, False, frozen):
        assert len(found) == number - frozen and len(left) == frozen
        assert all(position <= reader for position, reader, _ in found)
        assert len({position for position, _, _ in found}) > 2


def test_shards_are_not_summed_here(pool2: RankPool) -> None:
    for found, left, number in pool2.run(summed_before, True, False):
        assert not found and len(left) == number
