"""Backward of flash attention between queries and keys of known positions, in Triton.

Two kernels (FlashAttention-2, arXiv 2307.08691, section 3.1, without its atomic additions): one has
a tile of keys and steps through the queries that see it, for dk and dv; one has a tile of queries
and steps through keys, for dq. Scores are computed twice, seven products instead of five; in
exchange every sum has one fixed order, so results are the same in every run. Heads of a group share
K and V: their sum is taken in the program, or over float32 parts of a few where keys are few.

``out`` and ``lse`` may be those over more keys than are here, as the ring of arXiv 2310.01889
needs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paradyse.kernels.attention_core import Backward, Grads
from paradyse.kernels.attention_mask import AttentionSpec
from paradyse.kernels.flash_keys import keys_kernel
from paradyse.kernels.flash_pairs import load_tile
from paradyse.kernels.flash_plan import device_configs, launch, padded_width, scalars
from paradyse.kernels.flash_queries import queries_kernel
from paradyse.kernels.flash_tiles import Visibility

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def delta_kernel(
    out,
    grad,
    lse,
    delta,
    shift,
    stride_ob,
    stride_oh,
    stride_os,
    stride_gb,
    stride_gh,
    stride_gs,
    num_heads,
    num_rows,
    post,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Per query what is added to gradients of probabilities, -sum(out * grad_out), and to scores,
    -lse in their units. 0 and -inf where it sees nothing, so that probabilities are 0.
    """
    start = tl.program_id(0) * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < num_rows
    b, h = (tl.program_id(1) // num_heads).to(tl.int64), (tl.program_id(1) % num_heads).to(tl.int64)
    line = tl.program_id(1).to(tl.int64) * num_rows + at
    value = tl.load(lse + line, mask=inside, other=-float("inf"))
    seen = value > -float("inf")
    out += b * stride_ob + h * stride_oh
    grad += b * stride_gb + h * stride_gh
    o = load_tile(out, start, stride_os, seen, DV, BLOCK_DV, BLOCK, True, True)
    g = load_tile(grad, start, stride_gs, seen, DV, BLOCK_DV, BLOCK, True, True)
    tl.store(delta + line, -tl.sum(o * g, 1), mask=inside)
    value = tl.where(seen, value * (-_LOG2_E / post), -float("inf"))
    tl.store(shift + line, value, mask=inside)


def launch_backward(given: Backward, visibility: Visibility, spec: AttentionSpec) -> Grads:
    """Gradients through a call that ``refusal`` has nothing against.

    Args:
        given: ``Backward.readable``. visibility, spec: of this call.
    Returns:
        dq, dk, dv in the dtype of q, each laid out as [B, S, H, D].
    """
    grad_out, q, k, v, out, lse = given
    b, h, n, d = q.shape
    kv_heads, num_keys, dv_width = k.shape[1], k.shape[2], v.shape[-1]
    configs = device_configs(q, v, visibility)
    split = _split(b, h, kv_heads, num_keys, configs.keys.block_n, q.device)
    sums = q.dtype if split == 1 else torch.float32
    dq = q.new_empty((b, n, h, d))
    dk = k.new_empty((split, b, num_keys, kv_heads, d), dtype=sums)
    dv = v.new_empty((split, b, num_keys, kv_heads, dv_width), dtype=sums)
    delta, shift = torch.empty_like(lse), torch.empty_like(lse)
    if lse.numel():
        delta_kernel[(triton.cdiv(n, 64), b * h)](
            out,
            grad_out,
            lse,
            delta,
            shift,
            *out.stride()[:3],
            *grad_out.stride()[:3],
            h,
            n,
            scalars(spec)[1],
            DV=dv_width,
            BLOCK_DV=padded_width(dv_width),
            BLOCK=64,
            enable_fp_fusion=True,
        )
    inputs, call = (q, k, v, grad_out), (visibility, spec)
    if num_keys and b:
        to_keys = (shift, delta, dk, dv, split, spec.scale)
        programs = b * kv_heads * split
        launch(keys_kernel, configs.keys, programs, inputs, to_keys, *call, transposed=True)
    if lse.numel():
        to_queries = (shift, delta, dq, spec.scale)
        launch(queries_kernel, configs.queries, b * h, inputs, to_queries, *call)
    whole_dk, whole_dv = (x[0] if split == 1 else x.sum(0).to(q.dtype) for x in (dk, dv))
    return dq.transpose(1, 2), whole_dk.transpose(1, 2), whole_dv.transpose(1, 2)


def _split(b: int, h: int, kv_heads: int, num_keys: int, block_n: int, device: torch.device) -> int:
    """Programs that share the heads of a group: enough for two per multiprocessor, or all heads."""
    group, programs = h // kv_heads, triton.cdiv(num_keys, block_n) * b * kv_heads
    if device.type != "cuda":
        return min(group, 2) if group % 2 == 0 else 1
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    split = 1
    while split < group and programs * split < wanted:
        split += 1
        while group % split:
            split += 1
    return split
