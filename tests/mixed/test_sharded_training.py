"""Training in groups of different degree with sharded weights equals one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from harness import RankPool
from models import FAMILIES, TOLERANCE, make_model, relative, whole, worst
from test_training import alone, dataset_of, epoch, step_of, targets, ways_for
from torch import Tensor

import paradyse
from paradyse.distributed.axis import resolve_axis
from paradyse.distributed.together import Together
from paradyse.mixed.batches import MixedBatches, MixedStep
from paradyse.mixed.ways import Group, MicroBatch, StepPlan, Way
from paradyse.runtime.frame import Frame
from paradyse.runtime.program import Program
from paradyse.types import Plan

Micro = Sequence[tuple[int, Sequence[int]]]
"""Groups of a micro-batch side by side: ranks of each, and the sequences that it computes."""


def plan_of(micro_batches: Sequence[Micro]) -> StepPlan:
    """The plan of a step with these groups, from the first rank on."""
    found = []
    for groups in micro_batches:
        made, rank = list[Group](), 0
        for degree, sequences in groups:
            way = Way(degree, 0.0, 10**6, (1,), (1.0,))
            made.append(Group(way, tuple(sequences), rank, 1.0))
            rank += degree
        found.append(MicroBatch(tuple(made)))
    return StepPlan(tuple(found))


def step_by(batches: MixedBatches, plan: StepPlan, number: int = 0) -> MixedStep:
    """All of the dataset as the batch ``number`` of an epoch, by ``plan``."""
    indices = tuple(range(len(batches.dataset)))
    lengths = tuple(len(s["input_ids"]) for s in batches.dataset)
    together = Together(resolve_axis(), "a test")
    return batches._step(together, (indices, lengths), plan, batches.ways, number)


def batches_of(family: str, data: Sequence[dict[str, Tensor]], **options: Any) -> MixedBatches:
    """Batches of ``data``, for steps by plans that are given."""
    spec, ways = FAMILIES[family], [Way(1, 0.0, 10**6, (1,), (1.0,))]
    like = {"causal": spec.causal, "pack": spec.packs}
    return MixedBatches(data, tokens_per_step=10**6, ways=ways, **like, **options)


def trained(
    family: str, lengths: Sequence[int], plans: Sequence[Sequence[Micro]], **options: Any
) -> list[tuple[float, str]]:
    """Largest error of loss and gradients of a step by each of ``plans``.

    Args:
        options: of the backend.
    """
    torch._dynamo.reset()
    reference, model = (make_model(family, num_hidden_layers=2) for _ in range(2))
    data = dataset_of(lengths)
    paradyse.shard(model)
    batches = batches_of(family, data)
    mixed = paradyse.MixedModel(model, {"inner": "eager", **options})
    want, found = alone(reference, family, data), []
    for plan in plans:
        step = step_by(batches, plan_of(plan))
        for loss in mixed.losses(step):
            loss.backward()
        assert step.loss is not None
        found.append(worst(step_of(model, step.loss), want))
    return found


def check(results: list[list[tuple[float, str]]]) -> None:
    """All ranks have the gradients of one process."""
    for found in results:
        assert found
        assert all(error <= TOLERANCE[torch.float32] for error, _ in found), found


LENGTHS = [9, 4, 5, 1, 13]
"""Of which one has no target where labels are shifted."""

PLANS: dict[int, list[list[Micro]]] = {
    2: [
        [[(1, [0, 4]), (1, [1, 2, 3])]],
        [[(1, [0, 1])], [(2, [2, 3, 4])]],
        [[(2, [0, 1, 2, 3, 4])]],
    ],
    3: [
        [[(2, [0, 1, 2]), (1, [3, 4])]],
        [[(1, [0, 1, 2]), (2, [3, 4])]],
        [[(2, [0, 1]), (1, [2])], [(2, [3, 4])]],
        [[(1, [4])], [(3, [0, 1, 2, 3])]],
    ],
    4: [
        [[(2, [0, 1, 2]), (2, [3, 4])]],
        [[(3, [0, 1, 2]), (1, [3, 4])]],
        [[(2, [0, 1]), (1, [2, 3]), (1, [4])]],
        [[(4, [0, 1])], [(1, [2]), (1, [4])], [(2, [3])]],
    ],
}
"""Ranks -> steps: groups of one and of several sizes side by side, ranks without work, a group of
all of them, and one whose only sequence has no target."""


@pytest.mark.broad
def test_two_ranks(pool2: RankPool) -> None:
    check(pool2.run(trained, "llama", LENGTHS, PLANS[2], timeout_s=120))


@pytest.mark.broad
def test_three_ranks(pool3: RankPool) -> None:
    check(pool3.run(trained, "llama", LENGTHS, PLANS[3][:1], timeout_s=120))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "bert", "mixtral"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_families(family: str, num_ranks: int, ranks: Callable[[int], RankPool]) -> None:
    pool = ranks(num_ranks)
    check(pool.run(trained, family, LENGTHS, PLANS[num_ranks], timeout_s=360))


def refused_order() -> str:
    """What a step raises in which the ranks' groups would gather in other orders."""
    torch._dynamo.reset()
    model = make_model("llama", num_hidden_layers=1)
    paradyse.shard(model)
    mixed, batches = (
        paradyse.MixedModel(model, {"inner": "eager"}),
        batches_of("llama", dataset_of([9, 4])),
    )
    found = Program.gathering_order
    with (
        pytest.raises(ValueError, match="disagree") as heard,
        pytest.MonkeyPatch.context() as patch,
    ):
        if resolve_axis().rank:
            patch.setattr(Program, "gathering_order", lambda *args: found(*args)[::-1])
        for loss in mixed.losses(step_by(batches, plan_of([[(1, [0]), (1, [1])]]))):
            loss.backward()
    assert all(p.grad is None for p in model.parameters())
    return str(heard.value)


