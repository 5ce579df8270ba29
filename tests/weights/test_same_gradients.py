"""Gradients that every rank computes whole: compared, and averaged where they are not the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import RankPool
from torch import Tensor

from paradyse.distributed import checksums
from paradyse.distributed.axis import resolve_axis
from paradyse.distributed.collectives import REPLICAS, traffic
from paradyse.weights.no_sync import GradientSync
from paradyse.weights.same_gradients import (
    FEW_BYTES,
    Differed,
    SameGradients,
    averaged_if_other,
    compared_together,
    may_be_same,
)


def gradients_of(scales: Sequence[float]) -> tuple[list[Tensor], dict[str, int], bool]:
    """Gradients of three weights of this rank, of which it computes ``scales`` times x; what it
    sent for them, and whether they may be the same after."""
    axis = resolve_axis()
    sent = traffic(axis, REPLICAS).sent_bytes
    sent.clear()
    weights = [torch.nn.Parameter(torch.ones(n, dtype=d)) for n, d in SHAPES]
    sync = GradientSync(weights, axis, axis)
    used = SameGradients.apply(sync, *weights)
    x = [torch.linspace(1, 2, n, dtype=d) for n, d in SHAPES]
    # the last weight takes no part
    loss = sum((w * x * s).double().sum() for w, x, s in zip(used[:2], x, scales, strict=False))
    loss.backward()
    assert weights[2].grad is None
    grads = [w.grad for w in weights[:2]]
    found: list[Tensor] = [g for g in grads if g is not None]
    return found, dict(sent), may_be_same(axis, torch.device("cpu"))


SHAPES = ((40_001, torch.float32), (64, torch.float64), (3, torch.float32))


def rounds() -> Any:
    """Two backwards: the same bits on all ranks, and other ones of the second weight."""
    axis = resolve_axis()
    axis.session.forget(Differed)
    found = [gradients_of((1.0, 1.0 + other * axis.rank)) for other in (0, 2.0)]
    axis.session.forget(Differed)
    return found


@pytest.mark.parametrize("nproc", [2, 3])
def test_what_is_the_same_is_not_sent_and_what_differs_is_averaged(
    nproc: int, ranks: Callable[[int], RankPool]
) -> None:
    results = ranks(nproc).run(rounds, timeout_s=60)
    for (first, sent, may_be), (second, more, never) in results:
        for grad, (n, dtype) in zip(first, SHAPES, strict=False):
            assert torch.equal(grad, torch.linspace(1, 2, n, dtype=dtype))
        assert may_be and sent == {"all_gather": 2 * 2 * 8 * (nproc - 1)}
        assert not never and more == {**sent, "all_reduce": 2 * 64 * 8 * (nproc - 1) // nproc}
        assert torch.equal(second[0], first[0])
        torch.testing.assert_close(second[1], first[1] * nproc, rtol=1e-15, atol=0)
        assert torch.equal(second[1], results[0][1][0][1])  # the same bits on all ranks


def test_devices_that_add_up_in_any_order_are_asked_for_no_bits() -> None:
    axis, gpu = resolve_axis(), torch.device("cuda")
    assert may_be_same(axis, torch.device("cpu")) and not may_be_same(axis, gpu)
    with patch.object(torch, "are_deterministic_algorithms_enabled", lambda: True):
        assert may_be_same(axis, gpu) and checksums.repeatable(gpu)


def test_the_message_of_a_rank_that_differs_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    axis = resolve_axis()
    sums = torch.tensor([[[1, 2], [3, 4]], [[1, 2], [3, 5]]])
    given = [torch.ones(2), torch.ones(3), torch.ones(2)]
    with patch.object(axis.session, "of", lambda kind: kind()):
        averaged_if_other(given, [[1], [0, 2]], axis, sums)
    assert "2 of 3 are averaged" in caplog.text


def test_small_gradients_of_a_dtype_are_compared_together() -> None:
    few, many = FEW_BYTES // 4 - 1, FEW_BYTES // 4
    sizes = (few, many, 3, 5, few)
    dtypes = (torch.float32, torch.float32, torch.float64, torch.float32, torch.float32)
    grads = [torch.empty(n, dtype=d) for n, d in zip(sizes, dtypes, strict=True)]
    assert sorted(compared_together(grads)) == [[0, 3, 4], [1], [2]]
