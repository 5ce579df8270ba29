"""``paradyse plan`` of a model that a Python file makes: on paper, with several dims of tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paradyse.cli.main import main
from paradyse.cli.models import read_script

MODEL = Path(__file__).resolve().parents[1] / "space_time.py"

SCRIPT = f"""
import runpy

import torch

module = runpy.run_path({str(MODEL)!r})


def make_model():
    return module["SpaceTime"](layers=2)


def make_batch():
    return {{"x": torch.zeros(1, 16, 24, 3), "labels": torch.zeros(1, 16, 24, dtype=torch.int64)}}
"""

LATE = """
import torch

from helper_of_a_file import width


def make_model():
    return torch.nn.Linear(width, width)


def make_batch():
    import late_of_a_file

    return late_of_a_file.x
"""


def told(capsys: Any, *argv: str) -> tuple[int, str, str]:
    code = main(["plan", *argv])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.slow
def test_time_is_planned_beside_space(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "video.py").write_text(SCRIPT)
    few = ["--gpus", "4", "--lengths", "4096,8192", "--levers", "none", "--batch", "2", "--json"]
    code, out, err = told(capsys, "--model", str(tmp_path / "video.py"), *few)
    assert code == 0, err
    assert "video.py: " in err and "24 tokens beside each" in err
    found = json.loads(out)
    assert found["infeasible"].keys() == {"metp"}  # attention over space sends nothing
    mixture = found["forecasts"]["mixture"]
    assert [f["seq_len"] for f in mixture] == [4096, 8192]
    assert all(len(f["plan"]["strategies"]) == 6 for f in mixture)
    short, long = (f["peak_bytes"] for f in found["forecasts"]["dsp"])
    held = 2 * 24 * 4096 // 4 * 16 * 2  # bytes of a value of the stream, on a rank
    assert 8 * held < long - short < 80 * held


@pytest.mark.parametrize(
    ("text", "flags", "problem"),
    [
        (SCRIPT, [], "a Python file is planned on paper, and as it is: give --gpus"),
        (SCRIPT, ["--gpus", "2", "--layers", "1"], "leave --lengths-from and --layers out"),
        ("x = 1", ["--gpus", "2"], "no function make_model and no make_batch; make_model()"),
        ("1 / 0", ["--gpus", "2"], "cannot be run: ZeroDivisionError"),
        ("raise SystemExit(0)", ["--gpus", "2"], "SystemExit: 0; call sys.exit under if __name__"),
        (
            f"{SCRIPT}import sys\nmake_model = sys.exit",
            ["--gpus", "2"],
            "make_model() fails: SystemExit; call sys.exit",
        ),
        (
            f"{SCRIPT}make_model = lambda: 1 / 0",
            ["--gpus", "2"],
            "make_model() fails: ZeroDivision",
        ),
        (f"{SCRIPT}make_model = int", ["--gpus", "2"], "to give a torch.nn.Module, and gives 0"),
        (f"{SCRIPT}make_batch = lambda n: n", ["--gpus", "2"], "make_batch() fails: TypeError"),
        (f"{SCRIPT}make_batch = list", ["--gpus", "2"], "to give a dict"),
        (
            f"{SCRIPT}make_batch = lambda: {{'y': 1}}",
            ["--gpus", "2"],
            "cannot be called with y: Ty",
        ),
        (
            f"{SCRIPT}def fail(self, *args, **kwargs):\n    raise KeyError('depth')\n"
            "old = make_model\n"
            "def make_model():\n    m = old()\n    type(m).forward = fail\n    return m\n",
            ["--gpus", "2"],
            "cannot be called with x, labels: KeyError(",
        ),
        (None, ["--gpus", "2"], "give a HuggingFace config.json, or a Python file"),
    ],
)
def test_what_cannot_be_planned_is_told_in_a_line(
    text: str | None, flags: list[str], problem: str, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "video.py"
    if text is not None:
        path.write_text(text)
    code, out, err = told(capsys, "--model", str(path), *flags)
    assert code == 2 and problem in err and len(err.splitlines()) == 1 and not out


def test_a_file_imports_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helper_of_a_file.py").write_text("from other_of_a_file import width")
    (tmp_path / "other_of_a_file.py").write_text("width = 3")
    (tmp_path / "late_of_a_file.py").write_text("x = {'x': 1}")
    (tmp_path / "model.py").write_text(LATE)
    monkeypatch.chdir(tmp_path.parent)
    before = [*sys.path]
    make_model, make_batch = read_script(f"{tmp_path.name}/model.py")
    assert make_model().weight.shape == (3, 3) and make_batch() == {"x": 1}
    assert sys.path == before