def test_groups_that_would_gather_in_other_orders_are_told(pool2: RankPool) -> None:
    for text in pool2.run(refused_order):
        assert "the order in which weights are gathered" in text
        assert "rank 0" in text and "rank 1" in text


def failed_and_went_on() -> tuple[str, float]:
    """What a step raises in which one group fails in its forward, and the error of the next one."""
    torch._dynamo.reset()
    reference, model = (make_model("llama", num_hidden_layers=1) for _ in range(2))
    paradyse.shard(model)
    data, plan = dataset_of([9, 4, 5]), plan_of([[(2, [0, 1]), (1, [2])]])
    mixed, batches = paradyse.MixedModel(model, {"inner": "eager"}), batches_of("llama", data)
    run_step, rank = Frame.run_step, resolve_axis().rank

    def failing(frame: Frame, step: Any, strategy: str) -> None:
        if step.position == 2 and rank == 2:
            raise ZeroDivisionError("on the last rank")
        run_step(frame, step, strategy)

    with (
        pytest.raises(Exception, match="on the last rank") as heard,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(Frame, "run_step", failing)
        for loss in mixed.losses(step_by(batches, plan)):
            loss.backward()
    step = step_by(batches, plan, 1)
    for loss in mixed.losses(step):
        loss.backward()
    assert step.loss is not None
    return str(heard.value), worst(step_of(model, step.loss), alone(reference, "llama", data))[0]


@pytest.mark.broad
def test_what_fails_in_one_group_ends_the_step_in_all_of_them(pool3: RankPool) -> None:
    for text, error in pool3.run(failed_and_went_on, timeout_s=120):
        assert "on the last rank" in text
        assert error <= TOLERANCE[torch.float32]


def test_a_call_that_stands_for_none_has_a_label_of_the_data() -> None:
    """A token's number may be no class of a model that tells classes of tokens."""
    unlabelled, labelled = {"input_ids": [7, 8]}, {"input_ids": [90, 91, 92]}
    unlabelled["labels"], labelled["labels"] = [-100, -100], [-100, 1, 0]
    batches = batches_of("bert", [unlabelled, labelled])
    (call,) = batches._idle((0, 1))
    assert call["labels"].tolist() == [[1, 1]] and call["input_ids"].tolist() == [[91, 91]]
    assert batches._idle((0,)) == []


def long_run(family: str, sharded: bool, num_steps: int) -> list[float]:
    """Relative distance of weights from those of one process, after steps of AdamW with plans that
    change."""
    torch._dynamo.reset()
    reference, model = (make_model(family, num_hidden_layers=1) for _ in range(2))
    if sharded:
        paradyse.shard(model)
    g, spec, ways = random.Random(5), FAMILIES[family], ways_for(resolve_axis().size)
    longest = min(60, max(way.max_tokens for way in ways))
    lengths = [min(longest, 1 + int(g.expovariate(1 / 9))) for _ in range(120)]
    data = dataset_of(lengths)
    like = {"causal": spec.causal, "pack": spec.packs, "seed": 3}
    batches = MixedBatches(data, tokens_per_step=120, ways=ways, **like)
    mixed = paradyse.MixedModel(model, {"inner": "eager"})
    # The gradient of a key's bias is rounding of 0, which a small eps would scale up to a step.
    steps = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-5) for m in (reference, model)]
    num = 0
    while num < num_steps:
        for step in batches:
            for loss in mixed.losses(step):
                loss.backward()
            want = alone_step(reference, family, [data[i] for i in step.indices])
            assert step.loss is not None
            assert abs(step.loss.item() - want) <= 1e-3 * want, (num, step.plan.in_words())
            for optimizer in steps:
                optimizer.step()
                optimizer.zero_grad()
            num += 1
            if num == num_steps:
                break
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return [relative(whole(p), q.detach()) for p, q in pairs]


