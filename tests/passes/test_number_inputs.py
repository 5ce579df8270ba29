"""Python numbers that only scale tensors are inputs; all others stay constants of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankPool
from tiny import Tiny, tokens
from torch import Tensor, nn

import paradyse
from paradyse.passes.number_inputs import numbers_made_of
from paradyse.passes.retrace import retrace
from paradyse.runtime.capture import as_tensor_of, trace_inputs


def captured(fn: Callable[..., Any], *args: Any) -> tuple[Any, list[Any]]:
    """Dynamo's graph of ``fn``, and the inputs that it is called with."""
    found: list[Any] = []

    def backend(gm: Any, examples: list[Any]) -> Any:
        found[:] = [gm, examples]
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, dynamic=True)(*args)
    return found[0], found[1]


SCALED: dict[str, Callable[[Tensor, Any, Any], Any]] = {
    "product": lambda x, a, n: x * a,
    "from the left": lambda x, a, n: a / (x.abs() + n),
    "of numbers": lambda x, a, n: x * (a * n - 2) / (n - 1),
    "one element": lambda x, a, n: x.sum() * a + x.mean() / n,
    "function": lambda x, a, n: torch.div(torch.mul(x, a), n).add(n),
    "in place": lambda x, a, n: (x * 2).mul(a).sub(n),
}


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, d) for n in SCALED for d in DTYPES if (n, d) != ("one element", torch.int64)],
)
def test_scaling_is_as_with_python_numbers(name: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 5, 7).to(dtype)
    gm, examples = captured(SCALED[name], x, 0.37, 5)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    inputs = trace_inputs(placeholders, examples)
    assert len(inputs.scales) >= 1 and not inputs.scalars
    traced = retrace(gm, list(inputs.values))
    for a, n in ((0.37, 5), (-1.25, 9)):
        given: list[Any] = []
        for v in inputs.values:
            number = getattr(v, "number", None)
            given.append(as_tensor_of(a if type(number) is float else n) if number else x)
        got, want = traced(*given), SCALED[name](x, a, n)
        got = got[0] if isinstance(got, tuple | list) else got
        assert got.dtype == want.dtype
        tolerance = {torch.bfloat16: 0.0, torch.float16: 0.0, torch.float64: 1e-14}.get(dtype, 1e-6)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


USED: dict[str, Callable[[Tensor, int], Any]] = {
    "size": lambda x, n: x.new_zeros(n + x.shape[0]),
    "bound": lambda x, n: x.clamp(max=n),
    "shift": lambda x, n: x.roll(n),
    "both": lambda x, n: x.roll(n) * n,
}


@pytest.mark.parametrize("name", USED)
def test_what_does_more_than_scale_is_a_constant(name: str) -> None:
    gm, examples = captured(USED[name], torch.ones(7), 5)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    inputs = trace_inputs(placeholders, examples)
    assert not inputs.scales and len(inputs.scalars) == 1
    (at,) = inputs.scalars
    assert numbers_made_of(placeholders[at], int) is None


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Tiny(layers=1)

    def forward(self, ids: Tensor, share: float) -> Tensor:
        loss: Tensor = self.inner(ids, ids)
        return loss * share


def train_by_different_numbers() -> str:
    torch.manual_seed(0)
    model = Weighed()
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    ids = tokens(2, 12)
    rank = torch.distributed.get_rank()
    for share in (0.5, 0.25, 0.125):
        compiled(ids, share).backward()
    try:
        compiled(ids, 0.75 + rank)
    except ValueError as e:
        return str(e)
    return ""


@pytest.mark.broad
def test_ranks_that_are_given_different_numbers_say_so(pool2: RankPool) -> None:
    for text in pool2.run(train_by_different_numbers, timeout_s=100):
        assert "disagree on the batch" in text


def test_a_number_that_changes_is_no_new_program() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Weighed()
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    ids = tokens(2, 12)
    want = model(ids, 1.0).item()
    for share in (0.5, 0.25, 3.0, -1.5):
        assert compiled(ids, share).item() == pytest.approx(want * share, rel=1e-6)
    assert paradyse.stats(compiled).captures == 2
