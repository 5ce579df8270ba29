"""Measured against predicted: ratios by variant and scale; memory upwards; what never ran."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_planner import LONG, SHORT, model, planner

from paradyse.planning.corrections import (
    FLOOR,
    REST_SAVED,
    STATIC,
    Corrections,
    along,
    scale_of,
)
from paradyse.planning.costs import NOTHING, BlockCost
from paradyse.profiling.marks import DeviceMemory, Level

FAST, NEW = ("kind", "ulysses_z"), ("kind", "megatron_cz")
COST = BlockCost(time_s=1.0, saved_bytes=100, workspace_bytes=10, comm_bytes=7)


def known(**rows: Any) -> Corrections:
    """Corrections of the quantities given, by their names with ``_`` for a blank."""
    measured = {
        (name.replace("_", " "), of): row
        for name, found in rows.items()
        for of, row in found.items()
    }
    return Corrections(measured)


def test_scales_are_powers_of_two_of_tokens() -> None:
    at = [scale_of(replace(SHORT, batch=b, seq_len=n)) for b, n in ((1, 64), (1, 127), (2, 64))]
    assert at == [7, 7, 8]


def test_memory_is_corrected_upwards_and_where_it_ran() -> None:
    c = known(saved={FAST: {5: 0.5, 9: 2.0}}, workspace={FAST: {9: 3.0}})
    long, short = replace(SHORT, seq_len=300), replace(SHORT, seq_len=17)
    got = c.apply(COST, FAST, long)
    assert (got.saved_bytes, got.workspace_bytes, got.time_s) == (200, 30, 1.0)
    assert (got.source, got.memory_source) == ("prior", "online")
    assert c.apply(COST, FAST, short).saved_bytes == 100
    assert c.apply(COST, NEW, long) == COST
    assert c.apply(COST, FAST, replace(long, training=False)) == COST


def test_the_rest_grows_along_a_line() -> None:
    points = {100: 1000.0, 200: 1500.0}
    assert [along(points, n) for n in (50, 100, 150, 200, 400)] == [1000, 1000, 1250, 1500, 2500]
    assert along({100: 1000.0}, 400) == 1000
    assert along({100: 1000.0, 200: 900.0}, 400) == 900  # less is not to be had by more tokens
    c = known(rest_saved={None: points}, rest_workspace={None: {100: 7.0}})
    at = replace(SHORT, seq_len=200)
    online = replace(NOTHING, saved_bytes=1500, workspace_bytes=7, memory_source="online")
    assert c.apply_to_rest(NOTHING, at) == online
    predicted = replace(COST, saved_bytes=5000, workspace_bytes=1)
    got = c.apply_to_rest(predicted, at)
    assert (got.saved_bytes, got.workspace_bytes, got.time_s) == (5000, 7, 1.0)
    assert known().apply_to_rest(NOTHING, at) == NOTHING


def test_a_plan_that_needs_more_than_predicted_is_not_chosen_again() -> None:
    p = planner(blocks=model(2))
    fast = p.plan(LONG)
    need = p.predict(fast, LONG)[1]
    p = planner(blocks=model(2), memory_limit=round(need * 1.2))
    assert p.plan(LONG) == fast
    keys = dict.fromkeys(zip(p.kinds, p.variants(fast), strict=True))
    at = {scale_of(LONG): 2.0}
    p.correct(known(saved=dict.fromkeys(keys, at), workspace=dict.fromkeys(keys, at)))
    other = p.plan(LONG)
    assert other != fast and p.predict(other, LONG)[1] <= need * 1.2 < p.predict(fast, LONG)[1]
    assert p.plan(SHORT)  # another length is still planned


@pytest.mark.parametrize(("quantity", "tokens"), [(STATIC, 0), (FLOOR, 0), (REST_SAVED, 1)])
def test_what_no_plan_can_change_counts(quantity: str, tokens: int) -> None:
    p = planner({"attention": "ulysses_z", "mlp": "metp"})
    plan = p.plan(SHORT)
    before = p.predict(plan, SHORT)[1]
    p.correct(known(**{quantity.replace(" ", "_"): {None: {tokens: 2.0**40}}}))
    after = p.predict(plan, SHORT)[1]
    assert after - 2**40 == (before if quantity != FLOOR else 0)


def test_peaks_are_read_without_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the second and third mark the peak is hidden below an earlier one."""
    table = iter([(50, 90), (60, 95), (70, 95), (55, 120)])

    def stats(device: torch.device) -> Any:
        assert device == torch.device("cuda", 1)
        held, peak = next(table)
        return {"allocated_bytes": {"all": {"current": held, "peak": peak}}}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    probe = DeviceMemory(torch.device("cuda", 1), reset=False)
    for _ in range(4):
        probe.note()
    assert probe.first_bytes == 50
    assert probe.read() == [Level(0, 40), Level(10, 45), Level(20, 20), Level(5, 70)]
