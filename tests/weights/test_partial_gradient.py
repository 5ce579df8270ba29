"""Gradients that are a rank's part: what may be done with them, and what raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paradyse.distributed.axis import SINGLE
from paradyse.weights.layout import GradientSum, even_layout
from paradyse.weights.partial_gradient import PartialGradient, kept_dtype, own_part, rest_part
from paradyse.weights.sharded_tensor import ShardedTensor


class _Given(torch.autograd.Function):
    """A weight as it is; its gradient is what it was given."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, weight: Tensor) -> Tensor:
        ctx.grad = grad
        return weight.detach().sum() if not isinstance(weight, ShardedTensor) else torch.ones(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, ctx.grad


def weight(sharded: bool, dtype: torch.dtype = torch.float32, reduce_dtype: Any = None) -> Any:
    x = torch.zeros(3, 2, dtype=dtype)
    if sharded:
        return nn.Parameter(
            ShardedTensor(x, even_layout(SINGLE, 3), (3, 2), sums=GradientSum(reduce_dtype))
        )
    return nn.Parameter(x)


def filled(w: Any, value: float) -> Tensor:
    """A gradient as ``w`` lies at rest."""
    rows = torch.full((3, 2), value, dtype=w.dtype)
    return w.detach().with_rows(rows) if isinstance(w, ShardedTensor) else rows


@pytest.mark.parametrize("sharded", [False, True])
def test_autograd_adds_up_parts_apart(sharded: bool) -> None:
    w = weight(sharded)
    own = own_part(w, torch.full((3, 2), 1.0))
    grads = [own, filled(w, 10.0), rest_part(w, filled(w, 100.0)), own]
    sum(_Given.apply(g, w) for g in grads).backward()
    _Given.apply(own, w).backward()
    _Given.apply(filled(w, 1000.0), w).backward()
    rest = getattr(w.grad.rest, "local", w.grad.rest)
    assert isinstance(w.grad, PartialGradient) and w.grad.num_parts == 2
    assert w.grad.own.tolist() == [[3.0, 3.0]] * 3 and rest.tolist() == [[1110.0, 1110.0]] * 3
    assert own.own.tolist() == [[1.0, 1.0]] * 3, "what autograd was given is not written to"


@pytest.mark.parametrize("set_to_none", [False, True])
def test_they_can_be_cleared(set_to_none: bool) -> None:
    weights = [weight(False), weight(True), weight(False)]
    for w in weights[:2]:
        w.grad = own_part(w, torch.ones(3, 2))
    weights[2].grad = torch.ones(3, 2)
    torch.optim.SGD(weights, lr=0.1).zero_grad(set_to_none)
    if set_to_none:
        assert [w.grad for w in weights] == [None] * 3
    else:
        assert [w.grad.num_parts for w in weights[:2]] == [0, 0]
        assert not weights[2].grad.any()


def test_values_are_not_read() -> None:
    w = weight(False)
    w.grad = own_part(w, torch.ones(3, 2))
    reads = (Tensor.sum, Tensor.norm, lambda g: g * 2, lambda g: g.isfinite().all(), Tensor.tolist)
    for read in reads:
        with pytest.raises((NotImplementedError, RuntimeError)):
            read(w.grad)
    with pytest.raises(NotImplementedError, match=r"clear them with zero_grad\(\)"):
        w.grad.mul_(2)
    assert "not summed over ranks" in repr(w.grad)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("part", [own_part, rest_part])
def test_anomalies_are_found_in_them(part: Any, sharded: bool) -> None:
    w = weight(sharded)
    grad = torch.ones(3, 2) if part is own_part else filled(w, 1.0)
    getattr(grad, "local", grad)[1, 1] = torch.nan
    with torch.autograd.set_detect_anomaly(True):
        _Given.apply(own_part(w, torch.ones(3, 2)), w).backward()
        assert isinstance(w.grad, PartialGradient)
        with pytest.raises(RuntimeError, match="returned nan values"):
            _Given.apply(part(w, grad), w).backward()


def test_a_gradient_put_there_meanwhile_is_told_of() -> None:
    w = weight(False)
    w.grad = torch.ones(3, 2)
    with pytest.raises(NotImplementedError, match="put it there before the first of them"):
        _Given.apply(own_part(w, torch.ones(3, 2)), w).backward()


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype", "kept"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.float16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float64, torch.float64),
        (torch.float64, None, torch.float64),
    ],
)
def test_dtype_of_the_sum(dtype: Any, reduce_dtype: Any, kept: torch.dtype) -> None:
    w = weight(True, dtype, reduce_dtype)
    assert kept_dtype(w) == kept
    assert rest_part(w, filled(w, 1.0)).rest.dtype == kept
    assert own_part(w, torch.ones(3, 2, dtype=dtype)).dtype == dtype, "as the weight's own"
