# mypy: allow-untyped-defs, allow-incomplete-defs
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

from paradyse.kernels.triton_exchange import tile_options


@triton.jit
def merge_kernel(
    OUT,
    LSE,
    OUT_I,
    LSE_I,
    RESULT,
    RESULT_LSE,
    num_heads,
    num_rows,
    width,
    out_b,
    out_h,
    out_s,
    lse_b,
    lse_h,
    lse_s,
    out_i_b,
    out_i_h,
    out_i_s,
    lse_i_b,
    lse_i_h,
    lse_i_s,
    result_b,
    result_h,
    result_s,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One tile of ROWS rows of one head. RESULT may be OUT; RESULT_LSE is no other's memory."""
    blocks = tl.cdiv(num_rows, ROWS)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b, h = head // num_heads, head % num_heads
    there = row < num_rows
    lse = tl.load(LSE + b * lse_b + h * lse_h + row * lse_s, mask=there, other=0.0)
    lse_i = tl.load(LSE_I + b * lse_i_b + h * lse_i_h + row * lse_i_s, mask=there, other=0.0)
    # Both may be -inf: -inf - -inf is no number.
    highest = tl.maximum(lse, lse_i)
    none = highest == -float("inf")
    shift = tl.where(none, 0.0, highest)
    weight, weight_i = tl.exp(lse - shift), tl.exp(lse_i - shift)
    total = tl.where(none, 1.0, weight + weight_i)
    weight, weight_i = (weight / total)[:, None], (weight_i / total)[:, None]
    tl.store(
        RESULT_LSE + head * num_rows + row,
        tl.where(none, -float("inf"), shift + tl.log(total)),
        mask=there,
    )
    column = tl.arange(0, WIDTH)[None, :]
    inside = there[:, None] & (column < width)
    row = row[:, None]
    out = tl.load(OUT + b * out_b + h * out_h + row * out_s + column, mask=inside, other=0.0)
    out_i = tl.load(
        OUT_I + b * out_i_b + h * out_i_h + row * out_i_s + column, mask=inside, other=0.0
    )
    # Where a side saw nothing its rows are not read: 0 times what lies there may not be 0.
    merged = tl.where(weight > 0, out.to(lse.dtype) * weight, 0.0)
    merged += tl.where(weight_i > 0, out_i.to(lse.dtype) * weight_i, 0.0)
    place = RESULT + b * result_b + h * result_h + row * result_s + column
    tl.store(place, merged.to(RESULT.dtype.element_ty), mask=inside)


def launch_merge(
    out: Tensor, lse: Tensor, out_i: Tensor, lse_i: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``merge``; runs on a CPU under Triton's interpreter."""
    b, h, s, d = out.shape
    in_place = out.dtype == dtype and out.stride(3) == 1 and 0 not in out.stride()[:3]
    result = out if in_place else out.new_empty(b, s, h, d, dtype=dtype).transpose(1, 2)
    result_lse = lse.new_empty(b, h, s)
    if out.numel() == 0:
        return result, result_lse.copy_(torch.logaddexp(lse, lse_i))
    out, out_i = (x if x.stride(3) == 1 else x.contiguous() for x in (out, out_i))
    tile = tile_options(d)
    merge_kernel[(b * h * triton.cdiv(s, tile["ROWS"]),)](
        out, lse, out_i, lse_i, result, result_lse, h, s, d,
        *out.stride()[:3], *lse.stride(), *out_i.stride()[:3], *lse_i.stride(),
        *result.stride()[:3], **tile,
    )  # fmt: skip
    return result, result_lse
