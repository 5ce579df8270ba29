"""``paradyse plan`` on paper: lengths in order, and strategies that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paradyse.cli.commands import plan
from paradyse.cli.main import main
from paradyse.offline.devices import read_cluster
from paradyse.offline.outlook import MIXTURE, Forecast, Outlook, Reach
from paradyse.types import Plan


def outlook_at(lengths: list[int]) -> Outlook:
    """Of a block for which ``dsp`` is infeasible."""
    found = tuple(Forecast(n, n / 1000, 100, True, Plan(("metp",))) for n in lengths)
    reach = Reach((), found[-1], tuple((n, 100) for n in lengths))
    block = SimpleNamespace(kind="attention")
    run: Any = SimpleNamespace(
        blocks=[block],
        static_bytes=1,
        on_host_bytes=0,
        num_parameters=1,
        beside=(),
        notes=[],
        weight_dtype=None,
    )
    run.workload, run.gathered = (lambda *a: None), (lambda *a: [])
    return Outlook(
        run,
        SimpleNamespace(source="rates"),  # type: ignore[arg-type]
        1e9,
        1,
        torch.float32,
        {"dsp": "nothing to switch to"},
        {"metp": found, MIXTURE: found},
        {"metp": lengths[-1], MIXTURE: lengths[-1]},
        {MIXTURE: reach},
    )


@pytest.mark.parametrize("how", ["2048,512,2048,1024", "{file}"])
def test_lengths_are_planned_from_the_shortest_on(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lengths.txt").write_text("2048 512 2048\n1024\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    monkeypatch.setattr(plan, "dry_run_of", lambda *args: None)
    monkeypatch.setattr(plan, "look_ahead", lambda *args, **more: outlook_at(args[2]))
    given = ["--lengths", how.format(file=tmp_path / "lengths.txt"), "--gpus", "2", "--json"]
    assert main(["plan", "--model", str(tmp_path / "config.json"), *given]) == 0
    for forecasts in json.loads(capsys.readouterr().out)["forecasts"].values():
        assert [f["seq_len"] for f in forecasts] == [512, 1024, 2048]


def test_a_strategy_that_is_infeasible_is_shown_with_the_mixture_alone() -> None:
    tables = plan.tables_of(outlook_at([512, 1024]), read_cluster("a100-80gb"), "dsp")
    of = {title: (header, rows) for title, header, rows in tables}
    header, rows = of["time of a step"]
    assert header == ("tokens", MIXTURE) and [row[0] for row in rows] == ["512", "1,024"]
    assert ("dsp", "infeasible: nothing to switch to") in of["longest trainable length"][1]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--device a100-80gb --ranks 4", "leave it out and give --gpus 4"),
        ("--gpus 8 --ranks 2", "--ranks is for ranks of this machine, and on paper none is"),
        ("--gpus 8 --timeout 60", "--timeout is for ranks of this machine"),
        ("--gpus 8 --verbose", "--verbose is for ranks of this machine"),
        ("--gpus 8 --lengths-from GRCh38 --ranks 2", "none is started: leave it out"),
        ("--gpus 8 --offload optimizer --weights replicated", "give --weights sharded"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    line: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert main(["plan", "--model", str(tmp_path / "config.json"), *line.split()]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "ranks", "timeout_s"), [("", 2, 1800.0), ("--ranks 3 --timeout 60", 3, 60.0)]
)
def test_ranks_here_are_as_many_as_asked(
    line: str, ranks: int, timeout_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run_as_asked(args: Any, *more: Any) -> Any:
        asked.append((args.ranks, args.timeout, args.verbose))
        return [[object()] * len(more[1]["lengths"])]

    monkeypatch.setattr(plan.launch, "run_as_asked", run_as_asked)
    monkeypatch.setattr(plan.integrations, "checked_config", lambda *args: {})
    assert main(["plan", "--model", str(tmp_path), *line.split()]) == 0
    assert asked == [(ranks, timeout_s, False)]
