"""Every block of code in the documents and in public docstrings runs as it is written, on ranks
where it speaks of them.

A new block fails here until something says how it is run: a scene (``scenes.py``) for Python, a
kind of command below, or, of graphs and formulas, where they come from.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import ROOT, Block, all_blocks, examples
from harness import RankPool
from help_scenes import HELP_SCENES
from models import FAMILIES
from scenes import SCENES as OF_DOCUMENTS
from scenes import Scene

import paradyse
from paradyse.offline.devices import read_cluster

BLOCKS = [*all_blocks(), *examples()]
SCENES = (*OF_DOCUMENTS, *HELP_SCENES)
PYTHON = [b for b in BLOCKS if b.language == "python"]
LINES = [b for b in BLOCKS if b.language not in ("python", "toml")]
CLUSTERS = [b for b in BLOCKS if b.language == "toml"]

ELSEWHERE = {
    "dist.init_process_group()\ntorch.manual_seed(0)": "tests/test_readme.py",
    "transformers.Trainer)": "tests/test_trainer.py",
    "trl.SFTTrainer)": "tests/test_trl.py",
    "def summed(x": "test_the_test_of_contributing_passes",
}
"""Text of a block of Python -> what runs it."""

FORMULAS = ("static + the most that is held", "seconds of a group =")
"""Indented blocks that are no code."""


def the_scene(block: Block) -> Scene | None:
    found = [s for s in SCENES if s.document == block.document and s.has in block.text]
    assert len(found) <= 1, block.at
    return found[0] if found else None


def test_every_block_of_python_is_run() -> None:
    for block in PYTHON:
        elsewhere = [has for has in ELSEWHERE if has in block.text]
        assert elsewhere or the_scene(block), f"{block.at}: nothing says how it is run"
    for scene in SCENES:
        found = [b.at for b in PYTHON if b.document == scene.document and scene.has in b.text]
        assert len(found) == 1, f"{scene.has!r} stands in {found}"


def run_block(number: int, text: str, folder: str) -> Any:
    """One rank. The pieces are compiled by the inner compiler that needs no time for it."""
    scene = SCENES[number]
    for written, here in scene.puts:
        assert written in text, written
        text = text.replace(written, here)
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARADYSE_OPTIONS", "inner=eager")
        names = scene.before()
        names["__name__"] = "__main__"
        exec(compile(text, f"{scene.document}: {scene.has}", "exec"), names)
        return scene.after(names)


def numbered() -> list[Any]:
    return [
        pytest.param(i, marks=pytest.mark.slow if s.slow else (), id=f"{s.document}: {s.has}")
        for i, s in enumerate(SCENES)
    ]


def test_every_public_name_has_an_example() -> None:
    """What runs it is a scene, as of each block."""
    found = {block.document for block in examples()}
    assert found == {f"help(paradyse.{name})" for name in paradyse.__all__ if name[0] != "_"}


@pytest.mark.broad(but="help(paradyse.replica_of)")
@pytest.mark.parametrize("number", numbered())
def test_a_block_of_python(number: int, ranks: Any, tmp_path: Path) -> None:
    scene = SCENES[number]
    (block,) = (b for b in PYTHON if b.document == scene.document and scene.has in b.text)
    if "init_process_group" in block.text:
        launched(scene.ranks, number, block.text, tmp_path)
    else:
        pool: RankPool = ranks(scene.ranks)
        pool.run(run_block, number, block.text, str(tmp_path), timeout_s=300)


def launched(num: int, number: int, text: str, folder: Path) -> None:
    """By torchrun, since the block makes its process group itself."""
    program = f"from test_blocks import run_block\nrun_block({number}, {text!r}, '.')\n"
    (folder / "train.py").write_text(program)
    paths = [ROOT / "tests" / "documents", ROOT / "tests"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run(
        [*command, str(num), "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-6000:]


def test_the_test_of_contributing_passes(pool3: RankPool, tmp_path: Path) -> None:
    """CONTRIBUTING's example of a test, by the fixture that it names."""
    (block,) = (b for b in PYTHON if "def summed(x" in b.text)
    assert "pool3: RankPool" in block.text
    names: dict[str, Any] = {"torch": torch, "dist": torch.distributed, "RankPool": RankPool}
    exec(block.text.split("def test_")[0], names)
    for total in pool3.run(run_summed, block.text, torch.ones(2)):
        assert total.tolist() == [3.0, 3.0]
    assert "assert total.tolist() == [3.0, 3.0]" in block.text


def run_summed(text: str, x: torch.Tensor) -> torch.Tensor:
    names: dict[str, Any] = {"torch": torch, "dist": torch.distributed, "RankPool": RankPool}
    exec("from __future__ import annotations\n" + text, names)
    return names["summed"](x)  # type: ignore[no-any-return]


# Commands


