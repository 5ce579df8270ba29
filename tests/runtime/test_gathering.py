"""Which sharded weights the steps of a call gather, and when."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import RankPool
from models import make_batch, make_model

from paradyse.passes.split_steps import BlockStep, Step
from paradyse.runtime.frame import Frame
from paradyse.runtime.frame_maker import frames_by
from paradyse.runtime.gathering import Gathering
from paradyse.types import Plan
from paradyse.weights.unshard import Shelf

TWO_LAYERS = ("megatron_ts", "megatron_cz", "metp", "megatron_ts")
"""Of their blocks: one alone gathers matrices."""


def gathered(sharded: bool) -> tuple[list[bool], dict[int, int], list[int]]:
    """Of a call of two layers: per block whether it gathers weights of its own, and how many
    weights it had gathered; the blocks while which, or before the first of which, -1, weights of
    another step began to come."""
    import paradyse

    torch._dynamo.reset()
    apart: list[bool] = []
    had: dict[int, int] = {}
    begun: list[int] = []

    class Watched(Frame):
        fuses = False

        def run_step(self, step: Step, strategy: str) -> None:
            if not apart:
                blocks = [s for s in self.program.steps if isinstance(s, BlockStep)]
                apart.extend(s.position in self.gathering.apart for s in blocks)
            super().run_step(step, strategy)

    unshard, fetch, at = Gathering.unshard, Shelf.fetch, [-1]

    def counted(gathering: Gathering, step: Step) -> Any:
        wholes, back = unshard(gathering, step)
        if isinstance(step, BlockStep):
            at[0] = step.index
            had[step.index] = len(wholes)
        return wholes, back

    def noted(shelf: Shelf, shards: Any, block_id: int, held: bool = False) -> None:
        before = shelf.coming
        fetch(shelf, shards, block_id, held)
        if shelf.coming is not before:
            begun.append(at[0])

    model = make_model("llama", num_hidden_layers=2)
    if sharded:
        paradyse.shard(model)
    options = {"plan": lambda workload: Plan(TWO_LAYERS), "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    batch = make_batch("plain", 2, 11)
    with (
        frames_by(Watched),
        patch.object(Gathering, "unshard", counted),
        patch.object(Shelf, "fetch", noted),
        torch.no_grad(),
    ):
        compiled(**batch)
    return apart, had, begun


@pytest.mark.broad
def test_only_what_does_not_lie_as_it_is_used_is_gathered(pool2: RankPool) -> None:
    """A norm's weights come when the call begins; matrices one block ahead of their use."""
    for apart, had, begun in pool2.run(gathered, True, timeout_s=120):
        assert apart == [False, True, False, False]
        assert had == {0: 1, 1: 4, 2: 1, 3: 1}
        assert begun.count(0) == 1  # the second block's, while the first one runs
        assert not {1, 2} & {*begun}  # those behind gather no more


def test_whole_weights_are_not_gathered(pool2: RankPool) -> None:
    for apart, had, begun in pool2.run(gathered, False, timeout_s=120):
        assert apart == [False] * 4 and had == dict.fromkeys(range(4), 0) and begun == []
