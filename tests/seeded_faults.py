"""Faults sown into a copy of the source, one at a time: CI must catch each.

    python tests/seeded_faults.py [--only NAME ...] [--out docs/seeded_faults.md]
    python tests/seeded_faults.py --check      each text to replace is found exactly once

The table is ``fault_table.py``, with what it imports.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fault import Fault
from fault_table import FAULTS

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 1800
NONE_SELECTED = 5
"""pytest's exit code."""


def misplaced(faults: Sequence[Fault] = FAULTS, root: Path = ROOT) -> list[str]:
    """Faults whose text is not in their file exactly once, or whose tests are not there."""
    found = []
    for fault in faults:
        path = root / fault.file
        count = path.read_text().count(fault.old) if path.exists() else 0
        if count != 1:
            found.append(f"{fault.name}: {fault.file} has the text {count} times")
        for test in fault.tests:
            file, _, name = test.partition("::")
            function = name.partition("[")[0]
            if not (root / file).exists():
                found.append(f"{fault.name}: no file {file}")
            elif function and f"def {function}(" not in (root / file).read_text():
                found.append(f"{fault.name}: no test {function} in {file}")
    names = [fault.name for fault in faults]
    return found + [
        f"{n}: twice in the table" for n in sorted({n for n in names if names.count(n) > 1})
    ]


def run_tests(folder: Path, tests: Sequence[str], marks: str = "not slow") -> tuple[int, str]:
    """pytest's exit code, and its first failure, in a copy of the tree; of tests that are all slow
    these."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-m",
        marks,
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command, *tests], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip
    if done.returncode == NONE_SELECTED and marks:
        return run_tests(folder, tests, "")
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return done.returncode, failed[1] if failed else (done.stdout + done.stderr)[-2000:]


def sow(fault: Fault | None, tests: Sequence[str]) -> tuple[int, str]:
    """``run_tests`` in a fresh copy with ``fault`` in it."""
    with tempfile.TemporaryDirectory(prefix="fault-") as name:
        folder = Path(name)
        left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
        shutil.copytree(ROOT, folder, ignore=left_out, dirs_exist_ok=True)
        if fault is not None:
            path = folder / fault.file
            path.write_text(path.read_text().replace(fault.old, fault.new))
        code = "import paradyse.passes as p; print(*p.__path__)"
        environment = {**os.environ, "PYTHONPATH": name}
        where = subprocess.run(
            [sys.executable, "-c", code], cwd=name, env=environment, capture_output=True, text=True
        )
        assert str(folder) in where.stdout, f"the copy is not what is imported: {where}"
        return run_tests(folder, tests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="faults whose name begins so")
    parser.add_argument("--check", action="store_true", help="sow nothing")
    parser.add_argument("--out", type=Path, help="write the results there as a table")
    args = parser.parse_args()
    if wrong := misplaced():
        print("\n".join(wrong))
        return 1
    if args.check:
        return 0
    chosen = [f for f in FAULTS if args.only is None or f.name.startswith(tuple(args.only))]
    rows, missed = [], 0
    for fault in chosen:
        code, by = sow(fault, fault.tests)
        caught = f"`{by}`" if code == 1 else "**not caught**" if code == 0 else f"broken: {by}"
        missed += code != 1
        rows.append(f"| {fault.name} | `{fault.file}` | {caught} |")
        print(rows[-1], flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults caught")
    if args.out:
        by = "Written by `python tests/seeded_faults.py --out docs/seeded_faults.md`."
        lines = [
            f"# Seeded faults\n\n{by}\n",
            "| fault | where | caught by |",
            "|---|---|---|",
            *rows,
        ]
        args.out.write_text("\n".join(lines) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
