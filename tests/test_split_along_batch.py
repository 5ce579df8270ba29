"""Tokens split along the batch, or another dim than the sequence: exact, without messages between
blocks, and chosen where that is fastest."""

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

from paradyse.types import BATCH, Plan

SHAPES = ((3, 13), (5, 6), (2, 9))
"""Numbers of sequences that no number of ranks divides, and as few as ranks or fewer."""

ROUNDS = ("gemma3", "mixtral")
"""Families that compute in float32 whatever they are given."""

PLANS = ("megatron_cz", "mixed 0", "mixed 1")


def planned(compiled: Any, name: str, split: str) -> Plan | str:
    """The plan called ``name`` with tokens split along ``split``, or why there is none."""
    from paradyse.runtime.registry import captures_of

    graph = [g for c in captures_of(compiled) for g in c.graphs.values()][-1]
    described = graph.describe(split) if split else (graph.blocks, None)
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


def of_dims(
    model_of: str, splits: tuple[str, ...], sizes: tuple[tuple[int, int, int], ...], sharded: bool
) -> Any:
    """What is off by more than the tolerance, why there is no such program, and how many graphs
    there are, of a model of two dims of tokens."""
    import paradyse
    from paradyse.runtime.registry import captures_of

    torch._dynamo.reset()
    torch.manual_seed(0)
    make, batch_of = MODELS[model_of]
    reference = make(sizes[0])
    model = copy.deepcopy(reference)
    if sharded:
        paradyse.shard(model)
    current: list[Any] = ["colossal_z"]
    options = {"plan": lambda workload: current[0], "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    off, refused = dict[str, Any](), dict[str, str]()
    for size in sizes:
        given = batch_of(size)
        reference.zero_grad()
        want = loss_of(reference(**given))
        want.backward()
        current[0] = "colossal_z"
        compiled(**given)
        for split in splits:
            for name in ("megatron_cz", "dsp", "mixed 0", "mixed 1"):
                plan = planned(compiled, name, split)
                if isinstance(plan, str):
                    refused[split] = plan
                    continue
                current[0] = plan
                model.zero_grad()
                got = loss_of(compiled(**given))
                got.backward()
                error = max(space_time.errors(model, got, reference, want))
                if not error[0] <= 1e-9:
                    off[f"{size} {split} {name}"] = error
    return off, refused, sum(len(c.graphs) for c in captures_of(compiled))


def loss_of(out: Any) -> torch.Tensor:
    """Of what a model gives: its loss, or one made of its sample."""
    if isinstance(out, torch.Tensor):
        return out
    return out.sample.square().mean() if hasattr(out, "sample") else out.loss


def cells(size: tuple[int, int, int]) -> dict[str, Any]:
    return dict(zip(("x", "labels"), space_time.cells(*size), strict=True))


MODELS: dict[str, Any] = {
    "space and time": (lambda size: space_time.SpaceTime().double(), cells),
    "timesformer": (
        lambda size: space_time.make_timesformer(size[1]),
        lambda size: dict(
            zip(("pixel_values", "labels"), space_time.videos(*size[:2]), strict=True)
        ),
    ),
    "latte": (
        lambda size: space_time.make_latte(size[1]),
        lambda size: space_time.noised(*size[:2]),
    ),
}
"""Name -> the model for (batch, time, space), and its arguments for others of one time."""


@pytest.mark.parametrize(
    ("name", "sharded", "nproc", "splits"),
    [
        ("space and time", True, 2, (BATCH, "dim1")),
        pytest.param("space and time", False, 3, (BATCH, "dim1"), marks=pytest.mark.slow),
        pytest.param("space and time", True, 4, (BATCH, "dim1"), marks=pytest.mark.slow),
        pytest.param("timesformer", True, 3, (BATCH, "dim1"), marks=pytest.mark.slow),
        ("latte", False, 2, ("", BATCH)),
        pytest.param("latte", True, 3, ("", BATCH), marks=pytest.mark.slow),
        pytest.param("latte", True, 4, ("", BATCH), marks=pytest.mark.slow),
    ],
)
def test_models_of_several_dims(
    name: str, sharded: bool, nproc: int, splits: tuple[str, ...], ranks: Any
) -> None:
    if name == "latte":
        pytest.importorskip("diffusers", reason="Latte is a model of the package diffusers")
    sizes = ((2, 5, 7), (3, 5, 4)) if name == "space and time" else ((2, 5, 9), (3, 5, 9))
    case = (name, splits, sizes, sharded)
    for off, refused, graphs in ranks(nproc).run(of_dims, *case, timeout_s=400):
        assert not off and graphs == 2  # the second batch shows which sizes vary
        if name == "timesformer":  # its class tokens are the first rows of frames of all videos
            assert refused.keys() == set(splits)
            assert all("aten.slice.Tensor" in why for why in refused.values())
        else:
            assert not refused
