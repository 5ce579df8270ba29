"""What CONTRIBUTING's table says is enough: a strategy, a rule, a pass and a kernel are added to a
copy of the sources in the places that it names, and two ranks then run with them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paradyse.graph.factors import rule
from paradyse.graph.rules import elementwise
from paradyse.strategies import STRATEGIES, by_name
from paradyse.types import ATTENTION_STRATEGIES

ROOT = Path(__file__).resolve().parent.parent

NEW = {
    "kernels/toy_double.py": """
import torch


@torch.library.custom_op("toy::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_fake(lambda x: torch.empty_like(x))
double.register_autograd(lambda ctx, grad: grad * 2)
""",
    "paradyse/strategies/toy.py": """
from dataclasses import replace

from paradyse.strategies.local import MEGATRON_CZ

TOY = replace(MEGATRON_CZ, name="toy", same_as={})
""",
    "passes/count_adds.py": """
import torch


def count_adds(gm, ctx):
    return sum(n.target == torch.ops.aten.add.Tensor for n in gm.graph.nodes)
""",
}

RULE = """

from paradyse.kernels.toy_double import double as _double  # noqa: E402, F401


@rule(torch.ops.toy.double.default)
def double(names: Names, node: fx.Node) -> Any:
    return names.of(node.args[0])
"""

LINES = (
    ("paradyse/types.py", r"(\*ALONG_SEQUENCE, DSP)\)", r'\1, "toy")'),
    ("paradyse/strategies/__init__.py", r"(STRATEGIES = \([^)]*)\)", r"\1, TOY)"),
    (
        "paradyse/strategies/__init__.py",
        r"(STRATEGIES = )",
        r"from paradyse.strategies.toy import TOY\n\1",
    ),
    ("passes/pipeline.py", r"(\nPASSES[^\n]*\()", r"\1\n    count_adds,"),
    ("passes/pipeline.py", r"(\nlog = )", r"from paradyse.passes.count_adds import count_adds\n\1"),
)
"""File, what stands there, and with the new line in it."""

SCRIPT = """
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

rank, here = int(sys.argv[1]), Path(sys.argv[2])
sys.path[:0] = [str(here), sys.argv[3]]
import paradyse
from tiny import Tiny

assert Path(paradyse.__file__).is_relative_to(here), paradyse.__file__


class Output(NamedTuple):
    loss: torch.Tensor


class Doubled(Tiny):
    def extra(self, x):
        return torch.ops.toy.double(x)

    def forward(self, ids, labels):
        return Output(super().forward(ids, labels))


dist.init_process_group("gloo", init_method=f"file://{here}/group", rank=rank, world_size=2)
torch.manual_seed(0)
import paradyse.kernels.toy_double

model, ids = Doubled(layers=1).double(), torch.randint(50, (2, 11))
options = {"inner": "eager", "on_unsupported": "error", "dump": str(here / "dump")}
report = paradyse.verify(model, {"ids": ids, "labels": ids}, options)
row = {r.plan: r for r in report.rows}["toy"]
assert row.ok and not row.infeasible, report
compiled = torch.compile(model, backend="paradyse", options={**options, "plan": "toy"})
compiled(ids=ids, labels=ids)
print(paradyse.explain(compiled, 2, 4096))
"""


@pytest.mark.slow
def test_one_file_and_one_line_are_enough(tmp_path: Path) -> None:
    for folder in ("paradyse", "passes", "kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, text in NEW.items():
        (tmp_path / path).write_text(text)
    for path, old, new in LINES:
        text, n = re.subn(old, new, (tmp_path / path).read_text(), count=1)
        assert n == 1, f"{path} has no {old}"
        (tmp_path / path).write_text(text)
    with (tmp_path / "paradyse/graph/rules.py").open("a") as f:
        f.write(RULE)
    (tmp_path / "run.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "run.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path), str(ROOT / "tests")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": ""},
        )
        for rank in range(2)
    ]
    outputs = [p.communicate(timeout=300)[0] for p in ranks]
    assert [p.returncode for p in ranks] == [0, 0], "\n".join(outputs)
    assert re.search(r"^\W*toy\b", outputs[0], re.MULTILINE), outputs[0]
    assert list((tmp_path / "dump").rglob("*_count_adds.txt"))


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ValueError, match="has a rule already"):
        rule(torch.ops.aten.linear.default)(elementwise)
    with pytest.raises(ValueError, match="two strategies are called dsp"):
        by_name([*STRATEGIES, STRATEGIES[-1]], [*ATTENTION_STRATEGIES, "dsp"])


def test_strategies_are_those_that_plans_may_name() -> None:
    assert list(by_name(STRATEGIES, ATTENTION_STRATEGIES)) == list(ATTENTION_STRATEGIES)
    with pytest.raises(ValueError, match="STRATEGIES are .*dsp, toy, but ATTENTION_STRATEGIES"):
        by_name([*STRATEGIES, replace(STRATEGIES[-1], name="toy")], ATTENTION_STRATEGIES)
