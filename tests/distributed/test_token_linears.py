"""Linears between messages of tokens: values, gradients, and what is computed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from harness import RankPool
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from paradyse.distributed.axis import local_positions, resolve_axis
from paradyse.distributed.collectives import register_block
from paradyse.distributed.regions import WAIT
from paradyse.distributed.token_linears import MIN_ROWS, gather_linears, linear_scatter

HIDDEN, COLUMNS = 5, (3, 4)


def given(batch: int, seq_len: int, dtype: torch.dtype = torch.float64) -> Iterator[Tensor]:
    """The tokens, two weights with biases, and the weight behind them; the same on all ranks."""
    g = torch.Generator().manual_seed(seq_len)
    yield torch.randn(batch, seq_len, HIDDEN, generator=g).to(dtype).requires_grad_()
    for n in COLUMNS:
        yield torch.randn(n, HIDDEN, generator=g).to(dtype).requires_grad_()
        yield torch.randn(n, generator=g).to(dtype).requires_grad_()
    yield torch.randn(HIDDEN, sum(COLUMNS), generator=g).to(dtype).requires_grad_()


class There:
    """The lengths and names that operators are told on this rank."""

    def __init__(self, seq_len: int) -> None:
        self.axis = resolve_axis()
        positions = local_positions(self.axis.layout(seq_len), self.axis.rank)
        self.real = positions < seq_len
        self.mine = positions.clamp(max=seq_len - 1)
        info = torch.tensor([seq_len, register_block(self.axis, "test")])
        self.told = positions, torch.arange(seq_len), info, self.axis.name


def compute(batch: int, seq_len: int, with_biases: bool, frozen: str) -> dict[str, float]:
    """How far values and gradients are off those of one rank."""
    there = There(seq_len)
    p, rank = there.axis.size, there.axis.rank
    tensors = dict(zip(("x", "w0", "b0", "w1", "b1", "down"), given(batch, seq_len), strict=True))
    for name, t in tensors.items():
        t.requires_grad_(name not in frozen.split())
    x, w0, b0, w1, b1, down = tensors.values()
    weights, biases = [w0 * (rank + 1), w1 * (rank + 1)], [b0, b1] if with_biases else []
    whole, *ys = gather_linears(x[:, there.mine], weights, biases, *there.told)
    z = torch.cat(ys, -1).tanh()
    out = linear_scatter(z, down * (rank + 1), *there.told) + whole[:, there.mine] / 2
    target = torch.linspace(-1, 1, seq_len * HIDDEN, dtype=x.dtype).view(seq_len, HIDDEN)
    scored = out[:, there.real] * target[there.mine[there.real]]
    wanted = [t for t in tensors.values() if t.requires_grad and (with_biases or t.ndim > 1)]
    got = torch.autograd.grad(scored.sum(), wanted)
    # the same, on one rank
    total = x / 2
    for r in range(1, p + 1):
        linear = torch.nn.functional.linear
        pairs = zip((w0, w1), (b0, b1), strict=True)
        ups = [linear(x, w * r, b if with_biases else None) for w, b in pairs]
        total = total + linear(torch.cat(ups, -1).tanh(), down * r)
    want = torch.autograd.grad((total * target).sum(), wanted)
    of_out = (out - total[:, there.mine]).norm()  # rows past the end too, which are the last
    off = {"whole": (whole - x).norm(), "out": of_out / total.norm()}
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        g = g.clone()
        torch.distributed.all_reduce(g)
        off[f"gradient {i}"] = (g - w).abs().max() / w.abs().max()
    return {name: float(v.detach()) for name, v in off.items()}


CASES = [
    (1, 1, True, ""),
    (3, 13, False, ""),
    (2, 12 * MIN_ROWS, True, ""),
    (1, 12 * MIN_ROWS - 7, False, "w0"),
    (1, 12 * MIN_ROWS - 7, True, "x"),
    (1, 12 * MIN_ROWS, True, "w0 b0 w1 b1 down"),
]


@pytest.mark.parametrize(("batch", "seq_len", "with_biases", "frozen"), CASES)
def test_values_and_gradients(
    batch: int, seq_len: int, with_biases: bool, frozen: str, pool2: RankPool, pool3: RankPool
) -> None:
    for pool in (pool2, pool3):
        for off in pool.run(compute, batch, seq_len, with_biases, frozen):
            assert max(off.values()) < 1e-11, off


def under_way(batch: int, seq_len: int) -> list[list[str]]:
    """Matmuls and waits of the two operators, forward and backward, in order of time."""
    there, (x, w0, b0, w1, b1, down) = There(seq_len), given(batch, seq_len)
    found = []
    for _ in range(2):  # the first call of an operator does more
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            _, *ys = gather_linears(x[:, there.mine], [w0, w1], [b0, b1], *there.told)
            out = linear_scatter(torch.cat(ys, -1), down, *there.told)
            out.sum().backward()
        events = sorted(seen.events(), key=lambda e: e.time_range.start)
        kinds = {"aten::mm": "multiply", "aten::addmm": "multiply", "aten::addmm_": "multiply"}
        names = ["wait" if e.name.startswith(WAIT) else kinds.get(e.name, "") for e in events]
        found = [name for name in names if name]
    return ["".join(found).split("wait")]


def test_own_tokens_are_multiplied_while_messages_are_under_way(pool2: RankPool) -> None:
    """Before each wait there are matmuls that do not need what is waited for, and after it those
    that do."""
    for (between,) in pool2.run(under_way, 1, 8 * MIN_ROWS):
        counts = [part.count("multiply") for part in between]
        # two stretches of own tokens or one, and what is between: gather 2 weights, scatter,
        # gather gradients with the weight's own part, scatter with two gradients of weights
        assert len(counts) == 5 and all(counts[:-1]), counts
        assert counts[-1] == 0, counts


def test_few_tokens_are_multiplied_at_once(pool2: RankPool) -> None:
    """Those of all sequences, by one matmul for each weight."""
    for (between,) in pool2.run(under_way, 5, 16):
        assert [part.count("multiply") for part in between][:2] == [0, 3], between


def in_half_precision(dtype: torch.dtype) -> float:
    """The largest error of a gradient over that of one rank in the same dtype."""
    seq_len = 8 * MIN_ROWS
    there, tensors = There(seq_len), [*given(2, seq_len, dtype)]
    x, w0, _, w1, _, down = tensors
    _, *ys = gather_linears(x[:, there.mine], [w0, w1], [], *there.told)
    out = linear_scatter(torch.cat(ys, -1), down, *there.told)
    got = torch.autograd.grad(out[:, there.real].float().sum(), [x, w0, w1, down])
    exact = [t.detach().double().requires_grad_() for t in (x, w0, w1, down)]

    def alone(x: Tensor, w0: Tensor, w1: Tensor, down: Tensor) -> tuple[Tensor, ...]:
        y = torch.cat([x @ w0.T, x @ w1.T], -1) @ down.T
        return torch.autograd.grad(y.double().sum() * there.axis.size, [x, w0, w1, down])

    want, plain = alone(*exact), alone(x, w0, w1, down)
    worst = 0.0
    for g, w, same in zip(got, want, plain, strict=True):
        g = g.double()
        torch.distributed.all_reduce(g)
        worst = max(worst, float((g - w).abs().max() / (same.double() - w).abs().max()))
    return worst


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_no_worse_than_on_one_rank(dtype: torch.dtype, pool2: RankPool) -> None:
    for worst in pool2.run(in_half_precision, dtype):
        assert worst < 2, worst