def kind_of(line: str) -> str:
    """What an indented line is: a word for the program that it calls, "graph" or "formula"."""
    words = line.split()
    if words[0] in ("make", "torchrun", "paradyse", "pip"):
        return words[0]
    if words[0].endswith("python") and words[1].startswith(("benchmarks/", "examples/")):
        return "script"
    return "other"


def commands() -> list[tuple[str, str]]:
    """Every command in the documents, and where it stands; lines that go on are one."""
    found = []
    for block in LINES:
        for line in block.text.replace("\\\n", " ").splitlines():
            if kind_of(line.strip() or "-") != "other":
                found.append((block.at, re.sub(r"\s+#.*", "", line).strip()))
    return found


def test_descriptions_of_clusters_are_read(tmp_path: Path) -> None:
    assert CLUSTERS
    for block in CLUSTERS:
        (tmp_path / "cluster.toml").write_text(block.text)
        assert read_cluster(str(tmp_path / "cluster.toml")).devices, block.at


def test_every_indented_block_is_of_a_kind_that_is_checked() -> None:
    for block in LINES:
        first = block.text.splitlines()[0]
        known = kind_of(first) != "other" or first.startswith(FORMULAS)
        assert known or block.document == "docs/architecture.md", f"{block.at}: {first}"


@pytest.mark.parametrize("line", sorted({c for _, c in commands() if c.startswith("make ")}))
def test_make_knows_its_targets(line: str) -> None:
    """They are not run: ``make test`` runs this."""
    done = subprocess.run(
        ["make", "-n", *shlex.split(line)[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize("line", sorted({c for _, c in commands() if c.startswith("torchrun ")}))
def test_torchrun_knows_its_flags(line: str) -> None:
    from torch.distributed.run import config_from_args, parse_args

    args = parse_args(shlex.split(line)[1:])
    config, _, _ = config_from_args(args)
    assert args.training_script.endswith(".py") and config.nproc_per_node >= 2


@pytest.mark.parametrize("line", sorted({c for _, c in commands() if "python " in c}))
def test_scripts_are_there(line: str) -> None:
    """Benchmarks and examples have tests of their own, which run them."""
    words = shlex.split(line)
    assert (ROOT / words[1]).is_file()


@pytest.mark.parametrize("line", sorted({c for _, c in commands() if c.startswith("pip ")}))
def test_pip_is_asked_for_extras_that_there_are(line: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = shlex.split(line)[2:]
    name, _, extras = asked.rstrip("]").partition("[")
    assert name in (".", project["name"])
    assert {*filter(None, extras.split(","))} <= {*project["optional-dependencies"]}


def config_of(layers: int) -> str:
    from transformers import LlamaConfig

    spec = {**FAMILIES["llama"].config, "num_hidden_layers": layers}
    return str(LlamaConfig(**spec, architectures=["LlamaForCausalLM"]).to_json_string())


PARADYSE = sorted({c for _, c in commands() if c.startswith("paradyse ")})


@pytest.mark.parametrize("line", PARADYSE)
def test_paradyse_knows_its_flags(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paradyse.cli.main import make_parser

    monkeypatch.chdir(tmp_path)
    assert make_parser().parse_args(shlex.split(line)[1:]).command == shlex.split(line)[1]


@pytest.mark.slow
@pytest.mark.parametrize("line", PARADYSE)
def test_a_command_of_ours(line: str, tmp_path: Path) -> None:
    """As it is written, of a small model; what may take longer than a test is named."""
    words = shlex.split(line)
    if words[1] == "profile" or "--lengths-from" in words:
        pytest.skip(f"its flags alone are checked, as it may take longer than a test: {line}")
    model = words[words.index("--model") + 1]
    (tmp_path / model).write_text(config_of(2))
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    if "--out" in words:
        out = tmp_path / words[words.index("--out") + 1]
        assert out.is_file() or any(out.iterdir())


# Graphs


def dumped(folder: str) -> None:
    from tiny import Tiny, tokens

    model = torch.compile(
        Tiny(layers=1), backend="paradyse", options={"dump": folder, "inner": "eager"}
    )
    ids = tokens(2, 7)
    model(ids, ids).backward()


@pytest.mark.slow
def test_the_graphs_of_the_architecture_are_dumps(pool2: RankPool, tmp_path: Path) -> None:
    """Line by line, of the model that the document names."""
    pool2.run(dumped, str(tmp_path), timeout_s=120)
    text = "\n".join(f.read_text() for f in tmp_path.rglob("*.txt"))
    lines = {" ".join(line.split()) for line in text.splitlines()}
    shown = [
        (b.at, " ".join(line.split()))
        for b in LINES
        if b.document == "docs/architecture.md"
        for line in b.text.splitlines()
    ]
    assert len(shown) > 15
    for at, line in shown:
        if line == "...":
            continue
        parts = [re.escape(part) for part in line.split("..")]
        pattern = re.compile(".*".join(parts))
        assert any(pattern.fullmatch(found) for found in lines), f"{at}: {line}"
