"""``out=`` of sharded tensors that lie otherwise than what is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankPool
from models import whole
from torch import Tensor, nn

import paradyse
from paradyse.weights.layout import even_layout
from paradyse.weights.sharded_tensor import relayout

SHAPES = ((7, 4), (7, 4), (7, 4), (7, 4), (4,))
"""Two to read, of which the second lies by columns, as the first to write to does; the second one
to write to lies by rows; a vector."""

Write = Callable[[Any, Any, Any, Any, Any], Any]

OUT: dict[str, Write] = {
    "a sum": lambda a, b, p, q, v: torch.add(a, b, out=p),
    "of one that lies otherwise": lambda a, b, p, q, v: torch.mul(b, 2, out=q),
    "of those like it": lambda a, b, p, q, v: torch.mul(b, p, out=p),
    "with a whole one": lambda a, b, p, q, v: torch.add(a, torch.arange(4.0).double(), out=p),
    "with a vector": lambda a, b, p, q, v: torch.mul(v, a, out=p),
    "of three": lambda a, b, p, q, v: torch.addcmul(q, a, b, value=0.5, out=p),
    ".data": lambda a, b, p, q, v: torch.sub(a, b, out=p.data),
    "its own": lambda a, b, p, q, v: torch.add(p, a, out=p),
    "two": lambda a, b, p, q, v: torch.aminmax(a.detach(), dim=0, out=(v, q[1])),
    "a product": lambda a, b, p, q, v: torch.mm(a, b.T[:, :4], out=p),
    "a sum over rows": lambda a, b, p, q, v: torch.sum(a, 0, out=v),
    "numbers": lambda a, b, p, q, v: torch.arange(4, out=v),
    "a row": lambda a, b, p, q, v: torch.neg(v, out=p[2]),
    "a transpose": lambda a, b, p, q, v: torch.exp(a.T, out=p.T),
    "lists": lambda a, b, p, q, v: torch.ops.aten._foreach_mul.Scalar_out([a, v], 3, out=[p, v]),
    "into one like none": lambda a, b, p, q, v: torch.where(a > b, a, b, out=p),
}

MISFITS: dict[str, Write] = {
    "a longer one": lambda a, b, p, q, v: torch.add(v, v, out=p),
    "a shorter one": lambda a, b, p, q, v: torch.add(a, b, out=v),
    "a row": lambda a, b, p, q, v: torch.add(a, b, out=p[0]),
    "of a whole one": lambda a, b, p, q, v: torch.add(torch.ones(4).double(), 1, out=p),
    "a product": lambda a, b, p, q, v: torch.mm(a, b.T, out=p),
}


def both() -> tuple[Any, Any]:
    g = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=g).double() for shape in SHAPES]
    plain, sharded = (nn.ParameterList([x.clone() for x in drawn]) for _ in range(2))
    paradyse.shard(sharded)
    for p in (sharded[1], sharded[2]):
        relayout(p, even_layout(p.placement.axis, 4, 1))
    return plain, sharded


def same(got: Any, want: Tensor, what: str) -> None:
    torch.testing.assert_close(whole(got), want.detach(), msg=lambda m: f"{what}: {m}")


@torch.no_grad()
def written() -> None:
    for name, write in OUT.items():
        plain, sharded = both()
        lies = [p.placement for p in sharded]
        want, got = write(*plain), write(*sharded)
        for x, y in zip(sharded, plain, strict=True):
            same(x, y, name)
        assert [p.placement for p in sharded] == lies, name
        if isinstance(want, Tensor):
            same(got, want, name)


def test_it_is_written_where_it_lies(pool3: RankPool) -> None:
    pool3.run(written, timeout_s=100)


@torch.no_grad()
def misfitting() -> list[str]:
    found = []
    for write in MISFITS.values():
        plain, sharded = both()
        with pytest.raises(ValueError) as error:
            write(*sharded)
        found.append(str(error.value))
        assert all(torch.equal(whole(x), y) for x, y in zip(sharded, plain, strict=True))
    return found


def test_another_shape_is_refused_and_nothing_written(pool3: RankPool) -> None:
    for texts in pool3.run(misfitting, timeout_s=100):
        longer, shorter, row, of_whole, product = texts
        assert (
            "out= is a sharded tensor of shape [7, 4]" in longer and "of shape [4]: give" in longer
        )
        assert "of shape [4], and" in shorter and "of shape [7, 4]: give" in shorter
        assert "of shape [4], and" in row
        assert "of shape [7, 4], and" in of_whole and "of shape [4]: give" in of_whole
        assert "of shape [7, 7]: give one of that shape, or leave out= out" in product
