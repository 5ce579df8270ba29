"""The examples, started as their first lines say: two ranks have the losses of one process."""

from __future__ import annotations

import json
import os
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_trainer import EXACT

from paradyse.mixed.ways import Way
from paradyse.mixed.ways_file import write_ways

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
LONGEST = 301
"""Divides by no number of ranks; some files are shorter."""
SCRIPTS = (
    "plain_loop",
    "fine_tune",
    "grpo_loop",
    "trainer",
    "accelerate_loop",
    "fabric_loop",
    "lora",
    "sft",
    "dpo",
)
MIXED = ("mixed_loop", "mixed_trainer")
NEEDS = {"lora": "peft", "accelerate_loop": "accelerate", "fabric_loop": "lightning_fabric"}
NEEDS |= {"sft": "trl", "dpo": "trl"}
FIXED = ("--plan", "ulysses_z")
"""Two starts of auto may plan, and round, differently."""

Rows = list[dict[str, float]]


def start(command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> str:
    """What ``command`` prints, which must succeed."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def options(out: Path, steps: int = 4) -> list[str]:
    given = ["--out", str(out), "--longest", str(LONGEST), "--steps", str(steps)]
    return [*given, "--inner", "eager"]


def torchrun(num: int) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launch, "--nproc-per-node", str(num)]


def losses(out: Path) -> Rows:
    rows: Rows = json.loads((out / "losses.json").read_text())
    return rows


def same(got: Rows, want: Rows) -> None:
    assert len(got) == len(want) >= 4
    for mine, theirs in zip(got, want, strict=True):
        assert mine == pytest.approx(theirs, rel=EXACT)


def test_files_come_again_behind_the_last_one(tmp_path: Path) -> None:
    """However many steps are asked for, there is a document for each."""
    for name in "abc":
        (tmp_path / f"{name}.py").write_text(name)
    found = runpy.run_path(str(EXAMPLES / "common.py"))["Documents"](tmp_path, 1, 6, 8)
    letters = "".join(chr(found[i]["input_ids"].item()) for i in range(len(found)))
    assert letters == "bcabca"


MANY = 47
"""Steps of two sequences each, whose files are too few for so many."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain_loop", "fine_tune", "accelerate_loop", "fabric_loop"])
def test_there_are_as_many_steps_as_asked(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    given = ["--out", "out", "--longest", "16", "--steps", str(MANY), "--inner", "eager"]
    start([sys.executable, str(EXAMPLES / f"{name}.py"), *given, "--batch", "4"], tmp_path)
    steps = [row["step"] for row in losses(tmp_path / "out") if "loss" in row]
    assert steps == list(range(1, MANY + 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_two_ranks_have_the_losses_of_one_process(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    script, one, two = str(EXAMPLES / f"{name}.py"), tmp_path / "one", tmp_path / "two"
    start([sys.executable, script, *options(one)], tmp_path)
    nothing_whole = {"PARADYSE_OPTIONS": "on_unsupported=error"}
    start([*torchrun(2), script, *options(two), *FIXED], tmp_path, nothing_whole)
    same(losses(two), losses(one))
    assert len({row.get("loss") for row in losses(one)}) > 2  # it does train


def text_of(folder: Path) -> Path:
    """A folder with one long file and some short ones."""
    folder.mkdir()
    for i, length in enumerate((290, 60, 45, 30, 21)):
        (folder / f"{i}.txt").write_bytes(bytes(range(32, 127)) * 4)
        os.truncate(folder / f"{i}.txt", length)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["sharded", "replicated"])
@pytest.mark.parametrize("name", MIXED)
def test_groups_of_two_ranks_have_the_losses_of_one_process(
    name: str, weights: str, tmp_path: Path
) -> None:
    """By ways that put the long file on both ranks and the short ones on one each."""
    script, one, two = str(EXAMPLES / f"{name}.py"), tmp_path / "one", tmp_path / "two"
    text = text_of(tmp_path / "text")
    given = [Way(1, 1e-4, 600, (600,), (1.0,)), Way(2, 1e-4, 600, (60, 600), (0.2, 0.5))]
    more = ["--text", str(text), "--tokens", "600"]
    for lie in ("sharded", "replicated"):
        write_ways(tmp_path / f"{lie}.json", given, lie)
    start([sys.executable, script, *options(one), *more, "--ways", "replicated.json"], tmp_path)
    more += ["--ways", f"{weights}.json"] + ["--whole"] * (weights == "replicated")
    start([*torchrun(2), script, *options(two), *more], tmp_path)
    same(losses(two), losses(one))


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
def test_ways_are_measured_where_none_are_given(name: str, tmp_path: Path) -> None:
    text, out = text_of(tmp_path / "text"), tmp_path / "out"
    script = str(EXAMPLES / f"{name}.py")
    more = ["--text", str(text), "--tokens", "600", "--repeats", "1"]
    said = start([*torchrun(2), script, *options(out), *more], tmp_path)
    assert name != "mixed_loop" or "one degree for all, predicted: 1:" in said
    assert len(losses(out)) == 4


@pytest.mark.slow
def test_the_cells_of_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in order, each showing its last expression, in a process of its own."""
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in cells), "outputs are of one machine"
    (tmp_path / "run.py").write_text(f"CELLS = {codes!r}\n{RUN_CELLS}")
    env = {"PYTHONPATH": str(EXAMPLES), "PARADYSE_OPTIONS": "inner=eager"}
    said = start([sys.executable, "run.py"], tmp_path, env)
    assert said.count("<pre") == 3, "explain, stats and verify"
    assert (tmp_path / "plans" / "plan.html").is_file() and "8 x a100-80gb" in said


RUN_CELLS = """
import ast

names = {"__name__": "__main__"}
for cell in CELLS:
    *body, last = ast.parse(cell).body
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        print(value._repr_html_() if hasattr(value, "_repr_html_") else value)
    else:
        exec(compile(ast.Module([last], []), "cell", "exec"), names)
"""


def slurm(job: Mapping[str, str], folder: Path) -> str:
    """What the Slurm script starts on each node of a ``job``, Slurm's commands being stand-ins."""
    commands = folder / "bin"
    commands.mkdir()
    for name, does in {
        "scontrol": "echo localhost; sleep 0.2; echo node8",
        "srun": 'echo "$@"; shift; exec "$@"',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }.items():
        (commands / name).write_text(f"#!/bin/bash\n{does}\n")
        (commands / name).chmod(0o755)
    env = {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", **job}
    return start(["bash", str(EXAMPLES / "slurm.sh"), "train.py", "--steps", "3"], folder, env)


def test_what_slurm_starts_is_a_torchrun_on_every_node(tmp_path: Path) -> None:
    """On one node, which is this machine: it runs."""
    # A file each: what two processes print to one pipe may be mingled within a line.
    (tmp_path / "train.py").write_text(
        "import os, sys\nopen('rank' + os.environ['RANK'], 'w').write(str(sys.argv[1:]))\n"
    )
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    job = {"SLURM_NNODES": "1", "SLURM_JOB_ID": "41", "SLURM_GPUS_ON_NODE": "2"}
    said = slurm({"SLURM_JOB_NODELIST": "node[7-8]", "MASTER_PORT": port, **job}, tmp_path)
    assert f"--rdzv-endpoint localhost:{port}" in said and "--nproc-per-node 2" in said
    assert sorted(f.name for f in tmp_path.glob("rank*")) == ["rank0", "rank1"]
    assert all((tmp_path / f"rank{i}").read_text() == "['--steps', '3']" for i in range(2))


def test_every_example_is_run_by_a_test() -> None:
    scripts = {f.stem for f in EXAMPLES.glob("*.py")} - {"common"}
    assert scripts == {*SCRIPTS, *MIXED}


WORKFLOWS = ROOT / "docs" / "workflows.md"


def rows() -> list[Any]:
    """Of the table of workflows: what is done, and what shows it."""
    lines = re.findall(r"^\| (.+?) \| `(.+?)` \|$", WORKFLOWS.read_text(), re.MULTILINE)
    return [pytest.param(what, shown, id=what) for what, shown in lines]


def test_there_are_thirty_workflows() -> None:
    assert len({row.values[0] for row in rows()}) >= 30


@pytest.mark.parametrize(("what", "shown"), rows())
def test_a_workflow_has_its_script_or_test(what: str, shown: str) -> None:
    path, _, test = shown.partition("::")
    assert (ROOT / path).is_file(), shown
    if test:
        assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.MULTILINE), shown
