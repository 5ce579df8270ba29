"""``merge`` on a GPU: reads both partial results once, writes their union once.

With lse and lse' the log-sum-exps of the two sets of keys and m their maximum, the weights are
exp(lse - m) and exp(lse' - m) over their sum, and the new log-sum-exp is m plus the log of that
sum: nothing overflows whatever the scores (FlashAttention-2, arXiv 2307.08691, section 2.3).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paradyse.kernels.attention_core import empty_like_heads
from paradyse.kernels.triton_heads import Heads, head_of, tile_options


@triton.jit
def _merge_kernel(
    out, lse, out_i, lse_i, result, result_lse, num_heads, num_rows, width,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One tile of ROWS rows of one head. ``result`` may be ``out``; ``result_lse`` [B, H, S] is no
    other's memory.
    """
    blocks = tl.cdiv(num_rows, ROWS)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b, h = head // num_heads, head % num_heads
    there = row < num_rows
    lse = tl.load(head_of(lse, b, h) + row * lse.stride_s, mask=there, other=0.0)
    lse_i = tl.load(head_of(lse_i, b, h) + row * lse_i.stride_s, mask=there, other=0.0)
    # Both may be -inf: -inf - -inf is no number.
    highest = tl.maximum(lse, lse_i)
    none = highest == -float("inf")
    shift = tl.where(none, 0.0, highest)
    weight, weight_i = tl.exp(lse - shift), tl.exp(lse_i - shift)
    total = tl.where(none, 1.0, weight + weight_i)
    weight, weight_i = (weight / total)[:, None], (weight_i / total)[:, None]
    tl.store(
        result_lse + head * num_rows + row,
        tl.where(none, -float("inf"), shift + tl.log(total)),
        mask=there,
    )
    column = tl.arange(0, WIDTH)[None, :]
    inside = there[:, None] & (column < width)
    row = row[:, None]
    place = head_of(out, b, h) + row * out.stride_s + column
    place_i = head_of(out_i, b, h) + row * out_i.stride_s + column
    x, x_i = tl.load(place, mask=inside, other=0.0), tl.load(place_i, mask=inside, other=0.0)
    # Where a side saw nothing its rows are not read: 0 times what lies there may not be 0.
    merged = tl.where(weight > 0, x.to(lse.dtype) * weight, 0.0)
    merged += tl.where(weight_i > 0, x_i.to(lse.dtype) * weight_i, 0.0)
    place = head_of(result, b, h) + row * result.stride_s + column
    tl.store(place, merged.to(result.first.dtype.element_ty), mask=inside)


def launch_merge(
    out: Tensor, lse: Tensor, out_i: Tensor, lse_i: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``merge`` of ``out``, ``lse``, ``out_i`` and ``lse_i``, for which ``dtype`` is given; runs on
    a CPU under Triton's interpreter.
    """
    b, h, s, d = out.shape
    in_place = out.dtype == dtype and out.stride(3) == 1 and 0 not in out.stride()[:3]
    result = out if in_place else empty_like_heads(out, dtype=dtype)
    result_lse = lse.new_empty(b, h, s)
    if out.numel() == 0:
        return result, result_lse.copy_(torch.logaddexp(lse, lse_i))
    out, out_i = (x if x.stride(3) == 1 else x.contiguous() for x in (out, out_i))
    tile = tile_options(d)
    heads = map(Heads.of, (out, lse, out_i, lse_i, result))
    grid = (b * h * triton.cdiv(s, tile["ROWS"]),)
    _merge_kernel[grid](*heads, result_lse, h, s, d, **tile)
    return result, result_lse
