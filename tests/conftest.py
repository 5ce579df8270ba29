"""Fixtures: ranks to run on. Settings that hold for every test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

# Before torch is imported, here and (by inheritance) on the ranks: all of them share few cores, and
# a pool of compile workers for each rank costs more than it saves.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# On a GPU, tests that ask PyTorch for deterministic algorithms need it before cuBLAS starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import harness
import pytest
import torch
from harness import RankPool


def pytest_configure(config: pytest.Config) -> None:
    from _pytest.config import parse_warning_filter

    harness.WARNING_FILTERS = [
        parse_warning_filter(f, escape=False) for f in config.getini("filterwarnings")
    ]


# Before pytest itself, which then leaves out what -m does not ask for.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept: dict[str, bool] = {}
    for item in items:
        mark = item.get_closest_marker("broad")
        if mark and "but" in mark.kwargs:
            test, _, case = item.nodeid.partition("[")
            named = case.startswith(mark.kwargs["but"])
            kept[test] = named or kept.get(test, False)
            if named:
                item.own_markers.remove(mark)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if not any("::" in asked for asked in config.args):  # else cases may be left out on purpose
        if lost := [test for test, named in kept.items() if not named]:
            raise pytest.UsageError(f"broad(but=...) names no case of {', '.join(lost)}")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(n)``: the pool of n ranks that all tests share."""
    pools: dict[int, RankPool] = {}

    def pool_of(nproc: int) -> RankPool:
        pool = pools.setdefault(nproc, RankPool(nproc))
        pool.renew()
        return pool

    yield pool_of
    for pool in pools.values():
        pool.close()


def _pool(nproc: int) -> Callable[..., RankPool]:
    @pytest.fixture(name=f"pool{nproc}")
    def pool(ranks: Callable[[int], RankPool]) -> RankPool:
        return ranks(nproc)

    return pool


pool1, pool2, pool3, pool4 = map(_pool, (1, 2, 3, 4))
