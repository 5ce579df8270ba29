"""Heads and embeddings of which each rank has the rows of some words: every loss and gradient, and
no table in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankPool
from models import make_batch, make_model, run_step
from test_head import (
    LOSSES,
    QUICK,
    VOCABULARY,
    WORDS,
    Sizes,
    compiled_under,
    heads,
    labelled,
    largest_value,
    make,
    small_tiles,
    train_family,
    train_replicas,
    train_with,
    under_autocast,
)
from tiny import tokens

import paradyse
from paradyse.distributed.axis import resolve_axis
from paradyse.distributed.collectives import Started
from paradyse.runtime.frame import Frame
from paradyse.runtime.frame_maker import frames_by
from paradyse.runtime.registry import captures_of
from paradyse.types import HeadSpec, Plan, Workload

Ranks = Callable[[int], RankPool]

ALONE, TILED = "vocabulary", "tiled+vocabulary"

SPLITTABLE = [name for name in LOSSES if name != "probabilities"]


@pytest.mark.parametrize(
    ("nproc", "inner", "levers", "sharded"),
    [
        *(
            pytest.param(n, "eager", levers, n != 3, marks=pytest.mark.slow)
            for n in (2, 3, 4)
            for levers in (ALONE, TILED)
        ),
        pytest.param(2, "aot_eager", TILED, True, marks=pytest.mark.slow),
        pytest.param(2, "inductor", TILED, True, marks=pytest.mark.slow),
    ],
)
def test_every_loss_as_with_whole_logits(
    nproc: int, inner: str, levers: str, sharded: bool, ranks: Ranks
) -> None:
    ranks(nproc).run(train_with, SPLITTABLE, inner, sharded, levers, timeout_s=300)


@pytest.mark.slow
@pytest.mark.parametrize(("levers", "sharded"), [(TILED, True), (ALONE, False)])
def test_some_losses(levers: str, sharded: bool, pool2: RankPool) -> None:
    pool2.run(
        train_with, [*QUICK, "by hand", "forbidden words"], "eager", sharded, levers, timeout_s=100
    )


@pytest.mark.broad
@pytest.mark.parametrize(
    ("family", "nproc", "levers", "sharded"),
    [
        ("gpt2", 2, TILED, True),
        *(
            pytest.param(f, n, levers, levers == TILED or n == 3, marks=pytest.mark.slow)
            for f in ("llama", "gpt2", "gemma2", "granite", "bert", "opt")
            for n, levers in ((2, ALONE), (2, TILED), (3, ALONE), (4, TILED))
        ),
    ],
)
def test_families(family: str, nproc: int, levers: str, sharded: bool, ranks: Ranks) -> None:
    ranks(nproc).run(train_family, family, sharded, levers, timeout_s=300)


@pytest.mark.broad(but="mean-2")
@pytest.mark.parametrize("nproc", [2])
@pytest.mark.parametrize("names", [["mean"], ["z-loss"]], ids="-".join)
def test_no_value_has_all_tokens_and_the_vocabulary(
    names: list[str], nproc: int, ranks: Ranks
) -> None:
    for largest, logits in ranks(nproc).run(largest_value, TILED, names, timeout_s=100):
        assert largest < logits


def largest_of_a_step(levers: str) -> tuple[int, int]:
    """Elements of the largest value that a rank computes in a training step of few tokens, and of
    the largest message; both tables are sharded."""
    model = paradyse.shard(make("llama"))
    batch = {"input_ids": tokens(1, 5), "labels": tokens(1, 5, seed=1)}
    plan = {"attention": "megatron_ts", "mlp": "megatron_ts", "head": levers}
    compiled = compiled_under(levers, model, plan=plan)
    run_step(compiled, model, batch)  # it compiles
    started, sizes = resolve_axis().session.of(Started), Sizes()
    before = started.count

    class Watched(Frame):
        def run(self) -> Any:
            with sizes:
                return super().run()

    with frames_by(Watched):
        loss = compiled(**batch).loss
    with sizes:
        loss.backward()
    sent = list(started.latest)[before - started.count :]
    assert sent
    return sizes.largest, max(torch.Size(m.shape).numel() for m in sent)


@pytest.mark.broad
def test_no_table_is_in_one_place(pool2: RankPool) -> None:
    table = WORDS * 64
    for largest, message in pool2.run(largest_of_a_step, TILED, timeout_s=100):
        assert largest < table and message < table
    for largest, message in pool2.run(largest_of_a_step, "tiled", timeout_s=100):
        assert largest >= table and message >= table, "the test sees tables"


@pytest.mark.slow
def test_under_autocast(pool2: RankPool) -> None:
    for found in pool2.run(under_autocast, TILED, timeout_s=100):
        assert found[TILED] < 2 * found["eager"]


@pytest.mark.slow
def test_replicas_weigh_by_their_tokens(pool4: RankPool) -> None:
    pool4.run(train_replicas, TILED, timeout_s=100)


def spec(names: list[str]) -> HeadSpec:
    """What the planner is told of the head."""
    compiled = torch.compile(heads(*names), backend="paradyse", options={"inner": "eager"})
    compiled(**labelled(2, 9))
    (graph,) = (g for c in captures_of(compiled) for g in c.graphs.values())
    head: HeadSpec = graph.choice.planner.head
    return head


def test_what_needs_all_words_is_refused(pool1: RankPool, pool2: RankPool) -> None:
    (alone,) = pool1.run(spec, ["mean"], timeout_s=100)
    assert alone.infeasible == {ALONE: "there is one rank, which holds the whole vocabulary"}
    for head in pool2.run(spec, ["probabilities"], timeout_s=100):
        assert "has a value for every token and word" in head.infeasible[ALONE]
        assert head.points() == ("", "tiled")
    for head in pool2.run(spec, ["mean"], timeout_s=100):
        assert head.points() == ("", "tiled", ALONE, TILED) and head.vocabulary == VOCABULARY


def train_on_no_word(what: str) -> str:
    """What is raised where ``what`` has a number beyond the last word."""
    model = paradyse.shard(make("llama"))
    compiled = compiled_under(TILED, model)
    batch = {"input_ids": tokens(2, 9), "labels": tokens(2, 9)}
    with small_tiles():
        run_step(compiled, model, batch)
        batch[what][1, 5] = WORDS
        try:
            run_step(compiled, model, batch)
        except Exception as e:
            return type(e).__name__
    return ""


@pytest.mark.broad(but="labels")
@pytest.mark.parametrize("what", ["input_ids", "labels"])
def test_what_is_no_word_raises(what: str, pool2: RankPool) -> None:
    own = "IndexError" if what == "input_ids" else "RuntimeError"
    assert pool2.run(train_on_no_word, what, timeout_s=100) == ["RankFailedError", own]


def more_bytes(levers: str) -> tuple[int, int]:
    """What a step sends between blocks under ``levers`` more than with whole logits: as counted,
    and as predicted."""
    model = paradyse.shard(make_model("llama", num_hidden_layers=1))
    current = [""]

    def plan(workload: Workload) -> Plan:
        return Plan(("megatron_ts", "megatron_ts"), current[0])

    options = {"plan": plan, "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    batch = make_batch("plain", 2, 12)

    def sent() -> int:
        return paradyse.stats(compiled).bytes_per_block["between blocks"]

    counted = []
    with small_tiles():
        for current[0] in ("", levers):
            run_step(compiled, model, batch)
            before = sent()
            run_step(compiled, model, batch)
            counted.append(sent() - before)
        (graph,) = (g for c in captures_of(compiled) for g in c.graphs.values())
        workload = graph.choice.workload(2, 12, True)
        (costs,) = graph.choice.planner._predicted_head(workload)
        predicted = [costs[v].comm_bytes for v in ("", levers)]
    return counted[1] - counted[0], predicted[1] - predicted[0]


@pytest.mark.broad(but="tiled")
@pytest.mark.parametrize("levers", ["tiled", ALONE, TILED])
def test_bytes_are_as_predicted(levers: str, pool2: RankPool) -> None:
    for counted, predicted in pool2.run(more_bytes, levers, timeout_s=100):
        assert counted == predicted != 0
