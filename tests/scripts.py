"""What the scripts of this folder share that run longer than tests do: options and the report.

The report is that of the benchmarks.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
BENCHMARKS = TESTS.parent / "benchmarks"

sys.path.append(str(BENCHMARKS))
Report: Any = import_module("runner").Report


def options_of(doc: str | None) -> argparse.ArgumentParser:
    """The options of a script with the docstring ``doc``: those that all scripts have."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the report there, too")
    return parser
