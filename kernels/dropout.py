"""Dropout whose mask is a function of a seed and of where an element lies in the whole tensor.

The mask is then the same however the tensor is split over ranks, and needs no storage.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Constants of the splitmix64 finalizer (Steele, Lea, Flood, OOPSLA 2014), as signed 64-bit
# integers.
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15
_GOLDEN = -0x61C8864680B583EB


def _shift_right(x: Tensor, n: int) -> Tensor:
    return (x >> n) & ((1 << (64 - n)) - 1)


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def hash_index(index: Tensor, seed: Tensor) -> Tensor:
    """24 well-mixed bits per element of ``index``, int64, and ``seed``, as int64 in [0, 2**24)."""
    return _shift_right(_mixed(index * _GOLDEN + seed), 40)


def seeds_of(number: int, count: int, in_a_row: int, device: torch.device) -> Tensor:
    """Seeds that are unlike: the splitmix64 sequence from a number on, which goes along with a
    kernel, so that nothing is copied from the host.

    Args:
        number: below 2**62.
        count: how many seeds.
        in_a_row: how many more follow, each 1 above the one before, the first of them unlike the
            others.
        device: of the seeds.
    Returns:
        int64 [count + in_a_row], from 0 on, below 2**62 + ``in_a_row``.
    """
    places = torch.arange(count + in_a_row, device=device)
    unlike = places.clamp(max=count)
    return _shift_right(_mixed((unlike + 1) * _GOLDEN + number), 2) + (places - unlike)


def hashed_dropout(x: Tensor, p: float, seed: Tensor, index: Tensor) -> Tensor:
    """Zero elements with probability ``p``, scale the rest by 1 / (1 - p).

    Args:
        x: of any shape and dtype.
        seed: int64 scalar tensor.
        index: int64, broadcastable to x: the element's place in the whole tensor.
    Returns:
        a tensor of the shape and dtype of ``x``.
    """
    if p >= 1:
        return x * 0
    keep = hash_index(index, seed) >= int(p * 2**24)
    return torch.where(keep, x * (1 / (1 - p)), torch.zeros((), dtype=x.dtype, device=x.device))
