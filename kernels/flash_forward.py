"""Forward of flash attention between queries and keys of known positions, in Triton.

FlashAttention-2 (arXiv 2307.08691, section 3): one program per tile of queries and head, an online
softmax over tiles of keys. Scores are kept in base 2, so that scale and exponential are one fused
multiply-add and one instruction. Tiles that every query sees go through a loop without any mask,
the others through one with it; hidden tiles are in neither (``flash_tiles``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paradyse.kernels.flash_pairs import (
    add_bias,
    hash_keys,
    head_hash,
    kept_pairs,
    load_keys,
    load_queries,
    load_tile,
    store_tile,
    tanh,
    visible_pairs,
)
from paradyse.kernels.flash_plan import Plan
from paradyse.kernels.flash_tiles import ROW_INTS, segments_of

_ROW_INTS = tl.constexpr(ROW_INTS)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend_tile(
    acc,
    highest,
    total,
    q,
    k,
    v,
    stride_k,
    stride_v,
    start,
    num_keys,
    lo,
    hi,
    row_position,
    row_document,
    row_hash,
    key_positions,
    key_documents,
    bias,
    stride_bias_row,
    stride_bias_key,
    pre,
    post,
    threshold,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    valid, position, document = load_keys(
        start, num_keys, key_positions, key_documents, BLOCK_N, MASKED, False, DROPOUT
    )
    k_tile = load_tile(k, start, stride_k, valid, D, BLOCK_D, BLOCK_N, MASKED, WIDEN)
    scores = tl.dot(q, tl.trans(k_tile), input_precision="ieee")
    if SOFTCAP:
        scores = tanh(scores * pre)
    if MASKED:
        if HAS_DOCUMENTS:  # not before the product, during which registers are few
            at = start + tl.arange(0, BLOCK_N)
            document = tl.load(key_documents + at, mask=valid, other=0)
        seen = visible_pairs(
            lo[:, None],
            hi[:, None],
            row_document[:, None],
            position[None, :],
            document[None, :],
            HAS_LO,
            HAS_DOCUMENTS,
        )
        if BIAS > 0:
            scores, seen = add_bias(
                scores,
                seen,
                bias,
                row_position[:, None],
                position[None, :],
                stride_bias_row,
                stride_bias_key,
                post,
                BIAS,
            )
        scores = tl.where(seen, scores, -float("inf"))
    now_highest = tl.maximum(highest, tl.max(scores, 1) * post)
    base = now_highest
    if MASKED:
        base = tl.where(now_highest == -float("inf"), 0.0, now_highest)
    p = tl.exp2(scores * post - base[:, None])
    shrink = tl.exp2(highest - base)
    total = total * shrink + tl.sum(p, 1)
    if DROPOUT:
        keep = kept_pairs(row_hash[:, None], hash_keys(position)[None, :], threshold)
        p = tl.where(keep, p, 0.0)
    acc = acc * shrink[:, None]
    v_tile = load_tile(v, start, stride_v, valid, DV, BLOCK_DV, BLOCK_N, MASKED, WIDEN)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    return acc, now_highest, total


@triton.jit(do_not_specialize=["num_heads", "group", "num_rows", "num_keys", "threshold"])
def forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    rows,
    row_documents,
    key_positions,
    key_documents,
    table,
    bias,
    seed,
    head_ids,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_ob,
    stride_oh,
    stride_os,
    stride_bias_b,
    stride_bias_h,
    stride_bias_row,
    stride_bias_key,
    num_heads,
    group,
    num_rows,
    num_keys,
    num_masks,
    pre,
    post,
    inv_keep,
    threshold,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    HAS_HEAD_IDS: tl.constexpr,
    WIDEN: tl.constexpr,
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
) -> None:
    """One tile of queries of one head. Late tiles, which see most under a causal mask, go first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1) % num_heads
    b = tl.program_id(1) // num_heads
    mask_b = (b % num_masks).to(tl.int64)
    b64, h64, kv_head = b.to(tl.int64), h.to(tl.int64), (h // group).to(tl.int64)
    q += b64 * stride_qb + h64 * stride_qh
    k += b64 * stride_kb + kv_head * stride_kh
    v += b64 * stride_vb + kv_head * stride_vh
    key_positions += mask_b * num_keys
    key_documents += mask_b * num_keys
    bias += b64 * stride_bias_b + h64 * stride_bias_h
    segments = table + (mask_b * tl.num_programs(0) + tile) * _ROW_INTS

    start_m = tile * BLOCK_M
    at = start_m + tl.arange(0, BLOCK_M)
    inside = at < num_rows
    q_tile = load_tile(q, start_m, STRIDE_Q, inside, D, BLOCK_D, BLOCK_M, True, WIDEN)
    row_documents += mask_b * num_rows
    lo, hi, row_document, row_position = load_queries(
        at, inside, rows, row_documents, num_rows, DROPOUT or BIAS > 0, HAS_LO, HAS_DOCUMENTS
    )
    row_hash = at
    if DROPOUT:
        row_hash = head_hash(seed, b, h, head_ids, row_position, HAS_HEAD_IDS)
        threshold = threshold.to(tl.uint32)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for kind in tl.static_range(1 if BIAS > 0 else 0, 2):  # full tiles, then partial ones
        count, where = segments_of(segments, kind)
        for s in range(count):
            begin, end = tl.load(where + 2 * s), tl.load(where + 2 * s + 1)
            for n in tl.range(begin, end, num_stages=MASKED_STAGES if kind == 1 else None):
                acc, highest, total = _attend_tile(
                    acc, highest, total, q_tile, k, v, STRIDE_K, STRIDE_V, n * BLOCK_N, num_keys,
                    lo, hi, row_position, row_document, row_hash, key_positions, key_documents,
                    bias, stride_bias_row, stride_bias_key, pre, post, threshold,
                    D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, kind == 1, HAS_LO, HAS_DOCUMENTS, SOFTCAP,
                    BIAS, DROPOUT, WIDEN,
                )  # fmt: skip

    none = total == 0
    scaled = inv_keep / tl.where(none, 1.0, total)
    acc = tl.where(none[:, None], 0.0, acc * scaled[:, None])
    place = out + b64 * stride_ob + h64 * stride_oh + start_m.to(tl.int64) * stride_os
    store_tile(place, stride_os, acc, inside, DV, BLOCK_M, BLOCK_DV)
    log_total = tl.log2(tl.where(none, 1.0, total))
    value = tl.where(none, -float("inf"), (highest + log_total) * _LN_2)
    tl.store(lse + tl.program_id(1).to(tl.int64) * num_rows + at, value, mask=inside)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Attention of a call that ``refusal`` has nothing against.

    Args:
        q, k, v: [B, H, Sq, D], [B, Hk, Sk, D], [B, Hk, Sk, Dv], with adjacent elements along the
            last dim. plan: of this call.
    Returns:
        out [B, H, Sq, Dv] in q's dtype, laid out as [B, Sq, H, Dv], and lse [B, H, Sq] float32.
    """
    b, h, n, _ = q.shape
    out = q.new_empty((b, n, h, v.shape[-1])).transpose(1, 2)
    lse = q.new_empty((b, h, n), dtype=torch.float32)
    config = plan.configs.forward
    if lse.numel() == 0:
        return out, lse
    table = plan.segments(config.block_m, config.block_n, transposed=False)
    forward_kernel[(triton.cdiv(n, config.block_m), b * h)](
        q,
        k,
        v,
        out,
        lse,
        *plan.mask_tensors(),
        table,
        *plan.pair_tensors(),
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *out.stride()[:3],
        *plan.bias_strides(),
        h,
        h // k.shape[1],
        n,
        k.shape[2],
        plan.visibility.num_masks,
        *plan.scalars(),
        **config.constants(),
        **plan.constants(),
        STRIDE_Q=q.stride(2),
        STRIDE_K=k.stride(2),
        STRIDE_V=v.stride(2),
        **config.options(),
    )
    return out, lse
