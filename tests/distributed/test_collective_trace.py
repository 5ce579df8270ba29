"""Every rank issues the same collectives in the same order: name, sizes, group, block."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from tiny import Tiny, tokens

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis
from paradyse.distributed.collectives import register_block, traffic
from paradyse.types import ATTENTION_STRATEGIES, Plan

MIXED = ("megatron_ts", "metp", "ulysses_z", "megatron_cz")
"""Plan of two layers: each block another strategy."""

Trace = list[tuple[Any, ...]]
"""Per collective, in the order of issue: its name, and arguments that all ranks must agree on."""


def seen_by_all(value: Any) -> Any:
    """``value`` as ranks can compare it: of tensors shape and dtype, of an axis its ranks and
    the lane."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, Axis):
        return (*dist.get_process_group_ranks(value.group), value.lane)
    if isinstance(value, list | tuple):
        return tuple(map(seen_by_all, value))
    return value


@contextmanager
def recorded() -> Iterator[Trace]:
    """Into the list: every collective that is issued inside."""
    trace: Trace = []

    def record(name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(do)

        def noted(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            axis = given["axis"]
            if "block_id" in given:
                given["block_id"] = traffic(axis, given["block_id"]).name
            if "shares" in given:
                given["shares"] = [(traffic(axis, i).name, n) for i, n in given["shares"].items()]
            trace.append((name, *((k, seen_by_all(v)) for k, v in given.items())))
            return do(*args, **kwargs)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name, do in inspect.getmembers(collectives, inspect.isfunction):
            sends = do not in (traffic, register_block) and not name.startswith("_")
            sends &= do.__module__ == collectives.__name__
            if sends and "axis" in inspect.signature(do).parameters:
                patch.setattr(collectives, name, record(name, do))
        yield trace


def trace_plans(sharded: bool) -> dict[str, tuple[Trace, Trace]]:
    """Plan -> what forward and what backward issue, in a step after the ranks' first checks."""
    import paradyse

    torch.manual_seed(0)
    model = Tiny()
    if sharded:
        paradyse.shard(model)
    current: list[Any] = ["colossal_z"]
    options = {"plan": lambda workload: current[0], "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    ids = tokens(2, 11)
    plans: dict[str, Any] = {s: s for s in ATTENTION_STRATEGIES} | {"mixed": Plan(MIXED)}
    traces = {}
    for name, current[0] in plans.items():
        compiled(ids, ids).backward()
        with recorded() as forward:
            loss = compiled(ids, ids)
        with recorded() as backward:
            loss.backward()
        traces[name] = forward, backward
    return traces


@pytest.mark.broad(but="2-whole")
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("nproc", [2, 3])
def test_all_ranks_issue_the_same(
    nproc: int, sharded: bool, ranks: Callable[[int], RankPool]
) -> None:
    first, *others = ranks(nproc).run(trace_plans, sharded, timeout_s=100)
    assert first.keys() == {*ATTENTION_STRATEGIES, "mixed"}
    for plan, (forward, backward) in first.items():
        assert forward and backward, plan
        for rank, other in enumerate(others, 1):
            for mine, theirs in zip((forward, backward), other[plan], strict=True):
                for i, (a, b) in enumerate(zip(mine, theirs)):
                    assert a == b, f"{plan}, collective {i} of rank 0 and of rank {rank}"
                assert len(mine) == len(theirs), plan
    # What is recorded tells the strategies apart.
    assert len({str(trace) for trace in first.values()}) == len(first)
