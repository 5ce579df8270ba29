"""Rows in the order of experts: the order, the way back, each expert's matmul, with gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import paradyse.kernels.expert_rows  # noqa: F401  registers the operators

ops = torch.ops.paradyse

IDS = {
    "mixed": [3, 0, 3, 1, 0, 0, 3],
    "one has all": [2, 2, 2, 2, 2],
    "one row": [4],
    "none": [],
}
NUM_EXPERTS = 5


def ids_of(name: str) -> Tensor:
    return torch.tensor(IDS[name], dtype=torch.int64)


@pytest.mark.parametrize("name", IDS)
def test_order_and_way_back(name: str) -> None:
    ids = ids_of(name)
    in_order, order, inverse, ends = ops.route_rows(ids, NUM_EXPERTS)
    assert in_order.tolist() == sorted(IDS[name])
    assert order.tolist() == sorted(range(len(ids)), key=lambda i: IDS[name][i])
    assert order[inverse].tolist() == list(range(len(ids)))
    assert ends.dtype == torch.int32
    assert ends.tolist() == [sum(i <= e for i in IDS[name]) for e in range(NUM_EXPERTS)]


@pytest.mark.parametrize("repeats", [1, 3])
def test_rows_that_are_taken_several_times_get_the_sum_of_gradients(repeats: int) -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(4 * repeats)
    y = ops.take_rows(x, order, order.argsort(), repeats)
    assert y.equal(x.detach()[order // repeats])
    torch.autograd.gradcheck(
        lambda x: ops.take_rows(x, order, order.argsort(), repeats), (x,), fast_mode=False
    )


@pytest.mark.parametrize("name", IDS)
def test_matmul_of_each_expert(name: str) -> None:
    ids = ids_of(name)
    in_order, _, _, ends = ops.route_rows(ids, NUM_EXPERTS)
    x = torch.randn(len(ids), 3, dtype=torch.float64, requires_grad=True)
    base = torch.randn(NUM_EXPERTS, 2, 3, dtype=torch.float64, requires_grad=True)
    for weight in (base.transpose(1, 2), base.transpose(1, 2).contiguous()):
        y = ops.grouped_mm(x, weight, ends)
        expected = torch.einsum("ni,nio->no", x, weight[in_order])
        torch.testing.assert_close(y, expected)
        given = torch.randn_like(y)
        got = torch.autograd.grad(y, (x, base), given)
        want = torch.autograd.grad(expected, (x, base), given, retain_graph=True)
        torch.testing.assert_close(got, want)


def test_frozen_experts_have_no_gradient() -> None:
    x, weight = torch.randn(3, 2, requires_grad=True), torch.randn(2, 2, 4)
    y = ops.grouped_mm(x, weight, torch.tensor([1, 3], dtype=torch.int32))
    y.sum().backward()
    assert x.grad is not None and weight.grad is None


@pytest.mark.parametrize("op", ["route_rows", "take_rows", "grouped_mm", "grouped_outer"])
def test_what_is_traced_is_what_runs(op: str) -> None:
    """Fakes, gradients and schemas, as PyTorch checks them."""
    ids = ids_of("mixed")
    _, order, inverse, ends = ops.route_rows(ids, NUM_EXPERTS)
    x = torch.randn(len(ids), 3, requires_grad=True)
    weight = torch.randn(NUM_EXPERTS, 3, 2, requires_grad=True)
    samples = {
        "route_rows": (ids, NUM_EXPERTS),
        "take_rows": (x, order, inverse, 1),
        "grouped_mm": (x, weight, ends),
        "grouped_outer": (x.detach(), torch.randn(len(ids), 2), ends),
    }
    torch.library.opcheck(getattr(ops, op).default, samples[op])
