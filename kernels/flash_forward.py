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

from paradyse.kernels.attention_mask import AttentionSpec
from paradyse.kernels.flash_pairs import (
    hash_keys,
    head_hash,
    kept_pairs,
    load_keys,
    load_queries,
    load_tile,
    mask_scores,
    store_tile,
    tanh,
)
from paradyse.kernels.flash_plan import device_configs, launch
from paradyse.kernels.flash_tiles import ROW_INTS, Visibility, segments_of

_ROW_INTS = tl.constexpr(ROW_INTS)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["num_heads", "group", "num_rows", "num_keys", "threshold"])
def forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    stride_ob,
    stride_oh,
    stride_os,
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
    for MASKED in tl.static_range(1 if BIAS > 0 else 0, 2):  # full tiles, then partial ones
        count, where = segments_of(segments, MASKED)
        for s in range(count):
            begin, end = tl.load(where + 2 * s), tl.load(where + 2 * s + 1)
            for n in tl.range(begin, end, num_stages=MASKED_STAGES if MASKED else None):
                start_n = n * BLOCK_N
                valid, position, document = load_keys(
                    start_n, num_keys, key_positions, key_documents, BLOCK_N, MASKED, False, DROPOUT
                )
                k_tile = load_tile(k, start_n, STRIDE_K, valid, D, BLOCK_D, BLOCK_N, MASKED, WIDEN)
                scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
                if SOFTCAP:
                    scores = tanh(scores * pre)
                if MASKED:
                    if HAS_DOCUMENTS:  # not before the product, during which registers are few
                        key_at = start_n + tl.arange(0, BLOCK_N)
                        document = tl.load(key_documents + key_at, mask=valid, other=0)
                    scores, seen = mask_scores(
                        scores, lo[:, None], hi[:, None], row_position[:, None],
                        row_document[:, None], position[None, :], document[None, :], bias,
                        stride_bias_row, stride_bias_key, post, HAS_LO, HAS_DOCUMENTS, BIAS,
                    )  # fmt: skip
                    scores = tl.where(seen, scores, -float("inf"))
                now_highest = tl.maximum(highest, tl.max(scores, 1) * post)
                base = now_highest
                if MASKED:
                    base = tl.where(now_highest == -float("inf"), 0.0, now_highest)
                p = tl.exp2(scores * post - base[:, None])
                shrink = tl.exp2(highest - base)
                highest = now_highest
                total = total * shrink + tl.sum(p, 1)
                if DROPOUT:
                    keep = kept_pairs(row_hash[:, None], hash_keys(position)[None, :], threshold)
                    p = tl.where(keep, p, 0.0)
                acc = acc * shrink[:, None]
                v_tile = load_tile(
                    v, start_n, STRIDE_V, valid, DV, BLOCK_DV, BLOCK_N, MASKED, WIDEN
                )
                acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")

    none = total == 0
    scaled = inv_keep / tl.where(none, 1.0, total)
    acc = tl.where(none[:, None], 0.0, acc * scaled[:, None])
    place = out + b64 * stride_ob + h64 * stride_oh + start_m.to(tl.int64) * stride_os
    store_tile(place, stride_os, acc, inside, DV, BLOCK_M, BLOCK_DV)
    log_total = tl.log2(tl.where(none, 1.0, total))
    value = tl.where(none, -float("inf"), (highest + log_total) * _LN_2)
    tl.store(lse + tl.program_id(1).to(tl.int64) * num_rows + at, value, mask=inside)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Attention of a call that ``refusal`` has nothing against.

    Args:
        q, k, v: [B, H, Sq, D], [B, Hk, Sk, D], [B, Hk, Sk, Dv], with adjacent elements along the
            last dim. visibility, spec: of this call.
    Returns:
        out [B, H, Sq, Dv] in q's dtype, laid out as [B, Sq, H, Dv], and lse [B, H, Sq] float32.
    """
    b, h, n, _ = q.shape
    out = q.new_empty((b, n, h, v.shape[-1])).transpose(1, 2)
    lse = q.new_empty((b, h, n), dtype=torch.float32)
    if lse.numel():
        config, own = device_configs(q, v, visibility).forward, (out, lse, *out.stride()[:3])
        launch(forward_kernel, config, b * h, (q, k, v), own, visibility, spec)
    return out, lse
