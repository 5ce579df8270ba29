"""Partial results of attention over disjoint sets of keys, put together.

Order: the reference is ``attention.merge_partials``, the kernel in ``triton_merge``; here is the
choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paradyse.kernels.attention import merge_partials
from paradyse.kernels.attention_core import stat_dtype
from paradyse.torch_private import FakeTensor


def merge(
    out: Tensor,
    lse: Tensor,
    out_i: Tensor,
    lse_i: Tensor,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, in float32 (float64 for float64).

    On CUDA one pass: any of the dtypes goes in, ``dtype`` comes out, and nothing is converted
    beforehand. Not differentiable.

    Args:
        out, lse: [B, H, S, D] of any dtype and [B, H, S] (``stat_dtype``): the keys seen so far.
            ``out`` is overwritten where it already has ``dtype``.
        out_i, lse_i: the same over the other keys. A lse of -inf says that no key was seen.
        dtype: of the result; None: ``stat_dtype``, for a result that is merged again.
    Returns:
        out and lse over all these keys.
    """
    dtype = stat_dtype(out.dtype) if dtype is None else dtype
    if out.is_cuda and not isinstance(out, FakeTensor):
        from paradyse.kernels.triton_merge import launch_merge

        return launch_merge(out, lse, out_i, lse_i, dtype)
    out, lse = merge_partials(out.to(lse.dtype), lse, out_i, lse_i)
    return out.to(dtype), lse
