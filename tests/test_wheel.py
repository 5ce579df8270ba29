"""The package as people get it: an sdist, the wheel that is built of it, and a fresh environment.

That environment has the wheel and, of what is installed here, what the wheel's own metadata asks
for: links to it, since torch alone is a gigabyte.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = ignore_patterns(
    ".git", ".venv*", ".*_cache", "__pycache__", "build", "dist", "*.egg-info", "results"
)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
CONFIG = {"model_type": "llama", "num_attention_heads": 4, **SIZES}

STEP = """
import copy, os
import torch
import torch.distributed as dist

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = torch.nn.LayerNorm(32), torch.nn.Linear(32, 96)
        self.out = torch.nn.Linear(32, 32)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind()
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, s, 32))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block = torch.nn.Embedding(64, 32), Block()
        self.head = torch.nn.Linear(32, 64)

    def forward(self, ids):
        logits = self.head(self.block(self.embed(ids)))
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

dist.init_process_group("gloo")
torch.manual_seed(0)
plain, ids = Model(), torch.randint(64, (2, 13))
model = copy.deepcopy(plain)
loss = torch.compile(model, backend="paradyse")(ids)
loss.backward()
plain(ids).backward()
import paradyse
assert "site-packages" in paradyse.__file__, paradyse.__file__
for mine, theirs in zip(model.parameters(), plain.parameters()):
    torch.testing.assert_close(mine.grad, theirs.grad)
