"""An input that is not kept for backward, since the block before makes it again.

A block under ``recompute`` runs again before its own backward, and what it gives is the input of
the block behind it, whose backward comes first. So that one need not keep its input: where its
backward asks for it, the block before runs again at that moment instead of a moment later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paradyse.torch_private import storage_key
from paradyse.weights.versions import Read


class _Remade(torch.autograd.Function):
    """The last value of a checkpoint, unchanged; asked for what it saved, the checkpoint runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def remade(x: Tensor) -> Tensor:
    """``x``, the last value that a checkpoint computes, such that it need not be kept outside."""
    out: Tensor = _Remade.apply(x)
    return out


@contextmanager
def not_kept(x: Tensor, node: Any) -> Iterator[None]:
    """Inside, what saves ``x`` for backward keeps ``node`` instead.

    Args:
        node: ``grad_fn`` of what ``remade`` gave for ``x``.
    """
    mine, shape = storage_key(x), x.shape

    def pack(saved: Tensor) -> Any:
        is_input = saved.shape == shape and storage_key(saved) == mine
        return node if is_input else Read.of(saved.detach())

    def unpack(kept: Any) -> Tensor:
        value: Tensor = kept.saved_tensors[0] if kept is node else kept.again()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
