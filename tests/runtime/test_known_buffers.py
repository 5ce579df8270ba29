"""Buffers that a program takes for known masks: what they are, and that they stay so."""

from __future__ import annotations

import pytest
import torch
from models import make_batch, run_step
from tiny import Tiny, tokens
from torch import Tensor, fx
from written_out import make

import paradyse
from paradyse.passes.mask_values import Band
from paradyse.runtime.known_buffers import KnownBuffers, band_of

N = 7
ONES = torch.ones(N, N)
BANDS: dict[str, tuple[Tensor, Band]] = {
    "causal": (ONES.tril(), Band(None, 0, True)),
    "causal, bool, of four dims": (ONES.tril().bool()[None, None], Band(None, 0, True)),
    "window": (ONES.tril().triu(-2), Band(2, 0, True)),
    "hidden": (ONES.triu(1).to(torch.uint8), Band(None, 0, False)),
    "ahead": (ONES.tril(2), Band(None, 2, True)),
    "all": (ONES, Band(None, None, True)),
}


@pytest.mark.parametrize("name", BANDS)
def test_bands(name: str) -> None:
    table, band = BANDS[name]
    assert band_of(table) == band
    i = torch.arange(N)
    ones = torch.ones(N, N, dtype=torch.bool)
    for bound, inside in ((band.left, i >= i[:, None] - (band.left or 0)),
                          (band.right, i <= i[:, None] + (band.right or 0))):  # fmt: skip
        ones &= inside if bound is not None else True
    assert torch.equal(ones == band.inside, table.reshape(N, N).bool())


OTHERS = {
    "one place is off": ONES.tril().index_put(
        (torch.tensor(3), torch.tensor(1)), torch.tensor(0.0)
    ),
    "other numbers": ONES.tril() * 2,
    "not square": ONES.tril()[:, :5],
    "several": ONES.tril().expand(2, N, N),
    "trained": ONES.tril().requires_grad_(),
    "one number": torch.ones(1, 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_bands(name: str) -> None:
    assert band_of(OTHERS[name]) is None


def test_a_buffer_that_changes_is_told() -> None:
    """Its values are no part of the program; what writes the same ones is no change."""
    torch._dynamo.reset()
    model, batch = make("nano_gpt"), make_batch("plain", 2, 9)
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    first = run_step(compiled, model, batch, lambda loss: loss)
    assert "mask: causal" in str(paradyse.explain(compiled, 2, 9))
    model.tril.copy_(model.tril.clone())
    assert run_step(compiled, model, batch, lambda loss: loss).loss == first.loss
    model.tril.fill_(1)
    with pytest.raises(RuntimeError, match=r"64\] was a mask of ones .* have changed since"):
        run_step(compiled, model, batch, lambda loss: loss)


def test_a_buffer_that_counts_no_writes_is_looked_at_by_every_call() -> None:
    """Such as one that was made, or loaded, under inference_mode."""
    with torch.inference_mode():
        table = ONES.tril()
    node = fx.Graph().placeholder("mask")
    node.meta["band"], node.meta["band_uses"] = band_of(table), {"mask"}
    known = KnownBuffers([node])
    known.check([table])
    with torch.inference_mode():
        table.fill_(1)
    with pytest.raises(RuntimeError, match="have changed since"):
        known.check([table])


class Whitened(Tiny):
    """Keeps the covariance of what it sees, zeros at first, which no mask is read from."""

    def __init__(self) -> None:
        super().__init__(hidden=16)
        self.register_buffer("cov", torch.zeros(16, 16))

    def extra(self, x: Tensor) -> Tensor:
        return x + x @ self.cov


def test_a_buffer_that_no_mask_is_read_from_may_change() -> None:
    torch._dynamo.reset()
    model, ids = Whitened(), tokens(2, 9)
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    for _ in range(3):
        torch.testing.assert_close(compiled(ids, ids), model(ids, ids))
        with torch.no_grad():
            model.cov.lerp_(torch.ones(16, 16), 0.01)
