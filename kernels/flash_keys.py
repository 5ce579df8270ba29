"""Gradients of keys and values: a program has a tile of keys and steps through queries."""

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


@triton.jit(do_not_specialize=["num_heads", "group", "split", "num_rows", "num_keys", "threshold"])
def keys_kernel(
    q,
    k,
    v,
    grad,
    shift,
    delta,
    dk,
    dv,
    split,
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
    """dk [split, B, Sk, Hk, D] and dv of one tile of keys, through ``group / split`` heads."""
    tile = tl.program_id(0)
    part = tl.program_id(1) % split
    kv_heads = num_heads // group
    kv_head = tl.program_id(1) // split % kv_heads
    b = tl.program_id(1) // split // kv_heads
    mask_b = (b % num_masks).to(tl.int64)
    b64, kv64 = b.to(tl.int64), kv_head.to(tl.int64)
    key_positions += mask_b * num_keys
    key_documents += mask_b * num_keys
    row_documents += mask_b * num_rows
    segments = table + (mask_b * tl.num_programs(0) + tile) * _ROW_INTS
    start_n = tile * BLOCK_N
    at = start_n + tl.arange(0, BLOCK_N)
    inside = at < num_keys
    valid, key_position, key_document = load_keys(
        start_n, num_keys, key_positions, key_documents, BLOCK_N, True, HAS_DOCUMENTS, DROPOUT
    )
    k += b64 * stride_kb + kv64 * stride_kh
    v += b64 * stride_vb + kv64 * stride_vh
    k_tile = load_tile(k, start_n, STRIDE_K, valid, D, BLOCK_D, BLOCK_N, True, WIDEN)
    v_tile = load_tile(v, start_n, STRIDE_V, valid, DV, BLOCK_DV, BLOCK_N, True, WIDEN)
    if DROPOUT:
        threshold = threshold.to(tl.uint32)
    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    heads = group // split
    NEEDS_POSITION: tl.constexpr = DROPOUT or BIAS > 0
    for i in range(heads):
        h = kv_head * group + part * heads + i
        h64 = h.to(tl.int64)
        line = (b64 * num_heads + h64) * num_rows
        head_q = q + b64 * stride_qb + h64 * stride_qh
        head_g = grad + b64 * stride_gb + h64 * stride_gh
        head_bias = bias + b64 * stride_bias_b + h64 * stride_bias_h
        for MASKED in tl.static_range(1 if BIAS > 0 else 0, 2):  # full tiles, then partial ones
            count, where = segments_of(segments, MASKED)
            for s in range(count):
                begin, end = tl.load(where + 2 * s), tl.load(where + 2 * s + 1)
                for m in tl.range(begin, end, num_stages=MASKED_STAGES if MASKED else None):
                    start_m = m * BLOCK_M
                    row_at = start_m + tl.arange(0, BLOCK_M)
                    there = row_at < num_rows
                    lo, hi, document, position = row_at, row_at, row_at, row_at
                    if MASKED:
                        lo, hi, document, position = load_queries(
                            row_at, there, rows, row_documents, num_rows, NEEDS_POSITION, HAS_LO,
                            HAS_DOCUMENTS,
                        )  # fmt: skip
                        row_shift = tl.load(shift + line + row_at, mask=there, other=-float("inf"))
                        row_delta = tl.load(delta + line + row_at, mask=there, other=0.0)
                        there = row_shift > -float("inf")
                    else:
                        if NEEDS_POSITION:
                            position = tl.load(rows + 2 * num_rows + row_at)
                        row_shift = tl.load(shift + line + row_at)
                        row_delta = tl.load(delta + line + row_at)
                    # In this orientation a thread has many queries. Products that start from shift
                    # and delta need no register for either.
                    if SOFTCAP or BIAS == 2:
                        scores = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                        base = (row_shift * post)[None, :]
                    else:
                        scores = tl.broadcast_to(row_shift[None, :], [BLOCK_N, BLOCK_M])
                        base = 0.0
                    if DROPOUT:
                        row_hash = head_hash(seed, b, h, head_ids, position, HAS_HEAD_IDS)
                    q_tile = load_tile(
                        head_q, start_m, STRIDE_Q, there, D, BLOCK_D, BLOCK_M, MASKED, WIDEN
                    )
                    scores = tl.dot(k_tile, tl.trans(q_tile), scores, input_precision="ieee")
                    p, slope = probabilities(
                        scores, base, lo[None, :], hi[None, :], position[None, :],
                        document[None, :], key_position[:, None], key_document[:, None], head_bias,
                        stride_bias_row, stride_bias_key, pre, post, MASKED, HAS_LO, HAS_DOCUMENTS,
                        SOFTCAP, BIAS,
                    )  # fmt: skip
                    g_tile = load_tile(
                        head_g, start_m, STRIDE_G, there, DV, BLOCK_DV, BLOCK_M, MASKED, WIDEN
                    )
                    if DROPOUT:
                        key_hash = hash_keys(key_position)
                        keep = kept_pairs(row_hash[None, :], key_hash[:, None], threshold)
                        dropped = tl.where(keep, p * inv_keep, 0.0)
                    else:
                        dropped = p
                    dv_tile = tl.dot(
                        dropped.to(g_tile.dtype), g_tile, dv_tile, input_precision="ieee"
                    )
                    if DROPOUT:
                        dp = tl.dot(v_tile, tl.trans(g_tile), input_precision="ieee")
                        ds = p * (tl.where(keep, dp * inv_keep, 0.0) + row_delta[None, :])
                    else:
                        dp = tl.broadcast_to(row_delta[None, :], [BLOCK_N, BLOCK_M])
                        ds = p * tl.dot(v_tile, tl.trans(g_tile), dp, input_precision="ieee")
                    if SOFTCAP:
                        ds = ds * slope
                    dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile, input_precision="ieee")
    # dk and dv are contiguous: [split, B, Sk, Hk, D].
    batches = tl.num_programs(1) // (split * kv_heads)
    token = ((part * batches + b).to(tl.int64) * num_keys + start_n) * kv_heads + kv_head
    store_tile(dk + token * D, kv_heads * D, dk_tile * scale, inside, D, BLOCK_N, BLOCK_D)
    store_tile(dv + token * DV, kv_heads * DV, dv_tile, inside, DV, BLOCK_N, BLOCK_DV)
