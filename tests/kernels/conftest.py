"""Which tests of this folder run in which process."""

from __future__ import annotations

import pytest
from kernel_device import INTERPRETED, NATIVE


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``kernels`` run natively or in the interpreter's process, which runs no other
    ones; elsewhere they are left out, and ``test_interpreter`` runs them.
    """
    if NATIVE:
        return
    mine = [i for i in items if "tests/kernels/" in i.path.as_posix()]
    out = [i for i in mine if INTERPRETED != (i.get_closest_marker("kernels") is not None)]
    config.hook.pytest_deselected(items=out)
    items[:] = [i for i in items if i not in set(out)]
