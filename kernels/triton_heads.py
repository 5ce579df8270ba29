"""How Triton kernels take a tensor of heads, and how many rows of it a program copies."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Elements that one program copies."""


class Heads(NamedTuple):
    """A tensor [B, H, S, D] with adjacent elements along D, or [B, H, S]; strides in elements."""

    first: Tensor
    """Inside a kernel, the address of its first element."""
    stride_b: int
    stride_h: int
    stride_s: int

    @classmethod
    def of(cls, x: Tensor) -> Heads:
        """``x`` as a kernel's argument."""
        return cls(x, *x.stride()[:3])


@triton.jit
def head_of(x, b, h):
    """Where head ``h`` of sequence ``b``, both int64, of the ``Heads`` ``x`` begins."""
    return x.first + b * x.stride_b + h * x.stride_h


@triton.jit
def place_of(num_tiles):
    """Tile of its head, and head, of this program, of ``num_tiles`` a head. Grids have one dim, as
    there may be more heads of all sequences than the 65,535 programs that the others can have."""
    return tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles


def tile_options(width: int) -> dict[str, int]:
    """Options of a launch: rows and columns of a program's tile of rows of ``width`` elements."""
    columns = triton.next_power_of_2(max(width, 1))
    # Fusion is set because its default depends on Triton's version.
    return {"ROWS": max(1, TILE // columns), "WIDTH": columns, "enable_fp_fusion": True}
