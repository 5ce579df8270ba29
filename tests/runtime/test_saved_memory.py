"""Memory that autograd keeps: seen by its hooks, each storage once, and gone when it is."""

from __future__ import annotations

import torch
from torch import nn

from paradyse.runtime.saved_memory import Saved, storages


def test_storages_are_counted_once() -> None:
    x = torch.zeros(10)
    assert sum(storages([x, x[2:], x.view(2, 5), None, 3]).values()) == 40


def test_what_is_saved_without_what_is_there_anyway() -> None:
    layer, x = nn.Linear(4, 3, bias=False), torch.randn(5, 4)
    saved = Saved()
    with saved.watch():
        y = torch.exp(layer(x))  # saves x, and its own output
    assert saved.num_bytes([]) == 4 * (5 * 4 + 5 * 3)
    assert saved.num_bytes([x]) == saved.alive_bytes(storages([x])) == 4 * 5 * 3
    y.sum().backward()
    del y
    assert saved.alive_bytes(storages([x])) == 0


def test_memory_that_was_emptied_counts_as_nothing() -> None:
    x = torch.randn(8, requires_grad=True)
    weight = torch.randn(8)
    saved = Saved()
    with saved.watch():
        y = x * weight
    assert saved.alive_bytes() == 32 and y.requires_grad
    weight.untyped_storage().resize_(0)
    assert saved.alive_bytes() == 0
    assert saved.num_bytes([]) == 32  # as it was when it was saved
