"""Gradients of queries: a program has a tile of queries and steps through keys."""

from __future__ import annotations

import triton
import triton.language as tl

from paradyse.kernels.flash_pairs import (
    hash_keys,
    head_hash,
    kept_pairs,
    load_keys,
    load_queries,
    load_tile,
    probabilities,
    store_tile,
)
from paradyse.kernels.flash_tiles import ROW_INTS, segments_of

_ROW_INTS = tl.constexpr(ROW_INTS)


@triton.jit(do_not_specialize=["num_heads", "group", "num_rows", "num_keys", "threshold"])
def queries_kernel(
    q,
    k,
    v,
    grad,
    shift,
    delta,
    dq,
    scale,
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
    stride_gb,
    stride_gh,
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
    STRIDE_G: tl.constexpr,
) -> None:
    """dq [B, Sq, H, D] of one tile of queries of one head."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1) % num_heads
    b = tl.program_id(1) // num_heads
    mask_b = (b % num_masks).to(tl.int64)
    b64, h64, kv_head = b.to(tl.int64), h.to(tl.int64), (h // group).to(tl.int64)
    q += b64 * stride_qb + h64 * stride_qh
    grad += b64 * stride_gb + h64 * stride_gh
    k += b64 * stride_kb + kv_head * stride_kh
    v += b64 * stride_vb + kv_head * stride_vh
    key_positions += mask_b * num_keys
    key_documents += mask_b * num_keys
    bias += b64 * stride_bias_b + h64 * stride_bias_h
    segments = table + (mask_b * tl.num_programs(0) + tile) * _ROW_INTS
    start_m = tile * BLOCK_M
    at = start_m + tl.arange(0, BLOCK_M)
    inside = at < num_rows
    row_documents += mask_b * num_rows
    lo, hi, row_document, row_position = load_queries(
        at, inside, rows, row_documents, num_rows, DROPOUT or BIAS > 0, HAS_LO, HAS_DOCUMENTS
    )
    valid = hi >= 0
    q_tile = load_tile(q, start_m, STRIDE_Q, valid, D, BLOCK_D, BLOCK_M, True, WIDEN)
    g_tile = load_tile(grad, start_m, STRIDE_G, valid, DV, BLOCK_DV, BLOCK_M, True, WIDEN)
    line = tl.program_id(1).to(tl.int64) * num_rows + at
    row_base = tl.load(shift + line, mask=inside, other=-float("inf")) * post
    row_delta = tl.load(delta + line, mask=inside, other=0.0)
    row_hash = at
    if DROPOUT:
        row_hash = head_hash(seed, b, h, head_ids, row_position, HAS_HEAD_IDS)
        threshold = threshold.to(tl.uint32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for MASKED in tl.static_range(1 if BIAS > 0 else 0, 2):  # full tiles, then partial ones
        count, where = segments_of(segments, MASKED)
        for s in range(count):
            begin, end = tl.load(where + 2 * s), tl.load(where + 2 * s + 1)
            for n in tl.range(begin, end, num_stages=MASKED_STAGES if MASKED else None):
                start_n = n * BLOCK_N
                there, position, document = load_keys(
                    start_n, num_keys, key_positions, key_documents, BLOCK_N, MASKED,
                    HAS_DOCUMENTS, DROPOUT,
                )  # fmt: skip
                k_tile = load_tile(k, start_n, STRIDE_K, there, D, BLOCK_D, BLOCK_N, MASKED, WIDEN)
                scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
                p, slope = probabilities(
                    scores, row_base[:, None], lo[:, None], hi[:, None], row_position[:, None],
                    row_document[:, None], position[None, :], document[None, :], bias,
                    stride_bias_row, stride_bias_key, pre, post, MASKED, HAS_LO, HAS_DOCUMENTS,
                    SOFTCAP, BIAS,
                )  # fmt: skip
                v_tile = load_tile(
                    v, start_n, STRIDE_V, there, DV, BLOCK_DV, BLOCK_N, MASKED, WIDEN
                )
                dp = tl.dot(g_tile, tl.trans(v_tile), input_precision="ieee")
                if DROPOUT:
                    keep = kept_pairs(row_hash[:, None], hash_keys(position)[None, :], threshold)
                    dp = tl.where(keep, dp * inv_keep, 0.0)
                ds = p * (dp + row_delta[:, None])
                if SOFTCAP:
                    ds = ds * slope
                acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision="ieee")
    place = dq + ((b64 * num_rows + start_m) * num_heads + h64) * D
    store_tile(place, num_heads * D, acc * scale, inside, D, BLOCK_M, BLOCK_D)
