"""Outputs computed when first used."""

from __future__ import annotations

import torch

from paradyse.runtime.deferred import DeferredTensor


def make(calls, value):
    def compute():
        calls.append(1)
        return value

    return DeferredTensor(compute, tuple(value.shape), value.dtype, value.device)


def test_metadata_does_not_compute():
    calls = []
    x = make(calls, torch.randn(2, 3))
    assert x.shape == (2, 3) and x.dtype == torch.float32 and x.ndim == 2 and x.size(1) == 3
    assert isinstance(x, torch.Tensor) and x.numel() == 6 and x.is_floating_point()
    assert not calls


def test_any_use_computes_once():
    calls = []
    value = torch.randn(2, 3)
    x = make(calls, value)
    assert torch.equal(x + 1, value + 1)
    assert torch.equal(torch.cat([x, x]), torch.cat([value, value]))
    assert x[0, 1].item() == value[0, 1].item() and x.tolist() == value.tolist()
    assert len(calls) == 1


def test_gradients_flow_through():
    w = torch.randn(3, requires_grad=True)
    x = make([], w * 2)
    assert x.requires_grad
    x.sum().backward()
    assert torch.equal(w.grad, torch.full((3,), 2.0))