def alone_step(model: Any, family: str, batch: Sequence[dict[str, Tensor]]) -> float:
    """Gradients of a batch in one process, left in place; its loss."""
    parts, count = [], 0
    for s in batch:
        labels = targets(family, s)
        num = int((labels != -100).sum())
        if num:
            parts.append(model(input_ids=s["input_ids"][None], labels=labels[None]).loss * num)
            count += num
    loss = torch.stack(parts).sum() / count
    loss.backward()
    return loss.item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "family", "sharded"),
    [
        (2, "gpt2", False),
        (2, "bert", True),
        (3, "llama", True),
        (3, "qwen3", False),
        (4, "llama", False),
        (4, "mixtral", True),
    ],
)
def test_a_hundred_steps_of_adamw(
    num_ranks: int, family: str, sharded: bool, ranks: Callable[[int], RankPool]
) -> None:
    for found in ranks(num_ranks).run(long_run, family, sharded, 100, timeout_s=400):
        assert max(found) <= 1e-3, found


LEVERED = {
    "again and plain": {
        1: Plan(("ulysses_z+recompute",) * 4),
        2: Plan(("megatron_cz",) * 4),
    },
    "plain and again": {
        1: Plan(("ulysses_z",) * 4),
        2: Plan(("megatron_cz+recompute", "ulysses_z+selective") * 2, "tiled"),
    },
    "what fits no rank whole": {
        1: Plan(("colossal_z+selective", "ulysses_z+tiled") * 2, "tiled"),
        2: Plan(("megatron_ts", "metp") * 2),
    },
    "words shared in a group": {
        1: Plan(("ulysses_z+recompute", "ulysses_z") * 2),
        2: Plan(("ulysses_z+offload", "megatron_ts+tiled") * 2, "vocabulary"),
    },
}
"""Plans of groups of one rank and of two, in a model of two layers."""


def with_levers(name: str) -> list[tuple[float, str]]:
    """``trained``, each group under the plan of its size."""
    plans, groups = LEVERED[name], [[(2, [0, 1, 2]), (1, [3, 4])]]
    return trained("llama", LENGTHS, [groups], plan=lambda workload: plans[workload.num_ranks])


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LEVERED))
def test_groups_side_by_side_may_have_other_levers(name: str, pool3: RankPool) -> None:
    check(pool3.run(with_levers, name, timeout_s=120))


def random_lengths(seed: int) -> list[int]:
    """Of 2 to 64 sequences: most short, many of one token, in every other batch one as long as all
    others together."""
    g = random.Random(seed)
    found = [max(1, int(g.expovariate(1 / 6)) - 2) for _ in range((1, 63, 8, 29, 16, 2)[seed % 6])]
    return [*found, sum(found) + 1] if seed % 2 else [*found, 2]


OFTEN, ONCE = ("llama", "bert"), ("gpt2", "qwen3", "mixtral")
"""Families trained on random batches of all numbers of sequences, and of few."""


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("family", [*OFTEN, *ONCE])
def test_planned_batches(
    family: str, num_ranks: int, sharded: bool, ranks: Callable[[int], RankPool]
) -> None:
    """Random batches, by the plans that ``MixedBatches`` makes."""
    for seed in range(6) if family in OFTEN else (num_ranks, 5):
        given = family, random_lengths(seed), 10**6, False, sharded
        results = ranks(num_ranks).run(epoch, *given, timeout_s=240)
        check([found for found, _ in results])
        assert len({tuple(words) for _, words in results}) == 1


def options_from_outside() -> tuple[list[str], list[str]]:
    model = paradyse.shard(make_model("llama"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARADYSE_OPTIONS", '{"strategies": ["megatron_cz"], "levers": ["recompute"]}')
        mixed = paradyse.MixedModel(model, {"levers": []})
    return mixed.options["strategies"], mixed.options["levers"]


def test_the_environment_gives_what_the_program_does_not(pool2: RankPool) -> None:
    assert pool2.run(options_from_outside) == [(["megatron_cz"], [])] * 2
