"""Levers of a plan at work: what the limit asks for is done, exactly, and no more than that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import RankPool
from tiny import Tiny, tokens
from torch import Tensor

from paradyse.runtime.registry import captures_of
from paradyse.runtime.saved_memory import Saved, storages
from paradyse.types import Plan, Point

LONG, SHORT, LAYERS = 193, 11, 4


def gradients(call: Any, model: torch.nn.Module, length: int) -> dict[str, Tensor]:
    """By parameter, and the loss."""
    model.zero_grad()
    ids = tokens(2, length)
    loss = call(ids, ids)
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": loss.detach()}


def compiled_with(model: torch.nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="paradyse", options={"inner": "eager", **options})


def graph_of(compiled: Any) -> Any:
    return [g for c in captures_of(compiled) for g in c.graphs.values()][-1]


def saved_bytes(compiled: Any, model: torch.nn.Module) -> int:
    """What autograd keeps of a forward of the long length, parameters not counted."""
    saved, ids = Saved(), tokens(2, LONG)
    with saved.watch():
        loss = compiled(ids, ids)
    kept = saved.alive_bytes(frozenset(storages(model.parameters())))
    loss.backward()
    return kept


def under_a_limit() -> tuple[list[str], list[str], bool]:
    """The plans of a long and of a short length under a limit between what the fastest plan needs
    and the least of all; and whether a rank kept less than under the fastest."""
    torch.manual_seed(0)
    model = Tiny(layers=LAYERS).double()
    want = {n: gradients(model, model, n) for n in (LONG, SHORT)}
    free = compiled_with(model, levers=["recompute"])
    gradients(free, model, LONG)
    choice = graph_of(free).choice
    work = choice.workload(2, LONG, True)
    need = choice.planner.predict(choice.planner.plan(work), work)[1]
    least = choice.planner.least_bytes(work)
    kept = saved_bytes(free, model)
    limited = compiled_with(model, levers=["recompute"], memory_limit=(3 * least + need) // 4)
    for length in (LONG, SHORT, LONG):
        got = gradients(limited, model, length)
        for name, expected in want[length].items():
            torch.testing.assert_close(got[name], expected, rtol=1e-9, atol=1e-12)
    plans = graph_of(limited).choice.guard.plan_of
    long, short = (list(Plan.of_key(plans[n]).strategies) for n in (LONG, SHORT))
    return long, short, saved_bytes(limited, model) < kept


@pytest.mark.broad(but="1")
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_limit_takes_levers_where_it_must(nproc: int, ranks: Any) -> None:
    results = ranks(nproc).run(under_a_limit, timeout_s=100)
    assert results == [results[0]] * nproc
    long, short, keeps_less = results[0]
    assert 0 < sum(Point.parse(s).recomputes for s in long) <= 2 * LAYERS
    assert not any(Point.parse(s).levers for s in short)
    assert keeps_less


def test_what_fits_nowhere_is_said_before_the_step(pool1: RankPool) -> None:
    (text,) = pool1.run(refused)
    assert "no plan fits for batch 2 x 193 tokens" in text and "'memory_limit' is 1.0 KiB" in text


def refused() -> str:
    compiled = compiled_with(Tiny(), memory_limit="1KiB")
    try:
        compiled(tokens(2, LONG), tokens(2, LONG))
    except ValueError as e:
        return str(e)
    return ""


def variants_of(plan: str) -> list[str]:
    """Variants compiled for a plan by name, and for the same computed again."""
    import paradyse

    model = Tiny()
    found = []
    for text in (plan, f"{plan}+recompute"):
        compiled = compiled_with(model, plan=text)
        gradients(compiled, model, SHORT)
        stats = paradyse.stats(compiled)
        found.append(f"{stats.variants_compiled} {stats.plan_per_length[SHORT]}")
    return found


def test_what_is_computed_again_is_no_other_variant(pool2: RankPool) -> None:
    for plain, again in pool2.run(variants_of, "megatron_ts"):
        assert plain == "2 " + ",".join(["megatron_ts"] * 4)
        assert again == "2 " + ",".join(["megatron_ts+recompute"] * 4)
