"""What commands print for machines: one JSON object on standard output, and nothing else there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from paradyse.cli import main as cli
from paradyse.cli.commands import doctor
from paradyse.cli.json_output import as_json
from paradyse.types import ATTENTION_STRATEGIES, REPLICATED

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 6000}
LLAMA = {"model_type": "llama", **SIZES, **HEADS}


class Pair(NamedTuple):
    what: str
    num_bytes: int


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def ask(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> tuple[Any, str]:
    """The object that a command prints, and what it writes to standard error."""
    assert cli.main([*args, "--json"]) == code
    written = capsys.readouterr()
    assert written.out.count("\n") == 1
    return json.loads(written.out), written.err


@pytest.mark.slow
def test_verify(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--layers", "1", "--seq-len", "13", "--inner", "eager", "--dtype", "float16"]
    found, err = ask(capsys, "verify", "--model", config, *few)
    assert found["ok"] is True and err.endswith("ok\n")
    assert all(s in err for s in (*ATTENTION_STRATEGIES, REPLICATED, "mixed"))
    rows = {row["plan"]: row for row in found["report"]["rows"]}
    assert rows.keys() >= set(ATTENTION_STRATEGIES) - {"dsp"}
    assert rows["metp"]["gradient_error"] < rows["metp"]["tolerance"] == 0.05


@pytest.mark.slow
def test_plan_on_paper(config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No rank is started; it writes a page, too."""
    (tmp_path / "lengths.txt").write_text("512 # tokens\n8192")
    few = ["--levers", "none", "--lengths", str(tmp_path / "lengths.txt"), "--layers", "1"]
    few += ["--gpus", "16", "--device", "a100-40gb", "--out", str(tmp_path / "plans")]
    found, err = ask(capsys, "plan", "--model", config, *few)
    for part in ("16 x a100-40gb", "2 nodes", "8,192", "longest trainable length", "mixture"):
        assert part in err
    assert "has 6,000 positions (max_position_embeddings)" in err
    assert found["dtype"] == "bfloat16" and found["limit_bytes"] > 2**30
    assert [f["seq_len"] for f in found["forecasts"]["mixture"]] == [512, 8192]
    for forecast in found["forecasts"]["metp"]:
        assert forecast["fits"] and forecast["time_s"] > 0
        assert forecast["plan"]["strategies"] == ["metp"] * 2
        assert sum(part["num_bytes"] for part in forecast["held"]) == forecast["peak_bytes"]
    assert "dsp" in found["infeasible"] and found["longest"]["mixture"] >= 8192
    page = (tmp_path / "plans" / "plan.html").read_text()
    assert page.count('class="chart"') >= 4 and "megatron_ts" in page
    assert (tmp_path / "plans" / "plan.png").stat().st_size > 10_000


def test_doctor_with_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(doctor, "CHECKS", (doctor._compiler,))
    found, _ = ask(capsys, "doctor", code=1)
    assert found["ok"] is False and "apt-get install g++" in found["findings"][0]["problem"]


@pytest.mark.slow
def test_plan_of_ranks_here(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, err = ask(capsys, "plan", "--model", config, "--layers", "1", "--lengths", "64:128:2")
    assert [plan["workload"]["seq_len"] for plan in found["plans"]] == [64, 128]
    assert "batch 1 x 128 tokens" in err
    for plan in found["plans"]:
        assert plan["time_s"] > 0 and len(plan["plan"]["strategies"]) == 2


@pytest.mark.slow
def test_bench_and_profile(config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    few = ["--strategies", "metp", "--inner", "eager", "--lengths", "24,48", "--layers", "1"]
    found, _ = ask(capsys, "bench", *few, "--rounds", "1", "--hidden", "64", "--verbose")
    assert {(run["choice"], run["num_tokens"]) for run in found["runs"]} == {
        (choice, n) for choice in ("auto", "metp") for n in (24, 48)
    }
    assert all(run["time_s"] > 0 for run in found["runs"])
    out = str(tmp_path / "profile.jsonl")
    found, _ = ask(capsys, "profile", *few, "--repeats", "1", "--model", config, "--out", out)
    assert found["path"] == out and found["header"]["num_ranks"] == 2
    assert {m["seq_len"] for m in found["measurements"]} == {24, 48}


def test_values_without_a_form_of_their_own() -> None:
    value = {1: (math.inf, torch.float16), "parts": [Pair("weights", 3)]}
    assert as_json(value) == {
        "1": [None, "float16"],
        "parts": [{"what": "weights", "num_bytes": 3}],
    }
    with pytest.raises(TypeError, match="set has no form"):
        as_json({1})
