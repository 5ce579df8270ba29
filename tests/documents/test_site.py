"""The site of the documents: it builds without a warning, and quotes what there is."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from blocks import ROOT

import paradyse


def hooks() -> Any:
    """docs/site_hooks.py as a module."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_root_hold_on_the_site() -> None:
    linked = hooks().linked
    text = "[a](docs/memory.md#x) [b](CONTRIBUTING.md) [c](examples/trainer.py) [d](#data)"
    want = "[a](memory.md#x) [b](contributing.md) c (`examples/trainer.py`) [d](#data)"
    assert linked(text, ROOT) == want
    assert linked("[e](../docs/seeded_faults.md)", ROOT / "tests") == "[e](seeded_faults.md)"
    page = "[f](../README.md#options) [g](memory.md) [h](index.md)"
    want = "[f](index.md#options) [g](memory.md) [h](index.md)"
    assert linked(page, ROOT / "docs") == want


PYTORCHS = ("_apply(): Couldn't swap",)
"""Messages of PyTorch's that the table explains too."""

TO_CATCH = (
    "distributed.failures.RanksDisagreeError",
    "distributed.failures.RankFailedError",
    "distributed.failures.OutOfMemoryError",
    "distributed.collectives.CollectiveError",
)
"""Errors that a loop may catch, in the reference beside the public names."""

GIVEN = (
    "checkpoint.save.Checkpoint",
    "mixed.batches.MixedStep",
    "planning.explain.BlockReport",
    "planning.explain.StrategyRow",
    "planning.profile_file.Profile",
    "profiling.measure.Progress",
    "verification.VerifyRow",
)
"""What public functions give, there as well."""


def test_messages_are_quoted_as_they_are() -> None:
    """Each begins a row of the table, and stands in some source, be it over several lines."""
    document = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `(.+?)` \|", document, re.MULTILINE)
    assert len(quoted) >= 15
    folders = (ROOT / "paradyse", ROOT / "passes")
    sources = (f.read_text() for folder in folders for f in folder.rglob("*.py"))
    said = "\n".join(re.sub(r"\"\s*\n\s*f?\"", "", source) for source in sources)
    assert [q for q in quoted if q not in said and q not in PYTORCHS] == []


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(
        r"^::: ([\w.]+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE
    )
    public = {f"{module}.{name}" for name, module in paradyse._API.items()}
    assert {*named} == public | {f"paradyse.{name}" for name in (*TO_CATCH, *GIVEN)}
    assert all(pkgutil.resolve_name(name) for name in named)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason="pip install 'paradyse[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "reference.html").read_text()
    for name in ("AcceleratorMixin", "on_step", "gradient_accumulation_steps"):
        assert name in reference
    assert "strategy of every block at run time" in (tmp_path / "index.html").read_text()
