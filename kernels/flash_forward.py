"""Forward of flash attention between queries and keys of known positions, in Triton.

FlashAttention-2 (arXiv 2307.08691, section 3): one program per tile of queries and head, an online
softmax over tiles of keys. Scores are kept in base 2, so that scale and exponential are one fused
multiply-add and one instruction. Tiles that every query sees go through a loop without any mask,
the others through one with it; hidden tiles are in neither (``flash_tiles``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paradyse.kernels.attention_core import empty_like_heads, empty_lse
from paradyse.kernels.attention_mask import AttentionSpec
from paradyse.kernels.flash_pairs import (
    bias_of,
    hash_rows,
    kept_pairs,
    load_keys,
    load_queries,
    load_tile,
    mask_of,
    mask_scores,
    store_tile,
    tanh,
)
from paradyse.kernels.flash_plan import device_configs, launch
from paradyse.kernels.flash_tiles import Visibility, segments_of
from paradyse.kernels.triton_heads import head_of, place_of

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["num_heads", "group", "num_rows", "num_keys", "threshold"])
def _forward_kernel(
    q, k, v, out, lse, mask, pairs, num_heads, group, num_rows, num_keys, threshold,
    C: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head. Late tiles, which see most under a causal mask, go first."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    num_tiles = tl.cdiv(num_rows, BLOCK_M)
    tile, head = place_of(num_tiles)
    tile = num_tiles - 1 - tile
    b, h = head // num_heads, head % num_heads
    mask = mask_of(mask, b, tile, num_tiles, num_rows, num_keys)
    b64, h64, kv_head = b.to(tl.int64), h.to(tl.int64), (h // group).to(tl.int64)
    q, k, v = head_of(q, b64, h64), head_of(k, b64, kv_head), head_of(v, b64, kv_head)
    head_bias = bias_of(pairs, b64, h64)

    start_m = tile * BLOCK_M
    at = start_m + tl.arange(0, BLOCK_M)
    inside = at < num_rows
    q_tile = load_tile(q, start_m, C.STRIDE_Q, inside, C.D, C.BLOCK_D, True, C.WIDEN)
    queries = load_queries(at, inside, mask, num_rows, C, True)
    row_hash = at
    if C.DROPOUT:
        row_hash = hash_rows(pairs, b, h, queries[3], C)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for MASKED in tl.static_range(1 if C.BIAS > 0 else 0, 2):  # full tiles, then partial ones
        count, where = segments_of(mask.table, MASKED)
        for s in range(count):
            begin, end = tl.load(where + 2 * s), tl.load(where + 2 * s + 1)
            for n in tl.range(begin, end, num_stages=C.MASKED_STAGES if MASKED else None):
                start_n = n * BLOCK_N
                key_at = start_n + tl.arange(0, BLOCK_N)
                valid, position, document = load_keys(key_at, mask, num_keys, C, MASKED, False)
                k_tile = load_tile(k, start_n, C.STRIDE_K, valid, C.D, C.BLOCK_D, MASKED, C.WIDEN)
                scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
                if C.SOFTCAP:
                    scores = tanh(scores * pairs.pre)
                if MASKED:
                    if C.HAS_DOCUMENTS:  # not before the product, during which registers are few
                        document = tl.load(mask.key_documents + key_at, mask=valid, other=0)
                    scores, seen = mask_scores(
                        scores, queries, position, document, head_bias, pairs, C, 0
                    )
                    scores = tl.where(seen, scores, -float("inf"))
                now_highest = tl.maximum(highest, tl.max(scores, 1) * pairs.post)
                base = now_highest
                if MASKED:
                    base = tl.where(now_highest == -float("inf"), 0.0, now_highest)
                p = tl.exp2(scores * pairs.post - base[:, None])
                shrink = tl.exp2(highest - base)
                highest = now_highest
                total = total * shrink + tl.sum(p, 1)
                if C.DROPOUT:
                    p = tl.where(kept_pairs(row_hash, position, threshold, 0), p, 0.0)
                acc = acc * shrink[:, None]
                v_tile = load_tile(v, start_n, C.STRIDE_V, valid, C.DV, BLOCK_DV, MASKED, C.WIDEN)
                acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")

    none = total == 0
    scaled = pairs.inv_keep / tl.where(none, 1.0, total)
    acc = tl.where(none[:, None], 0.0, acc * scaled[:, None])
    place = out + ((b64 * num_rows + start_m) * num_heads + h64) * C.DV
    store_tile(place, num_heads * C.DV, acc, inside, C.DV)
    log_total = tl.log2(tl.where(none, 1.0, total))
    value = tl.where(none, -float("inf"), (highest + log_total) * _LN_2)
    tl.store(lse + head.to(tl.int64) * num_rows + at, value, mask=inside)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Attention of a call that ``refusal`` has nothing against.

    Args:
        q, k, v: [B, H, Sq, D], [B, Hk, Sk, D], [B, Hk, Sk, Dv], with adjacent elements along the
            last dim.
        visibility, spec: of this call.
    Returns:
        out [B, H, Sq, Dv] in q's dtype, laid out as [B, Sq, H, Dv], and lse [B, H, Sq] float32.
    """
    out, lse = empty_like_heads(q, v.shape[-1]), empty_lse(q)
    if lse.numel():
        configs = device_configs(q, v, visibility, spec.bias is not None)
        config, programs = configs.forward, q.shape[0] * q.shape[1]
        launch(_forward_kernel, config, programs, (q, k, v), (out, lse), visibility, spec)
    return out, lse