print(f"rank {dist.get_rank()} exact\\n", end="")  # in one write: ranks share the pipe
dist.destroy_process_group()
"""


def start(command: Sequence[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PARADYSE"))}
    return subprocess.run(
        command,
        cwd=folder,
        env={**clean, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=500,
    )


def needed(wanted: Sequence[str]) -> set[str]:
    """Names of the distributions that ``wanted`` (requirements) ask for, of what is here."""
    found: set[str] = set()
    queue = [Requirement(text) for text in wanted]
    done: set[tuple[str, str]] = set()
    while queue:
        one = queue.pop()
        for extra in ("", *one.extras):
            name = re.sub(r"[-_.]+", "-", one.name).lower()
            if (name, extra) in done:
                continue
            done.add((name, extra))
            try:
                asked = distribution(name).requires or []
            except PackageNotFoundError:
                continue  # of another platform, or left out here
            found.add(name)
            for text in asked:
                more = Requirement(text)
                if more.marker is None or more.marker.evaluate({"extra": extra}):
                    queue.append(more)
    return found - {"paradyse"}


def links_to(names: set[str], folder: Path) -> Path:
    """A folder with links to all that distributions of these ``names`` have installed here."""
    folder.mkdir()
    for name in names:
        held = distribution(name)
        for top in {f.parts[0] for f in held.files or ()} - {"..", "__pycache__"}:
            there, link = Path(str(held.locate_file(top))), folder / top
            if there.exists() and not link.exists():
                link.symlink_to(there)
    return folder


@dataclass(frozen=True)
class Fresh:
    """An environment with the wheel alone."""

    python: Path
    sdist: Path
    """Unpacked."""
    core: Path
    """Links to what the wheel needs; ``full`` to what its extras do, too, and to pytest."""
    full: Path

    def run(self, *words: str, folder: Path, full: bool = True) -> subprocess.CompletedProcess[str]:
        """A command of the environment, in ``folder``."""
        command = [str(self.python.parent / words[0]), *words[1:]]
        return start(command, folder, PYTHONPATH=str(self.full if full else self.core))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    folder = tmp_path_factory.mktemp("fresh")
    source = folder / "source"
    copytree(ROOT, source, ignore=LEFT_OUT)
    build = f"import setuptools.build_meta as b; b.build_sdist({str(folder)!r})"
    done = start([sys.executable, "-c", build], source)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as held:
        held.extractall(folder, filter="data")
    sdist = folder / archive.name.removesuffix(".tar.gz")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel = [
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(folder),
        str(sdist),
    ]
    done = start(wheel, folder)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    done = start([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], folder)
    assert done.returncode == 0, done.stderr
    python = folder / "venv" / "bin" / "python"
    install = [*pip, "--python", str(python), "install", "--no-deps", "--no-index", "-q", str(made)]
    done = start(install, folder)
    assert done.returncode == 0, done.stderr
    core = needed(["paradyse"])
    assert not core & {"transformers", "altair", "accelerate", "safetensors", "matplotlib"}
    full = needed(["paradyse[hf,plot,dev]"])
    return Fresh(python, sdist, links_to(core, folder / "core"), links_to(full, folder / "full"))


def test_help_and_doctor(fresh: Fresh, tmp_path: Path) -> None:
    """Of the wheel and what it needs, without an extra."""
    done = fresh.run("paradyse", "--help", folder=tmp_path, full=False)
    assert done.returncode == 0 and "usage: paradyse" in done.stdout, done.stderr
    done = fresh.run("paradyse", "doctor", folder=tmp_path, full=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("transformers", "safetensors", "altair"):
        assert re.search(rf"advice +{name} +not installed", done.stdout), done.stdout
    assert "pip install 'paradyse[hf]'" in done.stdout and "The backend can run" in done.stdout


def test_a_training_step(fresh: Fresh, tmp_path: Path) -> None:
    """On two ranks, of the wheel and what it needs: the gradients of one process."""
    (tmp_path / "step.py").write_text(STEP)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "step.py"]
    done = fresh.run("python", *launch, folder=tmp_path, full=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "rank 0 exact" in done.stdout and "rank 1 exact" in done.stdout


def plan(fresh: Fresh, folder: Path, full: bool) -> subprocess.CompletedProcess[str]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    few = ["--model", "config.json", "--gpus", "2", "--lengths", "512", "--out", "plans"]
    few += ["--levers", "none"]
    return fresh.run("paradyse", "plan", *few, folder=folder, full=full)


def test_a_plan_with_all_extras(fresh: Fresh, tmp_path: Path) -> None:
    done = plan(fresh, tmp_path, full=True)
    assert done.returncode == 0, done.stderr
    assert "longest trainable length" in done.stdout
    assert {p.name for p in (tmp_path / "plans").iterdir()} == {"plan.html", "plan.png"}


def test_a_plan_without_what_draws_charts(fresh: Fresh, tmp_path: Path) -> None:
    for name in ("altair", "vl_convert"):
        assert (fresh.full / name).exists()
        (fresh.full / name).rename(fresh.full / f"no_{name}")
    try:
        done = plan(fresh, tmp_path, full=True)
    finally:
        for name in ("altair", "vl_convert"):
            (fresh.full / f"no_{name}").rename(fresh.full / name)
    assert done.returncode == 0, done.stderr
    assert "pip install 'paradyse[plot]'" in done.stdout
    assert "longest trainable length" in (tmp_path / "plans" / "plan.html").read_text()


def test_safetensors_are_asked_for_where_files_are_read(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"none")
    code = "import torch, paradyse; paradyse.load_safetensors(torch.nn.Linear(2, 2), '.')"
    done = fresh.run("python", "-c", code, folder=tmp_path, full=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "safetensors" in last and "pip install" in last, done.stderr


@pytest.mark.parametrize("verb", ["plan --model config.json", "verify --model config.json", "demo"])
def test_commands_without_transformers(verb: str, fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = fresh.run("paradyse", *verb.split(), folder=tmp_path, full=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "transformers is not installed" in done.stderr and "pip install" in done.stderr
    assert "Traceback" not in done.stderr


SAMPLE = (
    "tests/test_imports.py",
    "tests/test_docstrings.py",
    "tests/test_seeded_faults.py",
    "tests/cli/test_pages.py",
    "tests/graph/test_factors.py",
    "tests/documents/test_site.py",
    "tests/weights/test_layout.py",
)


def test_the_tests_of_the_sdist_run(fresh: Fresh) -> None:
    """A sample of them, against the sources that lie beside them."""
    quick = ["-q", "-p", "no:cacheprovider", "-m", "not slow", *SAMPLE]
    done = fresh.run("python", "-m", "pytest", *quick, folder=fresh.sdist)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    for name in ("Makefile", "mkdocs.yml", "CHANGELOG.md", "constraints-oldest.txt"):
        assert (fresh.sdist / name).is_file(), name
