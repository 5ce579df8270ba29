"""Sharded weights that a step reads in another dtype: they are cast before they are gathered."""

from __future__ import annotations

import torch
from torch import Tensor

from paradyse.weights.sharded_tensor import ShardedTensor


class CastShard:
    """A sharded tensor as steps take it that cast it to a smaller dtype: it is gathered in that.

    Args:
        of: the tensor at rest.
        dtype: in which it travels, and is whole.
    """

    def __init__(self, of: ShardedTensor, dtype: torch.dtype) -> None:
        self.of, self.dtype = of, dtype
        self.placement, self.shape = of.placement, of.shape
        self.trained_dtype, self.reduce_dtype = of.trained_dtype, of.reduce_dtype

    @property
    def local(self) -> Tensor:
        """The rank's rows at rest."""
        return self.of.local

    @property
    def for_use(self) -> Tensor:
        """The rank's rows on the device that computes with them, cast."""
        return self.of.for_use.detach().to(self.dtype)

    def new_whole(self) -> Tensor:
        """As of ``ShardedTensor``, in this dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.of.used_on)


def at_rest(x: ShardedTensor | CastShard) -> ShardedTensor:
    """The parameter that ``x`` stands for."""
    return x.of if isinstance(x, CastShard) else x
