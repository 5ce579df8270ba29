"""Under a memory limit ``auto`` trains what any strategy can, by measured bytes, and says when
nothing fits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool
from tiny import Tiny, tokens

from paradyse.config import AUTO
from paradyse.distributed import collectives
from paradyse.types import ATTENTION_STRATEGIES, Workload

MEASURED = (128, 320, 640, 800)
"""Lengths of the profile. PyTorch's attention on CPUs takes tiles of twice as many rows from 192
queries on, which a ring of two ranks has at 768 tokens."""
LEVERS = ("recompute", "selective")
"""Measured with every strategy: what was not measured is estimated in proportion."""
LIMITED_AT = 300
"""The limit is what one strategy is predicted to need at this length: others differ."""
MOST = 4096

CLOSE = 0.05
"""How near measured memory is to the predicted, as a share."""


def tiny_batch(batch: int, seq_len: int) -> dict[str, Any]:
    ids = tokens(batch, seq_len)
    return {"ids": ids, "labels": ids}


def train_to_a_limit(path: str, sharded: bool) -> dict[str, Any]:
    """The longest length of every strategy and of ``auto``, and bytes measured there."""
    import paradyse
    from paradyse.planning.planner import Planner
    from paradyse.profiling.steps import Steps
    from paradyse.runtime.registry import captures_of

    torch.manual_seed(0)
    model = Tiny(layers=2)
    if sharded:
        paradyse.shard(model)
    options: dict[str, Any] = {"inner": "eager"}
    given = {"repeats": 1, "options": options, "make_batch": tiny_batch, "levers": LEVERS}
    paradyse.profile(model, path, MEASURED, **given)
    options["levers"] = list(LEVERS)

    def limited(memory_limit: int | None) -> tuple[Steps, Planner]:
        given = {**options, "cost_model": path, "memory_limit": memory_limit}
        steps = Steps(model, given, 1, True, tiny_batch)
        if memory_limit is None:
            steps.find_blocks(MEASURED[0])
        else:
            steps.run(16, AUTO)
            steps.run(17, AUTO)
        mine = [c for c in captures_of(model) if c.options.plan is steps._present]
        return steps, next(g.choice.planner for c in mine for g in c.graphs.values())

    def work(seq_len: int) -> Workload:
        return Workload(1, seq_len, torch.float32, True, 2, mask)

    steps, planner = limited(None)
    mask = "causal"
    # ``dsp`` has nothing to switch to in a batch of one.
    strategies = [s for s in ATTENTION_STRATEGIES if s in planner.blocks[0].feasible()]
    every = {s: planner.static(s, work(1)) for s in strategies}
    with steps.prepared():
        limit = planner.predict(every["megatron_cz"], work(LIMITED_AT))[1]
        steps, planner = limited(limit)

        def measured(seq_len: int, plan: str) -> int:
            steps.run(seq_len, plan)
            held = planner.static_bytes + steps.memory(seq_len, plan).peak_bytes
            return max(collectives.gather_objects(held, steps.axis, collectives.PROFILE))

        longest = {s: planner.longest(work(1), MOST, plan) for s, plan in every.items()}
        longest[AUTO] = planner.longest(work(1), MOST)
        found = {
            "limit": limit,
            "longest": longest,
            "held": {s: measured(n, s) for s, n in longest.items()},
            "auto": {s: measured(n, AUTO) for s, n in longest.items()},
            "plan": planner.plan(work(longest[AUTO])).strategies,
        }
        try:
            steps.run(longest[AUTO] + longest[AUTO] // 50, AUTO)
        except ValueError as e:
            found["refusal"] = str(e)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_auto_trains_what_any_strategy_can(sharded: bool, pool2: RankPool, tmp_path: Path) -> None:
    found, other = pool2.run(train_to_a_limit, str(tmp_path / "p"), sharded, timeout_s=300)
    assert found == other
    limit, longest = found["limit"], found["longest"]
    statics = {s: n for s, n in longest.items() if s != AUTO}
    assert len(statics) >= 5
    assert len(set(statics.values())) > 2 and longest[AUTO] >= max(statics.values())
    for s, n in statics.items():
        # What is predicted to fit does, by measurement, and nearly fills the limit.
        assert (1 - CLOSE) * limit <= found["held"][s] <= limit, (s, n)
        assert found["auto"][s] <= limit, f"auto, where {s} just fits: {n} tokens"
    assert found["auto"][AUTO] <= limit
    assert f"have {longest[AUTO]} tokens, but option 'memory_limit' is" in found["refusal"]
