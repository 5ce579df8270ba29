"""Backward of flash attention between queries and keys of known positions, in Triton.

Two kernels (FlashAttention-2, arXiv 2307.08691, section 3.1, without its atomic additions): one has a
tile of keys and steps through the queries that see it, for dk and dv; one has a tile of queries and
steps through keys, for dq. Scores are computed twice, seven products instead of five; in exchange
every sum has one fixed order, so results are the same in every run. Heads of a group share K and V:
their sum is taken in the program, or over a few programs' float32 parts where keys are few.

``out`` and ``lse`` may be those over more keys than are here, as the ring of arXiv 2310.01889 needs.
"""

from __future__ import annotations


import torch
import triton
import triton.language as tl
from torch import Tensor

from paradyse.kernels.flash_pairs import (
    add_bias,
    hash_keys,
    hash_rows,
    kept_pairs,
    load_tile,
    tanh,
    visible_pairs,
)
from paradyse.kernels.flash_plan import Plan, padded_width
from paradyse.kernels.flash_tiles import FAR, MAX_SEGMENTS, ROW_INTS

_FAR = tl.constexpr(FAR)
_CAP = tl.constexpr(MAX_SEGMENTS)
_ROW_INTS = tl.constexpr(ROW_INTS)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def delta_kernel(
    out,
    grad,
    lse,
    grad_lse,
    delta,
    lse2,
    stride_ob,
    stride_oh,
    stride_os,
    stride_gb,
    stride_gh,
    stride_gs,
    num_heads,
    num_rows,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
) -> None:
    """Per query sum(out * grad_out) - grad_lse, and lse in base 2; 0 and inf where it sees nothing,
    so that its probabilities come out as 0.
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
    total = tl.sum(o * g, 1)
    if HAS_GRAD_LSE:
        total -= tl.load(grad_lse + line, mask=seen, other=0.0)
    tl.store(delta + line, total, mask=inside)
    tl.store(lse2 + line, tl.where(seen, value * _LOG2_E, float("inf")), mask=inside)


@triton.jit
def _pair_gradients(
    scores,
    dp,
    lse2,
    delta,
    lo,
    hi,
    row_position,
    row_document,
    row_hash,
    key_position,
    key_document,
    bias,
    stride_bias_row,
    stride_bias_key,
    pre,
    post,
    inv_keep,
    threshold,
    MASKED: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Probabilities after dropout, and gradients of the products q k up to ``scale``. Values per row
    and key broadcast against the tile, which may be transposed.
    """
    if SOFTCAP:
        scores = tanh(scores * pre)
        slope = 1.0 - scores * scores
    seen = True
    if MASKED:
        seen = visible_pairs(lo, hi, row_document, key_position, key_document, HAS_LO, HAS_DOCUMENTS)
        if BIAS > 0:
            scores, seen = add_bias(
                scores,
                seen,
                bias,
                row_position,
                key_position,
                stride_bias_row,
                stride_bias_key,
                post,
                BIAS,
            )
    p = tl.exp2(scores * post - lse2)
    if MASKED:
        p = tl.where(seen, p, 0.0)
    dropped = p
    if DROPOUT:
        keep = kept_pairs(row_hash, hash_keys(key_position), threshold)
        dropped = tl.where(keep, p * inv_keep, 0.0)
        dp = tl.where(keep, dp * inv_keep, 0.0)
    ds = p * (dp - delta)
    if SOFTCAP:
        ds = ds * slope
    return dropped, ds


