"""All tests of kernels in Triton's interpreter, in one process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_device import NATIVE


@pytest.mark.broad
@pytest.mark.skipif(NATIVE, reason="the kernels run natively")
def test_kernels_in_the_interpreter() -> None:
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", str(folder)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
