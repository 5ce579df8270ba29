"""Tokens split along the batch: exact for all families, and no message but weights' and losses'."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import space_time
import torch
from harness import RankPool
from models import FAMILIES, TOLERANCE, make_batch, make_model, run_step, worst
from plans import choose
from test_exactness import layers_of

from paradyse.types import BATCH, Plan, other_dim

SHAPES = ((3, 13), (5, 6), (2, 9))
"""Numbers of sequences that no number of ranks divides, and as few as ranks or fewer."""

ROUNDS = ("gemma3", "mixtral")
"""Families that compute in float32 whatever they are given."""

PLANS = ("megatron_cz", "mixed 0", "mixed 1")


def planned(compiled: Any, name: str, split: str) -> Plan | str:
    """The plan called ``name`` with tokens split along ``split``, or why there is none."""
    from paradyse.runtime.registry import captures_of

    graph = [g for c in captures_of(compiled) for g in c.graphs.values()][-1]
    described = graph.describe(split)
    if isinstance(described, str):
        return described
    plan = choose(name, described[0])
    return Plan(plan.strategies, split=split)


def along_batch(family: str, hows: tuple[str, ...], sharded: bool, inner: str) -> Any:
    """What is off by more than the tolerance; and why a graph has no such plan."""
    import paradyse

    dtype = torch.float32 if family in ROUNDS else torch.float64
    off, refused = dict[str, Any](), dict[str, str]()
    sizes = {"num_hidden_layers": layers_of(family)}
    reference = model = make_model(family, dtype, **sizes)
    if sharded:
        model = paradyse.shard(make_model(family, dtype, **sizes))
    for how in hows:
        torch._dynamo.reset()
        current: list[Any] = ["colossal_z"]
        options = {"plan": lambda workload: current[0], "inner": inner}  # noqa: B023
        compiled = torch.compile(model, backend="paradyse", options=options)
        for shape in SHAPES:
            inputs = make_batch(how, *shape)
            for x in inputs.values():
                torch._dynamo.maybe_mark_dynamic(x, 0)
                torch._dynamo.maybe_mark_dynamic(x, 1)
            want = run_step(reference, reference, inputs, logits=True)
            current[0] = "colossal_z"
            run_step(compiled, model, inputs)
            for name in PLANS:
                current[0] = planned(compiled, name, BATCH)
                if isinstance(current[0], str):
                    refused[how] = current[0]
                    break
                error = worst(run_step(compiled, model, inputs, logits=True), want)
                if not error[0] <= TOLERANCE[dtype]:
                    off[f"{how} {shape} {name}"] = error
    return off, refused


QUICK = {("llama_odd", True): ("left",), ("gpt2", False): ("plain",), ("bert", False): ("right",)}
"""Family, and whether weights are sharded -> kinds of batches; all else is slow."""


@pytest.mark.parametrize(("family", "sharded"), QUICK)
def test_exact(family: str, sharded: bool, pool2: RankPool) -> None:
    case = (family, QUICK[family, sharded], sharded, "eager")
    for off, refused in pool2.run(along_batch, *case, timeout_s=300):
        assert not off and not refused


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, 3, 4])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_families(family: str, sharded: bool, nproc: int, ranks: Any) -> None:
    hows = ("plain", "left", "right") if nproc == 2 else ("left",)
    for off, refused in ranks(nproc).run(
        along_batch, family, hows, sharded, "eager", timeout_s=300
    ):
        assert not off and not refused