@triton.jit
def _keys_tile(
    dk,
    dv,
    k,
    v,
    q,
    grad,
    stride_q,
    stride_g,
    start,
    num_rows,
    key_position,
    key_document,
    lse2,
    delta,
    rows,
    row_documents,
    seed,
    b,
    head,
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
    BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    at = start + tl.arange(0, BLOCK_M)
    valid = at < num_rows
    lo, hi, document, position, row_hash = at, at, at, at, at
    if MASKED:
        inside = valid
        hi = tl.load(rows + num_rows + at, mask=inside, other=-1)
        valid = hi >= 0
        if HAS_LO:
            lo = tl.load(rows + at, mask=inside, other=_FAR)
        if HAS_DOCUMENTS:
            document = tl.load(row_documents + at, mask=inside, other=0)
        row_lse2 = tl.load(lse2 + at, mask=inside, other=float("inf"))
        row_delta = tl.load(delta + at, mask=inside, other=0.0)
    else:
        row_lse2 = tl.load(lse2 + at)
        row_delta = tl.load(delta + at)
    if DROPOUT or BIAS > 0:
        position = tl.load(rows + 2 * num_rows + at, mask=at < num_rows, other=0)
    if DROPOUT:
        row_hash = hash_rows(seed, b, head, position)
    q_tile = load_tile(q, start, stride_q, valid, D, BLOCK_D, BLOCK_M, MASKED, WIDEN)
    scores = tl.dot(k, tl.trans(q_tile), input_precision="ieee")
    g_tile = load_tile(grad, start, stride_g, valid, DV, BLOCK_DV, BLOCK_M, MASKED, WIDEN)
    dp = tl.dot(v, tl.trans(g_tile), input_precision="ieee")
    p, ds = _pair_gradients(
        scores, dp, row_lse2[None, :], row_delta[None, :], lo[None, :], hi[None, :],
        position[None, :], document[None, :], row_hash[None, :], key_position[:, None],
        key_document[:, None], bias, stride_bias_row, stride_bias_key, pre, post, inv_keep,
        threshold, MASKED, HAS_LO, HAS_DOCUMENTS, SOFTCAP, BIAS, DROPOUT,
    )  # fmt: skip
    dv = tl.dot(p.to(g_tile.dtype), g_tile, dv, input_precision="ieee")
    dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit(
    do_not_specialize=["num_heads", "group", "split", "num_rows", "num_keys", "threshold"]
)
def keys_kernel(
    q,
    k,
    v,
    grad,
    lse2,
    delta,
    dk,
    dv,
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
    stride_qs,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_gb,
    stride_gh,
    stride_gs,
    stride_bias_b,
    stride_bias_h,
    stride_bias_row,
    stride_bias_key,
    num_heads,
    group,
    split,
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
    HAS_LO: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    HAS_HEAD_IDS: tl.constexpr,
    WIDEN: tl.constexpr,
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
    key_position = tl.load(key_positions + at, mask=inside, other=_FAR)
    valid = key_position < _FAR
    key_document = at
    if HAS_DOCUMENTS:
        key_document = tl.load(key_documents + at, mask=inside, other=0)
    k += b64 * stride_kb + kv64 * stride_kh
    v += b64 * stride_vb + kv64 * stride_vh
    k_tile = load_tile(k, start_n, stride_ks, valid, D, BLOCK_D, BLOCK_N, True, WIDEN)
    v_tile = load_tile(v, start_n, stride_vs, valid, DV, BLOCK_DV, BLOCK_N, True, WIDEN)
    seed_value = 0
    if DROPOUT:
        seed_value = tl.load(seed)
        threshold = threshold.to(tl.uint32)
    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    heads = group // split
    for i in range(0, heads):
        h = kv_head * group + part * heads + i
        h64 = h.to(tl.int64)
        head = h
        if DROPOUT and HAS_HEAD_IDS:
            head = tl.load(head_ids + h).to(tl.int32)
        line = (b64 * num_heads + h64) * num_rows
        head_q = q + b64 * stride_qb + h64 * stride_qh
        head_g = grad + b64 * stride_gb + h64 * stride_gh
        head_bias = bias + b64 * stride_bias_b + h64 * stride_bias_h
        if BIAS == 0:
            for s in range(0, tl.load(segments)):
                begin = tl.load(segments + 4 + 2 * s)
                end = tl.load(segments + 5 + 2 * s)
                for m in range(begin, end):
                    dk_tile, dv_tile = _keys_tile(
                        dk_tile, dv_tile, k_tile, v_tile, head_q, head_g, stride_qs, stride_gs,
                        m * BLOCK_M, num_rows, key_position, key_document, lse2 + line,
                        delta + line, rows, row_documents, seed_value, b, head, head_bias,
                        stride_bias_row, stride_bias_key, pre, post, inv_keep, threshold,
                        D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, False, HAS_LO, HAS_DOCUMENTS, SOFTCAP,
                        BIAS, DROPOUT, WIDEN,
                    )  # fmt: skip
        partial = segments + 4 + 2 * _CAP + 2 * tl.load(segments + 1)
        for s in range(0, tl.load(segments + 2)):
            begin, end = tl.load(partial + 2 * s), tl.load(partial + 2 * s + 1)
            for m in range(begin, end):
                dk_tile, dv_tile = _keys_tile(
                    dk_tile, dv_tile, k_tile, v_tile, head_q, head_g, stride_qs, stride_gs,
                    m * BLOCK_M, num_rows, key_position, key_document, lse2 + line,
                    delta + line, rows, row_documents, seed_value, b, head, head_bias,
                    stride_bias_row, stride_bias_key, pre, post, inv_keep, threshold,
                    D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, True, HAS_LO, HAS_DOCUMENTS, SOFTCAP,
                    BIAS, DROPOUT, WIDEN,
                )  # fmt: skip
    # dk and dv are contiguous: [split, B, Sk, Hk, D].
    batches = tl.num_programs(1) // (split * kv_heads)
    token = ((part * batches + b).to(tl.int64) * num_keys + start_n) * kv_heads + kv_head
    line_d, line_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    steps = tl.arange(0, BLOCK_N)[:, None] * kv_heads
    where_k = dk + token * D + steps * D + line_d[None, :]
    where_v = dv + token * DV + steps * DV + line_dv[None, :]
    dk_tile = dk_tile * scale
    keep_k, keep_v = inside[:, None] & (line_d < D)[None, :], inside[:, None] & (line_dv < DV)[None, :]
    tl.store(where_k, dk_tile.to(dk.dtype.element_ty), mask=keep_k)
    tl.store(where_v, dv_tile.to(dv.dtype.element_ty), mask=keep_v)


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
    lse2,
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
    v_tile = load_tile(v, start, stride_v, valid, DV, BLOCK_DV, BLOCK_N, MASKED, WIDEN)
    dp = tl.dot(grad, tl.trans(v_tile), input_precision="ieee")
    _, ds = _pair_gradients(
        scores, dp, lse2[:, None], delta[:, None], lo[:, None], hi[:, None],
        row_position[:, None], row_document[:, None], row_hash[:, None], position[None, :],
        document[None, :], bias, stride_bias_row, stride_bias_key, pre, post, inv_keep,
        threshold, MASKED, HAS_LO, HAS_DOCUMENTS, SOFTCAP, BIAS, DROPOUT,
    )  # fmt: skip
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["num_heads", "group", "num_rows", "num_keys", "threshold"])
def queries_kernel(
    q,
    k,
    v,
    grad,
    lse2,
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
    stride_qs,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_gb,
    stride_gh,
    stride_gs,
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
    HAS_LO: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    HAS_HEAD_IDS: tl.constexpr,
    WIDEN: tl.constexpr,
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
    q_tile = load_tile(q, start_m, stride_qs, valid, D, BLOCK_D, BLOCK_M, True, WIDEN)
    g_tile = load_tile(grad, start_m, stride_gs, valid, DV, BLOCK_DV, BLOCK_M, True, WIDEN)
    line = tl.program_id(1).to(tl.int64) * num_rows + at
    row_lse2 = tl.load(lse2 + line, mask=inside, other=float("inf"))
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
        for s in range(0, tl.load(segments)):
            begin, end = tl.load(segments + 4 + 2 * s), tl.load(segments + 5 + 2 * s)
            for n in range(begin, end):
                acc = _queries_tile(
                    acc, q_tile, g_tile, k, v, stride_ks, stride_vs, n * BLOCK_N, num_keys,
                    row_lse2, row_delta, lo, hi, row_position, row_document, row_hash,
                    key_positions, key_documents, bias, stride_bias_row, stride_bias_key, pre,
                    post, inv_keep, threshold, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, False, HAS_LO,
                    HAS_DOCUMENTS, SOFTCAP, BIAS, DROPOUT, WIDEN,
                )  # fmt: skip
    partial = segments + 4 + 2 * _CAP + 2 * tl.load(segments + 1)
    for s in range(0, tl.load(segments + 2)):
        begin, end = tl.load(partial + 2 * s), tl.load(partial + 2 * s + 1)
        for n in range(begin, end):
            acc = _queries_tile(
                acc, q_tile, g_tile, k, v, stride_ks, stride_vs, n * BLOCK_N, num_keys,
                row_lse2, row_delta, lo, hi, row_position, row_document, row_hash,
                key_positions, key_documents, bias, stride_bias_row, stride_bias_key, pre,
                post, inv_keep, threshold, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, True, HAS_LO,
                HAS_DOCUMENTS, SOFTCAP, BIAS, DROPOUT, WIDEN,
            )  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    where = dq + ((b64 * num_rows + start_m) * num_heads + h64) * D
    where += tl.arange(0, BLOCK_M)[:, None] * (num_heads * D) + d[None, :]
    acc = acc * scale
    tl.store(where, acc.to(dq.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])


def launch_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, each laid out as [B, S, H, D]. ``lse`` and ``grad_lse`` contiguous float32."""
    b, h, n, d = q.shape
    kv_heads, num_keys, dv_width = k.shape[1], k.shape[2], v.shape[-1]
    configs, constants = plan.configs, plan.constants()
    split = _split(b, h, kv_heads, num_keys, configs.keys.block_n, q.device)
    sums = q.dtype if split == 1 else torch.float32
    dq = q.new_empty((b, n, h, d))
    dk = k.new_empty((split, b, num_keys, kv_heads, d), dtype=sums)
    dv = v.new_empty((split, b, num_keys, kv_heads, dv_width), dtype=sums)
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    if lse.numel():
        delta_kernel[(triton.cdiv(n, 64), b * h)](
            out,
            grad_out,
            lse,
            lse if grad_lse is None else grad_lse,
            delta,
            lse2,
            *out.stride()[:3],
            *grad_out.stride()[:3],
            h,
            n,
            DV=dv_width,
            BLOCK_DV=padded_width(dv_width),
            BLOCK=64,
            HAS_GRAD_LSE=grad_lse is not None,
            enable_fp_fusion=True,
        )
    tensors, statistics = (q, k, v, grad_out), (lse2, delta)
    strides = [s for x in tensors for s in x.stride()[:3]]
    masks, pairs, bias_strides = plan.mask_tensors(), plan.pair_tensors(), plan.bias_strides()
    sizes = (n, num_keys, plan.visibility.num_masks, *plan.scalars(), plan.spec.scale)
    group = h // kv_heads
    config = configs.keys
    if num_keys and b:
        keys_kernel[(triton.cdiv(num_keys, config.block_n), b * kv_heads * split)](
            *tensors,
            *statistics,
            dk,
            dv,
            *masks,
            plan.segments(config.block_m, config.block_n, transposed=True),
            *pairs,
            *strides,
            *bias_strides,
            h,
            group,
            split,
            *sizes,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            **constants,
            **config.options(),
        )
    config = configs.queries
    if lse.numel():
        queries_kernel[(triton.cdiv(n, config.block_m), b * h)](
            *tensors,
            *statistics,
            dq,
            *masks,
            plan.segments(config.block_m, config.block_n, transposed=False),
            *pairs,
            *strides,
            *bias_strides,
            h,
            group,
            *sizes,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            **constants,
            **config.options(),
        )
    whole_dk, whole_dv = (x[0] if split == 1 else x.sum(0).to(q.dtype) for x in (dk, dv))
    return dq.transpose(1, 2), whole_dk.transpose(1, 2), whole_dv.transpose(1, 2)


def _split(
    b: int, h: int, kv_heads: int, num_keys: int, block_n: int, device: torch.device
) -> int:
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
