"""Vectors of blocks that gather nothing else come, and their gradients go, in one message each."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import RankPool
from models import TOLERANCE, make_batch, make_model, run_step, whole, worst

from paradyse.types import Plan
from paradyse.weights import shard_comm, unshard, vectors
from paradyse.weights.unshard import Gathered


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts the tensors of every message of weights, and of gradients, that begins."""
    found: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name, module in (("start_gather", shard_comm), ("start_scatter", unshard)):
            start = getattr(module, name)

            def begin(*args: Any, start: Any = start, name: str = name) -> Any:
                found[name] += bool(args[0])
                found[f"tensors of {name}"] += len(args[0])
                return start(*args)

            patch.setattr(module, name, begin)
            if module is shard_comm:
                patch.setattr(unshard, name, begin)
        yield found


def train(layers: int, plan: str, checkpointing: bool = False) -> tuple[Counter[str], Any, Any]:
    """Messages of a step, its largest error, and the bytes that each block sent."""
    import paradyse

    torch._dynamo.reset()
    reference = make_model("llama", torch.float64, num_hidden_layers=layers)
    model = paradyse.shard(make_model("llama", torch.float64, num_hidden_layers=layers))
    if checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers 5.24 has another name
            model.gradient_checkpointing_enable()
    options = {"plan": plan, "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    batch = make_batch("plain", 2, 13)
    want = run_step(reference, reference, batch)
    for _ in range(6):  # past the steps that compare batches
        got = run_step(compiled, model, batch)
    before = Counter(paradyse.stats(compiled).bytes_per_block)
    with counting() as found:
        compiled(**batch).loss.backward()
    sent = Counter(paradyse.stats(compiled).bytes_per_block) - before
    return found, worst(got, want), sent


@pytest.mark.broad
@pytest.mark.parametrize("plan", ["megatron_ts", "metp"])
def test_layers_add_no_messages_of_vectors(plan: str, pool2: RankPool) -> None:
    one, three = (pool2.run(train, layers, plan, timeout_s=100) for layers in (1, 3))
    for (few, error, sent), (more, other, by_block) in zip(one, three, strict=True):
        assert max(error[0], other[0]) < TOLERANCE[torch.float64]
        for name in ("start_gather", "start_scatter"):
            assert few[name] == more[name] > 0
            assert more[f"tensors of {name}"] == few[f"tensors of {name}"] + 2 * 2  # norms
        assert {n for n in by_block if ".1." not in n and ".2." not in n} == {*sent}
        layers = [[b for n, b in by_block.items() if f".{i}." in n] for i in range(3)]
        assert layers[0] == layers[1] == layers[2]  # each block answers for its own


@pytest.mark.broad
def test_blocks_that_run_again_have_them_still(pool2: RankPool) -> None:
    for found, error, _ in pool2.run(train, 2, "megatron_ts", True, timeout_s=100):
        assert error[0] < TOLERANCE[torch.float64]
        assert found["start_scatter"] == 3  # of the embedding, the head, and all vectors


def backward_in_order() -> list[str]:
    """What backward does of weights: gathers, and blocks whose turn it is."""
    import paradyse

    torch._dynamo.reset()
    model = paradyse.shard(make_model("llama", torch.float64, num_hidden_layers=2))
    plan = Plan(("megatron_cz", "megatron_ts", "megatron_ts", "megatron_ts"))
    options = {"plan": lambda workload: plan, "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    batch = make_batch("plain", 2, 12)
    compiled(**batch).loss.backward()
    loss, found = compiled(**batch).loss, list[str]()
    fill, start = Gathered.fill, shard_comm.start_gather

    def filled(self: Gathered) -> None:
        found.append("passed" if isinstance(self, vectors._Passed) else "gathered")
        fill(self)

    def started(shards: Any, block_id: int, held: bool = False) -> Any:
        found.extend(["fetch"] * bool(shards))
        return start(shards, block_id, held)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gathered, "fill", filled)
        for module in (shard_comm, unshard):
            patch.setattr(module, "start_gather", started)
        loss.backward()
    return found


def test_backward_fetches_no_earlier_than_one_step_ahead(pool2: RankPool) -> None:
    """The first block's weights are not in memory while backward goes through all the others."""
    head, first, embedding = ["gathered", "fetch"], ["fetch", "gathered"], ["gathered"]
    for found in pool2.run(backward_in_order, timeout_s=100):
        assert found == [*head, "passed", "passed", "passed", *first, *embedding]


def twice_backward() -> tuple[float, str]:
    """Gradients of two backward calls through one graph, against twice those of one."""
    import paradyse

    model = paradyse.shard(make_model("llama", torch.float64))
    options = {"plan": "megatron_ts", "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    batch = make_batch("plain", 2, 12)
    want = run_step(compiled, model, batch)
    model.zero_grad(set_to_none=True)
    loss = compiled(**batch).loss
    loss.backward(retain_graph=True)
    loss.backward()
    grads = {n: whole(p.grad) / 2 for n, p in model.named_parameters() if p.grad is not None}
    return worst(replace(want, grads=grads), want)


def test_a_graph_may_be_gone_through_again(pool2: RankPool) -> None:
    for error, what in pool2.run(twice_backward, timeout_s=100):
        assert error < TOLERANCE[torch.float64], what
