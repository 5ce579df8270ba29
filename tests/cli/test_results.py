"""Tables of what was replayed."""

from __future__ import annotations

import csv
from pathlib import Path

from paradyse.cli.replay import AUTO, Held, Planned, Replayed
from paradyse.cli.results import Record, Results, choice_times, marks


def test_what_ran_under_the_same_plan_is_marked_as_noise() -> None:
    """auto takes metp for the longer file, and once another plan for the shorter one."""
    runs = [
        ("auto", 0, 64, "metp", 1.0),
        ("auto", 0, 64, "ulysses_z", 1.0),
        ("metp", 0, 64, "metp", 2.0),
        ("auto", 1, 128, "metp", 2.0),
        ("metp", 1, 128, "metp", 1.8),
        ("ulysses_z", 0, 64, "ulysses_z", 1.5),
        ("ulysses_z", 1, 128, "ulysses_z", 4.0),
    ]
    record = Record(replayed=[Replayed(*run) for run in runs])
    choices = ["metp", "ulysses_z"]
    assert choice_times(record, choices, [0]) == ("1 s*", "2.00x", "1.50x")
    assert choice_times(record, choices, [1]) == ("2 s", "0.90x=*", "2.00x")
    assert choice_times(record, choices, [0, 1]) == ("3 s*", "1.27x", "1.83x")
    title, header, rows = Results(record).times()
    assert marks(AUTO) in title and header == ("length", f"plan of {AUTO}", AUTO, *choices)
    assert rows[1] == ("128", "metp", "2 s", "0.90x=*", "2.00x")


def test_a_given_plan_is_nowhere_called_auto(tmp_path: Path) -> None:
    shares = {"attention": {"metp": 1.0}}
    record = Record(
        replayed=[Replayed(c, 0, 64, "metp", 1.0) for c in (AUTO, "metp")],
        held=[Held(c, 64, 2**30) for c in (AUTO, "metp")],
        planned=[Planned(64, shares)],
    )
    results = Results(record, "training's plan")
    for shown in (results.times(), results.memory(), results.page("a model")):
        assert "training's plan" in str(shown) and AUTO not in str(shown)
    results.write_csv(tmp_path / "demo.csv")
    with open(tmp_path / "demo.csv") as file:
        assert [row["choice"] for row in csv.DictReader(file)] == ["training's plan", "metp"]
