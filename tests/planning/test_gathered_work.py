"""What is computed on gathered tokens is counted: its messages as they are sent, its share of a
step in ``explain``, and a warning where that is large."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_run import loss_of
from family_table import FAMILIES
from harness import RankPool
from models import run_step
from small_models import batch_of, make

from paradyse.graph.attention_call import AttentionCall
from paradyse.planning.gathered import GatheredWork, with_shares
from paradyse.types import Workload

LENGTHS = (13, 22)
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")
"""Sums of losses and of gradients of weights are no part of it."""


def count(name: str, training: bool) -> list[tuple[Counter[str], Counter[str]]]:
    """Per length what the steps between blocks sent, and what was predicted."""
    from paradyse.distributed.collectives import traffic
    from paradyse.runtime.registry import captures_of

    row, found, asked = FAMILIES[name], [], list[Workload]()
    model = make(row)

    def plan(workload: Workload) -> str:
        asked.append(workload)
        return "colossal_z"

    compiled = torch.compile(model, backend="paradyse", options={"plan": plan, "inner": "eager"})

    def step(n: int) -> None:
        batch = batch_of(row, model, n)
        if training:
            run_step(compiled, model, batch, loss_of)
        else:
            with torch.no_grad():
                compiled(**batch)

    for n in LENGTHS:
        for _ in range(2):  # classifiers note at the first what kind of labels they have
            step(n)
        before = Counter[str]()
        graphs = [g for c in captures_of(compiled) for g in c.graphs.values()]
        ids = {(g.axis, g.program.schedule.between_id) for g in graphs}
        for axis, block_id in ids:
            before.update(traffic(axis, block_id).sent_bytes)
        step(n)
        sent = Counter[str]()
        for axis, block_id in ids:
            sent.update(traffic(axis, block_id).sent_bytes)
        sent.subtract(before)
        predicted = counted(graphs[-1].program, asked[-1])
        found.append(tuple(Counter({c: n[c] for c in COLLECTIVES}) for n in (sent, predicted)))
    return found


def counted(program: Any, workload: Workload) -> Counter[str]:
    from paradyse.planning.gathered_work import Count

    count, total = Count(program, workload), Counter[str]()
    for step, _ in count.steps:
        amount = count.amount(step)
        assert amount is not None and amount.num_ops > 0
        total.update(amount.sent_bytes)
    return total


QUICK = (("deberta", True, 2), ("fnet", True, 3))
CASES = [
    pytest.param(name, training, nproc, marks=() if quick else pytest.mark.slow)
    for name in ("xlm-roberta", "deberta", "fnet", "mamba2")
    for training in (True, False)
    for nproc in (2, 3)
    for quick in [(name, training, nproc) in QUICK]
]


@pytest.mark.broad(but="deberta-True-2")
@pytest.mark.parametrize(("name", "training", "nproc"), CASES)
def test_messages_are_as_counted(
    name: str, training: bool, nproc: int, ranks: Callable[[int], RankPool]
) -> None:
    for lengths in ranks(nproc).run(count, name, training, timeout_s=120):
        for sent, predicted in lengths:
            assert sent == predicted and sum(sent.values()) > 0


def warn(name: str) -> tuple[list[str], str, list[str]]:
    """What is logged in calls of several lengths under auto, and what is explained."""
    import paradyse
    from paradyse.planning import gathered_work

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    gathered_work.log.addHandler(handler)
    try:
        row = FAMILIES[name]
        model = make(row)
        options = {"inner": "eager", "strategies": ["megatron_cz", "ulysses_z"]}
        compiled = torch.compile(model, backend="paradyse", options=options)
        for n in (13, 14, 90):
            loss_of(compiled(**batch_of(row, model, n))).backward()
        report = paradyse.explain(compiled, 3, 90)
    finally:
        gathered_work.log.removeHandler(handler)
    return said, str(report), list(report.gathered)


@pytest.mark.broad
def test_a_large_share_is_warned_of_once_and_explained(pool2: RankPool) -> None:
    """FNet's transforms, of which there is one a layer and no rule, are gathered: one line."""
    note = "aten.fft_fftn.default runs on gathered tensors in L['self'].fnet.encoder.layer.*"
    for said, text, gathered in pool2.run(warn, "fnet", timeout_s=120):
        (line,) = [x for x in said if x.startswith(note)]
        cost = r": [\d.]+ [mu]s and [\d.]+ KiB sent by a rank, \d+% of a step"
        assert re.search(cost + r" \(at 13 tokens\)$", line), line
        (priced,) = [x for x in gathered if x.startswith(note)]
        assert re.search(cost + "$", priced), priced
        assert f"on gathered tensors: {priced}" in text


def explain_elsewhere() -> list[str]:
    """Where the program of one length is asked about another."""
    import paradyse

    row = FAMILIES["qwen3-next"]
    model = make(row)
    options = {"inner": "eager", "strategies": ["megatron_cz"]}
    compiled = torch.compile(model, backend="paradyse", options=options)
    loss_of(compiled(**batch_of(row, model, 13))).backward()
    return list(paradyse.explain(compiled, 3, 131).gathered)


@pytest.mark.slow
def test_a_length_that_has_another_program_is_explained(pool2: RankPool) -> None:
    """A scan's number of chunks depends on the length: the program of 13 is not that of 131."""
    for gathered in pool2.run(explain_elsewhere, timeout_s=120):
        scans = [x for x in gathered if "linear_attn" in x]
        cost = r"sent by a rank(, \d+% of a step|; its time is not known at this length)$"
        assert scans and all(re.search(cost, x) for x in scans)


@pytest.mark.broad
def test_no_plan_of_blocks_without_gathered_operators_is_watched(pool2: RankPool) -> None:
    for said, _, gathered in pool2.run(warn, "bert", timeout_s=120):
        assert not said and not gathered


def test_operators_are_counted() -> None:
    from paradyse.planning.gathered_work import _Counter

    x, w = torch.ones(4, 8), torch.ones(16, 8)
    q = torch.ones(2, 3, 10, 4)
    with _Counter() as counter:
        torch.nn.functional.linear(x, w).view(2, 32)  # a view of w, and one of the result
        AttentionCall(q, q, q, right=0).run()
    assert counter.flops == 2 * 4 * 8 * 16
    assert counter.attention_flops == 2 * (2 * 3) * (10 * 11 / 2) * (4 + 4)
    assert counter.num_ops == 2
    moved = x.nbytes + w.nbytes + 4 * 16 * 4 + 4 * q.nbytes + 2 * 3 * 10 * 4  # with the lse
    assert counter.moved_bytes == moved


def test_shares() -> None:
    found = [GatheredWork(("a",), 1.0, 2048), GatheredWork(("b",), None, 10)]
    assert [share for _, share in with_shares(found, 3.0, measured=False)] == [0.25, 0.0]
    assert [share for _, share in with_shares(found, 4.0, measured=True)] == [0.25, 0.0]
    assert [share for _, share in with_shares(found, 0.5, measured=True)] == [1.0, 0.0]
    assert found[0].line(0.25) == "a: 1 s and 2.0 KiB sent by a rank, 25% of a step"
    assert found[1].line(0) == "b: 10 B sent by a rank; its time is not known at this length"
