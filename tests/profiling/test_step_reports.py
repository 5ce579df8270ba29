"""Every call tells what it did: plan, sizes, predictions and times, once, in order."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from harness import RankPool
from models import make_batch, make_model
from tiny import Tiny, tokens

import paradyse
from paradyse.types import REPLICATED, Plan, Workload


def by_length(workload: Workload) -> Plan:
    long = workload.seq_len > 15
    return Plan(("metp" if long else "ulysses_z", "megatron_ts+recompute") * 2)


def watched(plan: Any) -> list[dict[str, Any]]:
    model = make_model("llama")
    compiled = torch.compile(model, backend="paradyse", options={"plan": plan, "inner": "eager"})
    seen: list[paradyse.StepReport] = []
    paradyse.on_step(model, seen.append)
    assert paradyse.stats(model).last is None
    for length in (13, 22, 13, 13):
        compiled(**make_batch("plain", 2, length)).loss.backward()
    with torch.no_grad():
        compiled(**make_batch("plain", 1, 9))
    compiled(**make_batch("plain", 3, 11))  # without a backward
    assert len(seen) == 5
    compiled(**make_batch("plain", 2, 13)).loss.backward()
    last = paradyse.stats(compiled).last
    assert last is seen[-1]
    return [
        {
            "number": s.number,
            "sizes": (s.batch, s.seq_len),
            "strategies": s.plan.strategies,
            "levers": s.levers,
            "switched": s.switched,
            "switches": s.num_switches,
            "trained": s.trained,
            "predicted": s.predicted_s is not None and s.predicted_bytes is not None,
            "times": (s.forward_s, s.time_s),
            "scalars": s.scalars(),
            "mask": s.mask,
            "text": str(s),
        }
        for s in seen
    ]


@pytest.mark.broad
def test_calls_are_told_of_in_order(pool2: RankPool) -> None:
    for seen in pool2.run(watched, by_length, timeout_s=120):
        assert [s["number"] for s in seen] == [1, 2, 3, 4, 5, 6, 7]
        assert [s["sizes"][1] for s in seen] == [13, 22, 13, 13, 9, 11, 13]
        assert [s["sizes"][0] for s in seen] == [2, 2, 2, 2, 1, 3, 2]
        assert [s["trained"] for s in seen] == [True] * 4 + [False, False, True]
        assert [s["switched"] for s in seen[:4]] == [False, True, True, False]
        assert [s["switches"] for s in seen[:4]] == [0, 1, 2, 2]
        assert seen[1]["strategies"][0] == "metp" and seen[2]["strategies"][0] == "ulysses_z"
        assert seen[0]["levers"] == ("recompute",) and "causal" in seen[0]["mask"]
        assert not any(s["predicted"] for s in seen)
        for s in seen:
            forward, whole = s["times"]
            assert 0 < forward and (forward < whole if s["trained"] else forward == whole)
            assert s["scalars"]["paradyse/seq_len"] == s["sizes"][1]
            rate = s["sizes"][0] * s["sizes"][1] / whole
            assert s["scalars"]["paradyse/tokens_per_s"] == pytest.approx(rate)
        assert "length 22, metp and megatron_ts with recompute" in seen[1]["text"]


def report_and_its_copy() -> tuple[Any, Any]:
    torch._dynamo.reset()
    model = Tiny()
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    ids = tokens(2, 9)
    compiled(ids, ids).backward()
    report = paradyse.stats(compiled).last
    copy = pickle.loads(pickle.dumps(report))
    return report.scalars(), copy.scalars()


def test_a_report_travels_between_processes(pool2: RankPool) -> None:
    for mine, copied in pool2.run(report_and_its_copy):
        assert mine == copied


@pytest.mark.slow
def test_auto_says_what_it_predicted(pool2: RankPool) -> None:
    for seen in pool2.run(watched, "auto", timeout_s=120):
        assert all(s["predicted"] and s["scalars"]["paradyse/predicted_s"] > 0 for s in seen)


def read_by_one_rank() -> float | None:
    """A plan by kind leaves nothing to choose of a model without experts: no rank has rates."""
    model = make_model("gpt2")
    plan = {"attention": "ulysses_z", "mlp": "megatron_ts", "head": ""}
    compiled = torch.compile(model, backend="paradyse", options={"plan": plan, "inner": "eager"})
    scalars: dict[str, Any] = {}
    if torch.distributed.get_rank() == 0:
        paradyse.on_step(model, lambda step: scalars.update(step.scalars()))
    for _ in range(2):
        compiled(**make_batch("plain", 2, 13)).loss.backward()
    return scalars.get("paradyse/predicted_s")


def test_one_rank_alone_may_read_what_was_predicted(pool2: RankPool) -> None:
    assert pool2.run(read_by_one_rank, timeout_s=60) == [None, None]


def of_logits() -> tuple[list[bool], list[float]]:
    """A loss outside of the model: whether calls were trained, and backward's share of them."""
    model = make_model("llama")
    options = {"plan": "megatron_cz", "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    seen: list[paradyse.StepReport] = []
    paradyse.on_step(model, seen.append)
    batch = make_batch("plain", 2, 13)
    del batch["labels"]
    for _ in range(2):
        compiled(**batch).logits.square().mean().backward()
    return [s.trained for s in seen], [s.time_s - s.forward_s for s in seen]


@pytest.mark.broad
def test_a_backward_from_logits_is_seen(pool2: RankPool) -> None:
    for trained, backward_s in pool2.run(of_logits, timeout_s=120):
        assert trained == [True, True] and min(backward_s) > 0


def alone() -> tuple[str, tuple[str, ...]]:
    model = make_model("llama")
    options = {"plan": REPLICATED, "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    compiled(**make_batch("plain", 2, 13)).loss.backward()
    last = paradyse.stats(compiled).last
    return str(last), last.levers


def test_a_call_that_every_rank_computes_whole_has_no_levers(pool2: RankPool) -> None:
    for text, levers in pool2.run(alone, timeout_s=120):
        assert levers == () and "length 13, replicated, " in text


def watched_late() -> tuple[int, int]:
    """Calls of graphs that had run before somebody asked, and of those after that was over. They
    share no parameters, and are not alike: one graph may serve models that are."""
    parts = [make_model("llama", num_hidden_layers=i) for i in (1, 2)]
    model, batch = torch.nn.ModuleList(parts), make_batch("plain", 1, 9)
    for part in parts:
        part.compile(backend="paradyse", options={"inner": "eager"})

    def step() -> None:
        sum(part(**batch).loss for part in parts).backward()

    step()
    seen: list[Any] = []
    remove = paradyse.on_step(model, seen.append)
    step()
    num = len(seen)
    remove()
    step()
    return num, len(seen) - num


@pytest.mark.broad
def test_every_graph_of_a_model_is_watched(pool1: RankPool) -> None:
    assert pool1.run(watched_late, timeout_s=120) == [(2, 0)]


def ended() -> tuple[int, int]:
    model = make_model("llama")
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    first: list[Any] = []
    second: list[Any] = []
    remove = paradyse.on_step(compiled, first.append)
    paradyse.on_step(model, second.append)
    for _ in range(3):
        compiled(**make_batch("plain", 2, 9)).loss.backward()
        remove()
    return len(first), len(second)


@pytest.mark.broad
def test_who_has_seen_enough_is_told_no_more(pool1: RankPool) -> None:
    assert pool1.run(ended, timeout_s=120) == [(1, 3)]


def failing() -> tuple[list[int], list[int]]:
    """A call that raises is counted, and not told of; the loop goes on."""
    model = make_model("llama")
    compiled = torch.compile(model, backend="paradyse", options={"plan": odd, "inner": "eager"})
    seen: list[int] = []
    paradyse.on_step(model, lambda step: seen.append(step.seq_len))
    lengths = [13, 14, 13]
    raised = []
    for length in lengths:
        try:
            compiled(**make_batch("plain", 2, length)).loss.backward()
        except Exception as e:
            assert "even" in str(e)
            raised.append(length)
    return seen, raised


def odd(workload: Workload) -> Plan:
    if workload.seq_len % 2 == 0:
        raise ValueError("even")
    return Plan(("metp",) * 4)


@pytest.mark.broad
def test_a_call_that_raises_is_not_told_of(pool2: RankPool) -> None:
    for seen, raised in pool2.run(failing, timeout_s=120):
        assert seen == [13, 13] and raised == [14]


def test_what_cannot_be_watched_is_refused() -> None:
    with pytest.raises(ValueError, match=r"give a torch\.nn\.Module, not str"):
        paradyse.on_step("model", print)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameters"):
        paradyse.on_step(torch.nn.ReLU(), print)
    with pytest.raises(ValueError, match="a function of a StepReport, not 3"):
        paradyse.on_step(torch.nn.Linear(2, 2), 3)  # type: ignore[arg-type]
