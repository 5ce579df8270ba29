"""Sinks: a column of the softmax without a value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from reference import dense_attention
from test_attention_kernel import data, make
from torch import Tensor

from paradyse.kernels.attention_mask import AttentionSpec


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("name", ["", "nothing"])
def test_sinks_are_one_more_column(name: str, dropout_p: float) -> None:
    """Of the softmax, without a value; a row that sees no key has output and gradients 0."""
    s, at = 29, torch.arange(29)
    q, k, v, grad = make(2, 4, 2, s, s, 8, 8, torch.float64)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    ins = [x.requires_grad_() for x in (q, k, v)]
    spec = AttentionSpec(s, 0.3, right=0, **data(name, 2, s), sinks=sinks)
    seed = torch.tensor(5) if dropout_p else None
    spec = replace(spec, dropout_p=dropout_p, seed=seed)
    masked = (spec.key_padding, spec.document_ids, None, seed, -1, 0, -1, 0.3, 0.0, dropout_p)
    out, lse = torch.ops.paradyse.attention(*ins, *masked, None, None, sinks)
    want, lse0 = dense_attention(*ins, at, at, spec)
    torch.testing.assert_close((out, lse), (want, lse0))
    got = torch.autograd.grad(out, (*ins, sinks), grad)
    torch.testing.assert_close(got, torch.autograd.grad(want, (*ins, sinks), grad))
    assert name or got[3].abs().min() > 1e-3


def test_a_sink_may_be_switched_off() -> None:
    """By minus infinity: as without one, also for rows that see no key."""
    s = 29
    q, k, v, grad = make(2, 4, 2, s, s, 8, 8, torch.float64)
    ins = [x.requires_grad_() for x in (q, k, v)]
    hidden = {"key_padding": torch.arange(s) >= torch.tensor([[4], [s]])}
    spec = AttentionSpec(s, 0.3, right=0, **hidden)

    def run(sinks: Tensor | None) -> Any:
        masked = (spec.key_padding, None, None, None, -1, 0, -1, 0.3, 0.0, 0.0, None, None, sinks)
        out, lse = torch.ops.paradyse.attention(*ins, *masked)
        return out, lse, *torch.autograd.grad(out, ins, grad)

    off = torch.full((4,), -torch.inf, dtype=torch.float64)
    got, want = run(off), run(None)
    torch.testing.assert_close(got, want)
    assert (want[1] == -torch.inf).any() and (want[1] > -torch.inf).any()
