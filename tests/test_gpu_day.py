"""The first forty minutes with a GPU, rehearsed where there is none and nothing is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import venv
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
DAY = ROOT / "benchmarks" / "gpu_day.py"
GIVEN = ("torch", "triton", "transformers", "pytest")
"""What a machine with a GPU has in its own Python, with what these need."""


@pytest.fixture
def gpu_day(monkeypatch: pytest.MonkeyPatch) -> Any:
    from importlib import import_module

    monkeypatch.syspath_prepend(str(DAY.parent))
    return import_module("gpu_day")


def bare_python(folder: Path) -> Path:
    """A Python with ``GIVEN`` and what they require, and nothing else: this package is none."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    found, wanted = set[str](), list(GIVEN)
    while wanted:
        name = wanted.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another system or Python
            continue
        needs = [r for r in distribution.requires or () if "extra ==" not in r]
        wanted += [re.split(r"[^\w.-]", need)[0] for need in needs]
        tops = {Path(f).parts[0] for f in distribution.files or () if ".." not in Path(f).parts}
        for top in tops - {"__pycache__"}:
            here = Path(str(distribution.locate_file(top)))
            if here.exists() and not (site / top).exists():
                (site / top).symlink_to(here)
    return python


def run(python: Path | str, *options: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PARADYSE"))}
    return subprocess.run(
        [str(python), str(DAY), *options], capture_output=True, text=True, env=env, timeout=1500
    )


@pytest.mark.broad
@pytest.mark.timeout(1800)
def test_the_day_is_rehearsed_to_its_end_without_the_package_installed(tmp_path: Path) -> None:
    python, out = bare_python(tmp_path / "bare"), tmp_path / "out"
    for name in ("paradyse", "sklearn", "scipy", "accelerate"):
        code = f"import importlib.util as u; assert u.find_spec({name!r}) is None, {name!r}"
        assert subprocess.run([str(python), "-c", code], cwd=tmp_path).returncode == 0
    done = run(python, "--out", str(out), "--rehearse", "--minutes", "20")
    report = (out / "day.md").read_text()
    assert done.returncode == 0, done.stdout + report
    fates = json.loads((out / "rehearsal.json").read_text())
    assert all(fate.startswith("done") for fate in fates.values()), fates
    for title in (
        "# attention_gpu_check",
        "# tile_sweep",
        "# verified",
        "# one_device",
        "# longest",
    ):
        assert title in report, title
    assert "Not complete" not in report and "missed" not in report
    assert (out / "tiles.json").exists()
    again = run(python, "--out", str(out), "--rehearse")
    assert again.returncode == 0 and f"{out}/day.md" in again.stdout.splitlines()[-1]
    assert len(again.stdout.splitlines()) == 1, "nothing is run twice"


def part(gpu_day: Any, code: str, name: str = "a", minutes: float = 1.0) -> Any:
    return gpu_day.Part(name, ["-c", code], minutes)


@pytest.mark.broad
def test_what_was_measured_stays_when_a_part_is_ended(gpu_day: Any, tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; "
    child += "time.sleep(60)']); "
    measured = f"import pathlib, time; p = pathlib.Path({str(tmp_path / 'a')!r}); p.mkdir(); "
    measured += "(p / 'x.md').write_text('# a table'); print('so far'); time.sleep(60)"
    day = gpu_day.Day(tmp_path, 1.0)
    parts = [part(gpu_day, child + measured, "a", 0.1), part(gpu_day, "print(1)", "b")]
    begin = time.monotonic()
    for p in parts:
        day.run(p)
        day.write(parts)
    assert time.monotonic() - begin < 30
    assert day.fates["a"].startswith("ended") and day.fates["b"].startswith("done")
    text = (tmp_path / "day.md").read_text()
    assert "# a table" in text and "so far" in text and "- b: done" in text


@pytest.mark.broad
def test_a_day_that_is_told_to_end_ends_its_part(tmp_path: Path) -> None:
    command = [sys.executable, str(DAY), "--rehearse", "--only", "tests", "--out", str(tmp_path)]
    day = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{day.pid}/task/{day.pid}/children")
    end = time.monotonic() + 60
    while not (ids := children.read_text().split()) and time.monotonic() < end:
        time.sleep(0.1)
    day.terminate()
    told = day.communicate(timeout=60)[1]
    assert day.returncode == 1 and "ended by SIGTERM" in told
    assert len(ids) == 1 and not Path(f"/proc/{ids[0]}").exists()


def test_what_is_done_is_passed_over_and_what_failed_runs_again(
    gpu_day: Any, tmp_path: Path
) -> None:
    note = f"open({str(tmp_path / 'ran')!r}, 'a').write"
    parts = [part(gpu_day, f"{note}('a')"), part(gpu_day, f"{note}('b'); 1 / 0", "b")]
    for _ in range(2):
        day = gpu_day.Day(tmp_path, 1.0)
        for p in parts:
            day.run(p)
        day.write(parts)
    assert (tmp_path / "ran").read_text() == "abb"
    text = (tmp_path / "day.md").read_text()
    assert "- b: failed, exit status 1" in text and "ZeroDivisionError" in text


def test_no_part_begins_after_the_minutes(gpu_day: Any, tmp_path: Path) -> None:
    day = gpu_day.Day(tmp_path, 0.0)
    day.run(part(gpu_day, "print(1)"))
    day.write([part(gpu_day, "")])
    assert "- a: not run" in (tmp_path / "day.md").read_text()


def test_parts_find_the_backend_and_the_tables_of_parts_before(
    gpu_day: Any, tmp_path: Path
) -> None:
    day = gpu_day.Day(tmp_path, 1.0)
    (tmp_path / "tiles.json").write_text("{}")
    code = "import importlib.metadata as m, os; (p,) = {e for e in m.entry_points(group="
    code += "'torch_dynamo_backends', name='paradyse')}; print(p.value, os.environ.get("
    code += "'PARADYSE_TILES'), os.environ.get('PARADYSE_KERNELS'))"
    env = day.environment(part(gpu_day, code))
    told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert told.stdout.split() == ["paradyse.backend:paradyse", f"{tmp_path}/tiles.json", "None"]


def test_tests_of_the_gpu_are_found_by_their_marks(gpu_day: Any) -> None:
    files = gpu_day.gpu_tests()
    assert "tests/kernels/test_flash_attention.py" in files
    assert "tests/weights/test_host_shards.py" in files
    assert "tests/test_imports.py" not in files


@pytest.mark.skipif(torch.cuda.is_available(), reason="the day would begin")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run(sys.executable, "--out", str(tmp_path / "out"))
    assert done.returncode and "no CUDA device; --rehearse runs" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_part_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = run(sys.executable, "--out", str(tmp_path), "--only", "tile")
    assert done.returncode and "--only tile: no such part; there are right, tests" in done.stderr
