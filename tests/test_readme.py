"""README's first script, run as it is written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_the_first_script_trains_on_two_ranks(tmp_path: Path) -> None:
    """It makes a process group without naming a backend, as torchrun's users do."""
    script = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert "dist.init_process_group()" in script
    all_trained = "all(p.grad is not None for p in model.parameters())"
    told = f"\nprint(f'trained {{{all_trained}}}\\n', end='')\n"  # in one write: ranks share it
    (tmp_path / "train.py").write_text(script + told)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launch, "--nproc-per-node", "2", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("trained True") == 2
