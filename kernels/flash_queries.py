"""Gradients of queries: a program has a tile of queries and steps through keys."""

from __future__ import annotations

import triton
import triton.language as tl

from paradyse.kernels.flash_pairs import hash_keys, hash_rows, kept_pairs, load_tile, probabilities
from paradyse.kernels.flash_tiles import FAR, MAX_SEGMENTS, ROW_INTS

_FAR = tl.constexpr(FAR)
_CAP = tl.constexpr(MAX_SEGMENTS)
_ROW_INTS = tl.constexpr(ROW_INTS)


@triton.jit
def _queries_tile(
    dq,
    q,
    grad,
    k,
    v,
    stride_k,
    stride_v,
    start,
    num_keys,
    base,
    delta,
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
    inv_keep,
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
    at = start + tl.arange(0, BLOCK_N)
    valid = at < num_keys
    position, document = at, at
    if MASKED:
        inside = valid
        position = tl.load(key_positions + at, mask=inside, other=_FAR)
        valid = position < _FAR
        if HAS_DOCUMENTS:
            document = tl.load(key_documents + at, mask=inside, other=0)
    elif DROPOUT:
        position = tl.load(key_positions + at)
    k_tile = load_tile(k, start, stride_k, valid, D, BLOCK_D, BLOCK_N, MASKED, WIDEN)
    scores = tl.dot(q, tl.trans(k_tile), input_precision="ieee")
    p, slope = probabilities(
        scores, base[:, None], lo[:, None], hi[:, None], row_position[:, None],
        row_document[:, None], position[None, :], document[None, :], bias, stride_bias_row,
        stride_bias_key, pre, post, MASKED, HAS_LO, HAS_DOCUMENTS, SOFTCAP, BIAS,
    )  # fmt: skip
    v_tile = load_tile(v, start, stride_v, valid, DV, BLOCK_DV, BLOCK_N, MASKED, WIDEN)
    dp = tl.dot(grad, tl.trans(v_tile), input_precision="ieee")
    if DROPOUT:
        keep = kept_pairs(row_hash[:, None], hash_keys(position)[None, :], threshold)
        dp = tl.where(keep, dp * inv_keep, 0.0)
    ds = p * (dp + delta[:, None])
    if SOFTCAP:
        ds = ds * slope
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["num_heads", "group", "num_rows", "num_keys", "threshold"])
def queries_kernel(
    q,
    k,
    v,
    grad,
    shift,
    delta,
    dq,
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
    scale,
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
    hi = tl.load(rows + num_rows + at, mask=inside, other=-1)
    valid = hi >= 0
    q_tile = load_tile(q, start_m, STRIDE_Q, valid, D, BLOCK_D, BLOCK_M, True, WIDEN)
    g_tile = load_tile(grad, start_m, STRIDE_G, valid, DV, BLOCK_DV, BLOCK_M, True, WIDEN)
    line = tl.program_id(1).to(tl.int64) * num_rows + at
    row_base = tl.load(shift + line, mask=inside, other=-float("inf")) * post
    row_delta = tl.load(delta + line, mask=inside, other=0.0)
    lo, row_document, row_position, row_hash = at, at, at, at
    if HAS_LO:
        lo = tl.load(rows + at, mask=inside, other=_FAR)
    if HAS_DOCUMENTS:
        row_document = tl.load(row_documents + mask_b * num_rows + at, mask=inside, other=0)
    if DROPOUT or BIAS > 0:
        row_position = tl.load(rows + 2 * num_rows + at, mask=inside, other=0)
    if DROPOUT:
        head = h
        if HAS_HEAD_IDS:
            head = tl.load(head_ids + h).to(tl.int32)
        row_hash = hash_rows(tl.load(seed), b, head, row_position)
        threshold = threshold.to(tl.uint32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if BIAS == 0:
        for s in range(tl.load(segments)):
            begin, end = tl.load(segments + 4 + 2 * s), tl.load(segments + 5 + 2 * s)
            for n in range(begin, end):
                acc = _queries_tile(
                    acc, q_tile, g_tile, k, v, STRIDE_K, STRIDE_V, n * BLOCK_N, num_keys,
                    row_base, row_delta, lo, hi, row_position, row_document, row_hash,
                    key_positions, key_documents, bias, stride_bias_row, stride_bias_key, pre,
                    post, inv_keep, threshold, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, False, HAS_LO,
                    HAS_DOCUMENTS, SOFTCAP, BIAS, DROPOUT, WIDEN,
                )  # fmt: skip
    partial = segments + 4 + 2 * _CAP + 2 * tl.load(segments + 1)
    for s in range(tl.load(segments + 2)):
        begin, end = tl.load(partial + 2 * s), tl.load(partial + 2 * s + 1)
        for n in tl.range(begin, end, num_stages=MASKED_STAGES):
            acc = _queries_tile(
                acc, q_tile, g_tile, k, v, STRIDE_K, STRIDE_V, n * BLOCK_N, num_keys,
                row_base, row_delta, lo, hi, row_position, row_document, row_hash,
                key_positions, key_documents, bias, stride_bias_row, stride_bias_key, pre,
                post, inv_keep, threshold, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, True, HAS_LO,
                HAS_DOCUMENTS, SOFTCAP, BIAS, DROPOUT, WIDEN,
            )  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    where = dq + ((b64 * num_rows + start_m) * num_heads + h64) * D
    where += tl.arange(0, BLOCK_M)[:, None] * (num_heads * D) + d[None, :]
    acc = acc * scale
    tl.store(where, acc.to(dq.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])
