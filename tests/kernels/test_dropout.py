"""Dropout by place."""

from __future__ import annotations

import torch

from paradyse.kernels.dropout import hash_index, hashed_dropout


def test_share_and_scale():
    x = torch.ones(1 << 16)
    out = hashed_dropout(x, 0.3, torch.tensor(7), torch.arange(x.numel()))
    assert abs((out == 0).float().mean().item() - 0.3) < 0.01
    assert out.max().item() == torch.tensor(1 / 0.7).item()
    assert hashed_dropout(x, 1.0, torch.tensor(7), torch.arange(x.numel())).abs().sum() == 0


def test_the_mask_depends_on_seed_and_place_alone():
    x = torch.randn(1000)
    index, seed = torch.arange(1000), torch.tensor(3)
    whole = hashed_dropout(x, 0.5, seed, index)
    parts = [hashed_dropout(x[i], 0.5, seed, index[i]) for i in (slice(0, 400), slice(400, 1000))]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, hashed_dropout(x, 0.5, torch.tensor(4), index))


def test_neighbours_and_seeds_are_uncorrelated():
    bits = hash_index(torch.arange(1 << 15), torch.tensor(1)).double()
    others = hash_index(torch.arange(1 << 15), torch.tensor(2)).double()
    for a, b in ((bits[:-1], bits[1:]), (bits, others)):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 0.03


def test_gradient_is_the_mask():
    x = torch.randn(100, dtype=torch.float64, requires_grad=True)
    out = hashed_dropout(x, 0.5, torch.tensor(1), torch.arange(100))
    (g,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(g, (out != 0) * 2.0)
