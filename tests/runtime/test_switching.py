"""Switching at run time: training goes on as on one device, and a switch costs nothing."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankFailure, RankPool, run_ranks
from models import TOLERANCE, make_batch, make_model, run_step, whole
from plans import blocks_of, head_of, small_pieces

from paradyse.types import ATTENTION_STRATEGIES, Plan

FEW, MANY = 120, 200
"""Steps of a training run."""


@small_pieces()
def train(
    steps: int, compiled: bool, sharded: bool = False
) -> tuple[list[float], dict[str, torch.Tensor], list[str], int]:
    """Losses, final weights, plan keys, and switches, by SGD on random lengths."""
    import paradyse
    from paradyse.runtime.registry import captures_of

    model = make_model("llama_odd")
    if sharded:
        paradyse.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lengths, plans = random.Random(1), random.Random(2)
    current: list[Any] = ["colossal_z"]
    call: Any = model
    if compiled:
        options = {"plan": lambda workload: current[0], "inner": "eager"}
        call = torch.compile(model, backend="paradyse", options=options)
    losses, keys = [], []
    for step in range(steps):
        batch = make_batch("plain", 2, lengths.randint(3, 40), seed=step)
        if compiled and step:
            points = tuple(plans.choice(b.points()) for b in blocks_of(call))
            current[0] = Plan(points, plans.choice(head_of(call).points()))
        optimizer.zero_grad()
        loss = call(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if compiled:
            graphs = [g for c in captures_of(call) for g in c.graphs.values()]
            keys.append(",".join(k for g in graphs for k in g.choice.guard.plan_of.values()))
    weights = {n: whole(p) for n, p in model.named_parameters()}
    return losses, weights, keys, paradyse.stats(call).plan_switches if compiled else 0


@pytest.mark.broad
@pytest.mark.parametrize(
    ("steps", "sharded"),
    [
        (FEW, True),
        *(pytest.param(MANY, s, marks=pytest.mark.slow) for s in (False, True)),
    ],
)
def test_training_follows_one_process(
    steps: int, sharded: bool, pool1: RankPool, pool2: RankPool
) -> None:
    ((losses, weights, _, _),) = pool1.run(train, steps, False, timeout_s=200)
    results = pool2.run(train, steps, True, sharded, timeout_s=500)
    assert sum(losses[-20:]) < sum(losses[:20]) - 20 * 0.2  # it learns: the curve is not flat
    tolerance = TOLERANCE[torch.float32]
    for got, final, keys, switches in results:
        assert len(got) == steps
        torch.testing.assert_close(torch.tensor(got), torch.tensor(losses), rtol=tolerance, atol=0)
        for name, w in weights.items():
            assert (final[name] - w).norm() <= tolerance * w.norm(), name
        assert keys == results[0][2]
        assert switches > steps / 2
    assert all(torch.equal(results[0][1][n], results[1][1][n]) for n in weights)


MIXED = ("megatron_ts", "megatron_cz", "ulysses_z", "metp")


def count_bytes(sharded: bool) -> tuple[dict[str, dict[str, int]], dict[str, int], list[str]]:
    """Bytes of each block in a step: under each static plan, and under MIXED; names of blocks."""
    import paradyse

    # with as many KV heads no two methods send the same
    model = make_model("llama", num_key_value_heads=4)
    if sharded:
        paradyse.shard(model)
    current: list[Any] = ["colossal_z"]
    options = {"plan": lambda workload: current[0], "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    batch = make_batch("plain", 2, 13)

    def sent() -> tuple[Counter[str], Counter[str]]:
        stats = paradyse.stats(compiled)
        return Counter(stats.bytes_per_block), Counter(stats.calls_per_collective)

    def step(plan: Any) -> tuple[dict[str, int], dict[str, int]]:
        current[0] = plan
        bytes_before, calls_before = sent()
        run_step(compiled, model, batch)
        bytes_after, calls_after = sent()
        return dict(bytes_after - bytes_before), dict(calls_after - calls_before)

    for _ in range(6):  # past the steps that compare batches
        step("colossal_z")
    blocks = blocks_of(compiled)
    static = {s: step(s) for s in blocks[0].feasible()}
    step("ulysses_z")
    switched, calls = step(Plan(MIXED))
    assert (switched, calls) == step(Plan(MIXED))  # the same with no switch before it
    return {s: b for s, (b, _) in static.items()}, switched, [b.name for b in blocks]


@pytest.mark.broad(but="False")
@pytest.mark.parametrize("sharded", [False, True])
def test_switch_sends_nothing(sharded: bool, pool2: RankPool) -> None:
    """Bytes of a step are the sum over blocks of what each sends under its strategy."""
    for static, mixed, names in pool2.run(count_bytes, sharded, timeout_s=200):
        assert set(static) == {*ATTENTION_STRATEGIES}
        between = {n for n in mixed if n not in names}
        expected = {name: static[s][name] for s, name in zip(MIXED, names, strict=True)}
        expected |= {n: static["colossal_z"][n] for n in between}
        assert mixed == expected
        totals = {s: sum(b.values()) for s, b in static.items()}
        assert len(set(totals.values())) > 2  # they are told apart by what they send


def train_on_different(what: str) -> tuple[str, int]:
    model = make_model("llama")
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    batch = make_batch("plain", 2, 12)
    if dist.get_rank() == 1:
        if what == "tokens":
            batch["input_ids"][1, 3] += 1
        elif what == "labels":
            batch["labels"][0, -1] += 1
        elif what == "length":
            batch = make_batch("plain", 2, 15)
        elif what == "batch":
            batch = make_batch("plain", 3, 12)
    for step in range(3):
        try:
            run_step(compiled, model, batch)
        except ValueError as e:
            return str(e), step
    return "", -1


@pytest.mark.broad(but="labels")
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("tokens", "disagree on the batch"),
        ("labels", "disagree on the batch"),
        ("length", "disagree on the sequence length"),
        ("batch", "disagree on the batch size"),
    ],
)
def test_different_batches_are_named(what: str, text: str, pool2: RankPool) -> None:
    for message, step in pool2.run(train_on_different, what, timeout_s=100):
        assert text in message and "same global batch" in message
        assert step == 0


def lose_a_rank(how: str) -> str:
    """What the other rank raises when rank 1 stops in its third step."""
    os.environ["PARADYSE_COLLECTIVE_TIMEOUT_S"] = "4"
    model = make_model("llama")
    options = {"inner": "eager", "plan": "megatron_cz"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    batch = make_batch("plain", 2, 12)
    for _ in range(2):
        run_step(compiled, model, batch)
    if dist.get_rank() == 1:
        if how == "dies":
            os._exit(7)
        time.sleep(12)
        return ""
    start = time.monotonic()
    try:
        run_step(compiled, model, batch)
    except Exception as e:
        text = f"{type(e).__name__}: {e}"
        took = time.monotonic() - start
        if how == "dies":  # the harness keeps no result of ranks beside one that died
            raise AssertionError(f"{text} [after {took:.1f} s]") from e
        return f"{text} [after {took:.1f} s]"
    return "no error"


@pytest.mark.broad
@pytest.mark.parametrize("how", ["dies", pytest.param("stalls", marks=pytest.mark.slow)])
def test_lost_rank(how: str) -> None:
    """The others say which collective of which block did not complete, and soon."""
    if how == "dies":
        with pytest.raises(RankFailure) as failure:
            run_ranks(lose_a_rank, 2, how, timeout_s=100)
        text = failure.value.errors[0].text
    else:
        text = run_ranks(lose_a_rank, 2, how, timeout_s=100)[0]
    assert "CollectiveError" in text
    assert "block 'layers.0.attention'" in text or "agreement" in text
    assert any(c in text for c in ("all_gather", "ring_exchange", "all_to_all"))
    assert float(text.rsplit("after ", 1)[1].split()[0]) < 8
