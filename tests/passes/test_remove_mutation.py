"""Remove mutation: values and gradients of graphs that write in place, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import context, operators, run, trace
from torch import Tensor

from paradyse.passes.remove_mutation import remove_mutation
from paradyse.passes.retrace import Untraceable, drop_grad_mode, write_numbers
from paradyse.torch_private import FakeTensorMode, make_fx

aten = torch.ops.aten


def test_writes_become_values() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x + 1
        y.mul_(2)
        return y + y.clamp_(max=3)

    x = torch.randn(5)
    gm = trace(fn, x)
    assert remove_mutation(gm, context()) == 2
    assert operators(gm) == {"add": 2, "mul": 1, "clamp": 1}
    torch.testing.assert_close(run(gm, x), fn(x))


def test_a_write_keeps_the_dtype_of_what_it_writes_to() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x + 1
        y.add_(w).mul_(w)
        return y * 2

    x, w = torch.randn(3, 4).bfloat16(), torch.randn(3, 4)
    gm = trace(fn, x, w)
    assert remove_mutation(gm, context()) == 2
    assert operators(gm) == {"add": 2, "mul": 2, "to": 2}
    assert run(gm, x, w).dtype == torch.bfloat16
    torch.testing.assert_close(run(gm, x, w), fn(x, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_in_place_draw_the_same(dtype: torch.dtype) -> None:
    """As timm drops paths, and as noise is added."""

    def fn(x: Tensor) -> Tensor:
        kept = x.new_empty(x.shape[0], 1).bernoulli_(0.7).div_(0.7)
        return x * kept + torch.empty_like(x).normal_(0.5, std=2) + x.clone().normal_()

    x = torch.randn(6, 50, dtype=dtype)
    gm = trace(fn, x)
    remove_mutation(gm, context())
    assert {"bernoulli", "randn_like"} <= operators(gm).keys()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        want, after = fn(x), torch.rand(1)
        torch.manual_seed(3)
        torch.testing.assert_close(run(gm, x), want)
        assert torch.equal(torch.rand(1), after)


def shifted(x: Tensor) -> Tensor:
    """As decoders shift their labels."""
    y = x.new_zeros(x.shape)
    y[..., 1:] = x[..., :-1].clone()
    y[..., 0] = 7
    return y.masked_fill_(y < 0, 1)


def through_a_view(x: Tensor) -> Tensor:
    y = x + 1
    y[0].add_(1)
    return y * 2


def under_a_view(x: Tensor) -> Tensor:
    y = x + 1
    first = y[0]
    y.add_(1)
    return first * 2


def seen_by_another_view(x: Tensor) -> Tensor:
    y = x + 1
    columns, row = y.t(), y[1]
    row.mul_(x[2])
    columns[0].sub_(5)
    return columns.exp() + y.t() + row[0]


def through_views_of_views(x: Tensor) -> Tensor:
    y = x.new_zeros(2, 3, 4)
    y.permute(2, 0, 1)[1:3, 0].copy_(x[:2, :3])
    y.view(6, 4)[::2].add_(x)
    y.unsqueeze(0)[:, 1].fill_(2.5)
    y[0, 0].zero_()
    return y.reshape(4, 6) * 3


def in_a_copy(x: Tensor) -> Tensor:
    y = x + 1
    y.t().reshape(12).mul_(2)  # a copy: y stays as it is
    y.to(torch.float64).add_(1)
    return y


def beside_a_value_kept(x: Tensor) -> Tensor:
    y = x + 1
    before = y * 2
    y.add_(before)
    return before + y


CASES = (
    shifted,
    through_a_view,
    under_a_view,
    seen_by_another_view,
    through_views_of_views,
    in_a_copy,
    beside_a_value_kept,
)


@pytest.mark.parametrize("fn", CASES)
def test_all_that_shares_memory_sees_a_write(fn: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    gm = trace(fn, x)
    assert remove_mutation(gm, context()) > 0
    assert not any(name.endswith("_") for name in operators(gm))
    got, want = run(gm, x), fn(x)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want)]
    torch.testing.assert_close(*grads)


def test_parts_of_a_split_see_a_write() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x + 1
        parts = y.unbind(0)  # autograd would refuse to go through these
        y.add_(1)
        return parts[1] * 2

    x = torch.randn(3, 4)
    gm = trace(fn, x)
    assert remove_mutation(gm, context()) == 1
    torch.testing.assert_close(run(gm, x), fn(x))


def into_input(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def into_a_view_of_input(x: Tensor) -> Tensor:
    x.view(12)[3:].zero_()
    return x * 2


def into_a_part_of_a_split(x: Tensor) -> Tensor:
    y = x + 1
    y.chunk(2)[0].add_(1)
    return y


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (into_input, "shows an input"),
        (into_a_view_of_input, "shows an input"),
        (into_a_part_of_a_split, "a view by"),
        (lambda x: torch.clamp(x + 1, 0, out=x.clone()) + x, "clamp.out .* has no functional form"),
    ],
)
def test_writes_that_are_refused(fn: Callable[..., Any], why: str) -> None:
    with pytest.raises(Untraceable, match=why):
        remove_mutation(trace(fn, torch.ones(3, 4)), context())


def test_a_write_without_gradients_into_a_value_with_one_is_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x + 1
        with torch.no_grad():
            y.mul_(2)  # autograd goes on through what y was before
        return y * 3

    gm = trace(fn, torch.ones(3, requires_grad=True))
    drop_grad_mode(gm, context())
    with pytest.raises(Untraceable, match="shows a value with a gradient"):
        remove_mutation(gm, context())


@pytest.mark.parametrize(
    ("number", "dtype"),
    [(1e6, torch.float16), (0.1, torch.float16), (2, torch.bool), (3, torch.int64)],
)
def test_a_number_is_written_as_its_dtype_has_it(number: float, dtype: torch.dtype) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x + 1
        y[1].copy_(torch.full((), number, dtype=dtype))
        return y * 2

    x = torch.randn(3, 4)
    gm = trace(fn, x)
    assert remove_mutation(gm, context()) == 1
    assert torch.equal(run(gm, x), fn(x))


def test_what_is_written_from_the_host_goes_to_the_device() -> None:
    """A number, as a decoder's shifted labels begin with, is made there; other tensors travel."""

    def fn(x: Tensor) -> Tensor:
        y = aten.add.Tensor(x, 1)
        aten.copy_.default(aten.select.int(y, 1, 0), torch.tensor(7))
        aten.copy_.default(aten.select.int(y, 1, 1), torch.arange(3))
        return aten.mul.Tensor(y, 2)

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:  # a device that need not be there
        x = torch.empty(3, 5, dtype=torch.int64, device="cuda")
        gm = make_fx(fn, pre_dispatch=True)(x)
    write_numbers(gm)
    assert remove_mutation(gm, context()) >= 2
    gm.graph.eliminate_dead_code()
    (output,) = gm.graph.output_node().args
    assert output.meta["val"].device.type == "cuda"
    found = operators(gm)
    assert found["select_scatter"] == 2 and found["to"] == 1 and found["full_like"] == 1
