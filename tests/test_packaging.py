"""The package installs whole, under its own names, and is found without being imported."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"paradyse": "paradyse", "passes": "paradyse.passes", "kernels": "paradyse.kernels"}
"""Top-level folders that install, and the package that each becomes."""


def python(code: str, cwd: Path, **env: str) -> str:
    """What a fresh Python prints for ``code``."""
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", code],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def packages_on_disk() -> dict[str, str]:
    """Package name -> folder, of every folder with Python in it."""
    found = {}
    for top, package in FOLDERS.items():
        for file in (ROOT / top).rglob("*.py"):
            folder = file.parent.relative_to(ROOT)
            found[".".join([package, *folder.parts[1:]])] = folder.as_posix()
    return found


def modules_on_disk() -> list[str]:
    return sorted(
        f"{package}.{file.stem}"
        for package, folder in packages_on_disk().items()
        for file in (ROOT / folder).glob("*.py")
        if file.stem != "__init__"
    )


def test_pyproject_lists_the_packages_on_disk() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed = {
        package: setuptools["package-dir"].get(package, package.replace(".", "/"))
        for package in setuptools["packages"]
    }
    assert listed == packages_on_disk()


def test_passes_and_kernels_are_flat_and_have_no_init() -> None:
    # A kernels/__init__.py would be what transformers finds when it probes for "kernels".
    for folder in ("passes", "kernels"):
        assert not list((ROOT / folder).rglob("__init__.py"))
        assert not list((ROOT / folder).glob("*/*.py"))


MIRRORED = ("passes", "paradyse/graph", "paradyse/runtime", "paradyse/distributed")
"""Folders of which every module has a test file of its name."""


@pytest.mark.parametrize("folder", MIRRORED)
def test_every_module_has_its_test_file(folder: str) -> None:
    tests = ROOT / "tests" / Path(folder).name
    modules = {f.stem for f in (ROOT / folder).glob("*.py")} - {"__init__"}
    missing = [m for m in sorted(modules) if not (tests / f"test_{m}.py").exists()]
    assert not missing, f"{tests.relative_to(ROOT)} has no test_*.py for {missing}"


def test_transformers_imports_inside_the_checkout() -> None:
    code = "from transformers.models.llama import modeling_llama as m; print(m.LlamaModel.__name__)"
    assert python(code, ROOT) == "LlamaModel"


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_subpackages_import_inside_and_outside_the_checkout(inside: bool, tmp_path: Path) -> None:
    code = "import paradyse.passes as p, paradyse.kernels as k; print(*p.__path__, *k.__path__)"
    assert python(code, ROOT if inside else tmp_path).split() == [
        str(ROOT / "passes"),
        str(ROOT / "kernels"),
    ]


def test_dynamo_lists_the_backend_without_importing_it(tmp_path: Path) -> None:
    code = (
        "import sys, torch._dynamo as d\n"
        "print('paradyse' in d.list_backends(exclude_tags=()), 'paradyse' in sys.modules)"
    )
    assert python(code, tmp_path) == "True False"


def test_a_wheel_holds_every_module_and_imports_from_there(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves folders behind, and would pick up stale ones
    source.mkdir()
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    done = subprocess.run(
        [*pip, "-w", str(tmp_path), str(source)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert (site / "paradyse" / "py.typed").exists()
    held = {".".join(f.relative_to(site).with_suffix("").parts) for f in site.rglob("*.py")}
    assert {m for m in held if not m.endswith(".__init__")} == set(modules_on_disk())
    # Found one by one, and not run: what the modules need is no matter of packaging.
    code = (
        "from importlib.util import find_spec\n"
        f"for name in {modules_on_disk()}:\n"
        "    print(find_spec(name).origin)"
    )
    origins = python(code, tmp_path, PYTHONPATH=str(site)).splitlines()
    assert len(origins) == len(modules_on_disk())
    assert all(Path(origin).is_relative_to(site) for origin in origins), origins


def test_the_version_is_the_one_installed() -> None:
    from importlib.metadata import version

    import paradyse

    assert version("paradyse") == paradyse.__version__


def test_checkers_and_dir_know_the_public_names() -> None:
    import paradyse

    source = ast.parse((ROOT / "paradyse" / "__init__.py").read_text())
    (block,) = [
        n for n in source.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
    ]
    typed = {
        (name.asname, node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert typed == {*paradyse._API.items()}
    assert {*paradyse.__all__} <= {*dir(paradyse)}


def test_python_m_is_the_command(tmp_path: Path) -> None:
    assert "usage: paradyse" in python(
        "import runpy, sys; sys.argv = ['paradyse', '--help']\n"
        "try: runpy.run_module('paradyse', run_name='__main__')\n"
        "except SystemExit as e: assert e.code == 0",
        tmp_path,
    )


USERS_SCRIPT = Path(__file__).with_name("users_script.py")


def test_the_users_script_has_every_public_name() -> None:
    import paradyse

    tree = ast.parse(USERS_SCRIPT.read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "paradyse"
    }
    assert {*paradyse.__all__} == used


@pytest.mark.slow
def test_a_users_script_is_checked_strictly(tmp_path: Path) -> None:
    """Against the package as it installs, which mypy finds through links."""
    package = tmp_path / "typed" / "paradyse"
    package.mkdir(parents=True)
    for entry in [*(ROOT / "paradyse").iterdir(), ROOT / "passes", ROOT / "kernels"]:
        (package / entry.name).symlink_to(entry)
    script = USERS_SCRIPT.read_text()
    wrong = script.replace("seq_len=512", "seq_len=512.5")
    (tmp_path / "typed" / "script.py").write_text(script)
    (tmp_path / "typed" / "wrong.py").write_text(wrong)

    def check(name: str) -> str:
        command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", name]
        done = subprocess.run(
            [*command, "--cache-dir", str(tmp_path / "cache")],
            cwd=tmp_path / "typed",
            capture_output=True,
            text=True,
            timeout=400,
        )
        return done.stdout + done.stderr

    assert "Success" in check("script.py")
    assert 'has incompatible type "float"; expected "int"' in check("wrong.py")
