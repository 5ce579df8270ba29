"""Backward of flash attention between queries and keys of known positions, in Triton.

Two kernels (FlashAttention-2, arXiv 2307.08691, section 3.1, without its atomic additions): one has
a tile of keys and steps through the queries that see it, for dk and dv; one has a tile of queries
and steps through keys, for dq. Scores are computed twice, seven products instead of five; in
exchange every sum has one fixed order, so results are the same in every run. Wide heads compute dk
and dv one after the other, eight products, in tiles large enough for wgmma. Heads of a group share
K and V: their sum is taken in the program, or over float32 parts of a few where keys are few.

``out`` and ``lse`` may be those over more keys than are here, as the ring of arXiv 2310.01889
needs.

What both kernels take besides what ``flash_pairs`` tells of: ``shift`` and ``delta`` as
``_delta_kernel`` writes them, and the ``scale`` of the scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paradyse.kernels.attention_core import Backward, Grads, empty_like_heads
from paradyse.kernels.attention_mask import AttentionSpec
from paradyse.kernels.flash_pairs import (
    bias_of,
    hash_rows,
    kept_pairs,
    load_keys,
    load_queries,
    load_tile,
    mask_of,
    probabilities,
    store_tile,
)
from paradyse.kernels.flash_plan import device_configs, launch, padded_width, scalars, sums_of_keys
from paradyse.kernels.flash_tiles import Visibility, segments_of
from paradyse.kernels.triton_heads import Heads, head_of, place_of

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _delta_kernel(
    out, grad, lse, delta, shift, num_heads, num_rows, post,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per query what is added to gradients of probabilities, -sum(out * grad_out), and to scores,
    -lse in their units. 0 and -inf where it sees nothing, so that probabilities are 0.
    """
    tile, head = place_of(tl.cdiv(num_rows, BLOCK))
    start = tile * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < num_rows
    b, h = (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64)
    line = head.to(tl.int64) * num_rows + at
    value = tl.load(lse + line, mask=inside, other=-float("inf"))
    seen = value > -float("inf")
    o = load_tile(head_of(out, b, h), start, out.stride_s, seen, DV, BLOCK_DV, True, True)
    g = load_tile(head_of(grad, b, h), start, grad.stride_s, seen, DV, BLOCK_DV, True, True)
    tl.store(delta + line, -tl.sum(o * g, 1), mask=inside)
    value = tl.where(seen, value * (-_LOG2_E / post), -float("inf"))
    tl.store(shift + line, value, mask=inside)


@triton.jit(do_not_specialize=["num_heads", "group", "split", "num_rows", "num_keys", "threshold"])
def _keys_kernel(
    q, k, v, grad, shift, delta, dk, dv, split, scale, mask, pairs, num_heads, group, num_rows,
    num_keys, threshold, C: tl.constexpr,
):  # fmt: skip
    """``dk`` [split, B, Sk, Hk, D] and ``dv`` of one tile of keys, through ``group / split``
    heads, for which it steps through queries. By ``C.SUM_DK`` and ``C.SUM_DV``: only one of them.
    """
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_D: tl.constexpr = C.BLOCK_D
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    num_tiles = tl.cdiv(num_keys, BLOCK_N)
    tile, program = place_of(num_tiles)
    part = program % split
    kv_heads = num_heads // group
    kv_head = program // split % kv_heads
    b = program // split // kv_heads
    mask = mask_of(mask, b, tile, num_tiles, num_rows, num_keys)
    b64, kv64 = b.to(tl.int64), kv_head.to(tl.int64)
    k, v = head_of(k, b64, kv64), head_of(v, b64, kv64)
    start_n = tile * BLOCK_N
    at = start_n + tl.arange(0, BLOCK_N)
    valid, key_position, key_document = load_keys(at, mask, num_keys, C, True, C.HAS_DOCUMENTS)
    k_tile = load_tile(k, start_n, C.STRIDE_K, valid, C.D, BLOCK_D, True, C.WIDEN)
    if C.SUM_DK:
        v_tile = load_tile(v, start_n, C.STRIDE_V, valid, C.DV, BLOCK_DV, True, C.WIDEN)
        dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if C.SUM_DV:
        dv_tile = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    heads = group // split
    for i in range(heads):
        h = kv_head * group + part * heads + i
        h64 = h.to(tl.int64)
        line = (b64 * num_heads + h64) * num_rows
        head_q, head_g = head_of(q, b64, h64), head_of(grad, b64, h64)
        head_bias = bias_of(pairs, b64, h64)
        for MASKED in tl.static_range(1 if C.BIAS > 0 else 0, 2):  # full tiles, then partial ones
            count, where = segments_of(mask.table, MASKED)
            for s in range(count):
                begin, end = tl.load(where + 2 * s), tl.load(where + 2 * s + 1)
                for m in tl.range(begin, end, num_stages=C.MASKED_STAGES if MASKED else None):
                    start_m = m * BLOCK_M
                    row_at = start_m + tl.arange(0, BLOCK_M)
                    there = row_at < num_rows
                    queries = load_queries(row_at, there, mask, num_rows, C, MASKED)
                    if MASKED:
                        row_shift = tl.load(shift + line + row_at, mask=there, other=-float("inf"))
                        row_delta = tl.load(delta + line + row_at, mask=there, other=0.0)
                        there = row_shift > -float("inf")
                    else:
                        row_shift = tl.load(shift + line + row_at)
                        row_delta = tl.load(delta + line + row_at)
                    # In this orientation a thread has many queries. Products that start from shift
                    # and delta need no register for either.
                    if C.SOFTCAP or C.BIAS == 2:
                        scores = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                        base = (row_shift * pairs.post)[None, :]
                    else:
                        scores = tl.broadcast_to(row_shift[None, :], [BLOCK_N, BLOCK_M])
                        base = 0.0
                    q_tile = load_tile(
                        head_q, start_m, C.STRIDE_Q, there, C.D, BLOCK_D, MASKED, C.WIDEN
                    )
                    scores = tl.dot(k_tile, tl.trans(q_tile), scores, input_precision="ieee")
                    p, slope = probabilities(
                        scores, base, queries, key_position, key_document, head_bias, pairs, C,
                        MASKED, 1,
                    )  # fmt: skip
                    g_tile = load_tile(
                        head_g, start_m, C.STRIDE_G, there, C.DV, BLOCK_DV, MASKED, C.WIDEN
                    )
                    if C.DROPOUT:
                        row_hash = hash_rows(pairs, b, h, queries[3], C)
                        keep = kept_pairs(row_hash, key_position, threshold, 1)
                    if C.SUM_DV:
                        dropped = p
                        if C.DROPOUT:
                            dropped = tl.where(keep, p * pairs.inv_keep, 0.0)
                        dv_tile = tl.dot(
                            dropped.to(g_tile.dtype), g_tile, dv_tile, input_precision="ieee"
                        )
                    if C.SUM_DK:
                        if C.DROPOUT:
                            dp = tl.dot(v_tile, tl.trans(g_tile), input_precision="ieee")
                            dp = tl.where(keep, dp * pairs.inv_keep, 0.0) + row_delta[None, :]
                        else:
                            dp = tl.broadcast_to(row_delta[None, :], [BLOCK_N, BLOCK_M])
                            dp = tl.dot(v_tile, tl.trans(g_tile), dp, input_precision="ieee")
                        ds = p * dp
                        if C.SOFTCAP:
                            ds = ds * slope
                        ds = ds.to(q_tile.dtype)
                        dk_tile = tl.dot(ds, q_tile, dk_tile, input_precision="ieee")
    # dk and dv are contiguous: [split, B, Sk, Hk, D].
    batches = tl.num_programs(0) // num_tiles // (split * kv_heads)
    token = ((part * batches + b).to(tl.int64) * num_keys + start_n) * kv_heads + kv_head
    inside = at < num_keys
    if C.SUM_DK:
        store_tile(dk + token * C.D, kv_heads * C.D, dk_tile * scale, inside, C.D)
    if C.SUM_DV:
        store_tile(dv + token * C.DV, kv_heads * C.DV, dv_tile, inside, C.DV)


@triton.jit(do_not_specialize=["num_heads", "group", "num_rows", "num_keys", "threshold"])
def _queries_kernel(
    q, k, v, grad, shift, delta, dq, scale, mask, pairs, num_heads, group, num_rows, num_keys,
    threshold, C: tl.constexpr,
):  # fmt: skip
    """``dq`` [B, Sq, H, D] of one tile of queries of one head, which steps through keys."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_D: tl.constexpr = C.BLOCK_D
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
    queries = load_queries(at, inside, mask, num_rows, C, True)
    valid = queries[1] >= 0
    q_tile = load_tile(q, start_m, C.STRIDE_Q, valid, C.D, BLOCK_D, True, C.WIDEN)
    g = head_of(grad, b64, h64)
    g_tile = load_tile(g, start_m, C.STRIDE_G, valid, C.DV, C.BLOCK_DV, True, C.WIDEN)
    line = head.to(tl.int64) * num_rows + at
    row_base = tl.load(shift + line, mask=inside, other=-float("inf")) * pairs.post
    row_delta = tl.load(delta + line, mask=inside, other=0.0)
    row_hash = at
    if C.DROPOUT:
        row_hash = hash_rows(pairs, b, h, queries[3], C)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for MASKED in tl.static_range(1 if C.BIAS > 0 else 0, 2):  # full tiles, then partial ones
        count, where = segments_of(mask.table, MASKED)
        for s in range(count):
            begin, end = tl.load(where + 2 * s), tl.load(where + 2 * s + 1)
            for n in tl.range(begin, end, num_stages=C.MASKED_STAGES if MASKED else None):
                start_n = n * BLOCK_N
                key_at = start_n + tl.arange(0, BLOCK_N)
                there, position, document = load_keys(
                    key_at, mask, num_keys, C, MASKED, C.HAS_DOCUMENTS
                )
                k_tile = load_tile(k, start_n, C.STRIDE_K, there, C.D, BLOCK_D, MASKED, C.WIDEN)
                scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
                p, slope = probabilities(
                    scores, row_base[:, None], queries, position, document, head_bias, pairs, C,
                    MASKED, 0,
                )  # fmt: skip
                v_tile = load_tile(v, start_n, C.STRIDE_V, there, C.DV, C.BLOCK_DV, MASKED, C.WIDEN)
                dp = tl.dot(g_tile, tl.trans(v_tile), input_precision="ieee")
                if C.DROPOUT:
                    keep = kept_pairs(row_hash, position, threshold, 0)
                    dp = tl.where(keep, dp * pairs.inv_keep, 0.0)
                ds = p * (dp + row_delta[:, None])
                if C.SOFTCAP:
                    ds = ds * slope
                acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision="ieee")
    place = dq + ((b64 * num_rows + start_m) * num_heads + h64) * C.D
    store_tile(place, num_heads * C.D, acc * scale, inside, C.D)


def launch_backward(given: Backward, visibility: Visibility, spec: AttentionSpec) -> Grads:
    """Gradients through a call that ``refusal`` has nothing against.

    Args:
        given: ``Backward.readable``.
        visibility, spec: of this call.
    Returns:
        dq, dk, dv in the dtype of q, each laid out as [B, S, H, D].
    """
    grad_out, q, k, v, out, lse = given
    b, h, n, d = q.shape
    kv_heads, num_keys, dv_width = k.shape[1], k.shape[2], v.shape[-1]
    configs = device_configs(q, v, visibility, spec.bias is not None)
    split = _split(b, h, kv_heads, num_keys, configs.keys.block_n, q.device)
    sums = q.dtype if split == 1 else torch.float32
    dq = empty_like_heads(q)
    dk = k.new_empty((split, b, num_keys, kv_heads, d), dtype=sums)
    dv = v.new_empty((split, b, num_keys, kv_heads, dv_width), dtype=sums)
    delta, shift = torch.empty_like(lse), torch.empty_like(lse)
    if lse.numel():
        _delta_kernel[(triton.cdiv(n, 64) * b * h,)](
            Heads.of(out),
            Heads.of(grad_out),
            lse,
            delta,
            shift,
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
        for sums in sums_of_keys(configs.keys, (d, dv_width)):
            launch(_keys_kernel, configs.keys, programs, inputs, to_keys, *call, True, sums)
    if lse.numel():
        to_queries = (shift, delta, dq, spec.scale)
        launch(_queries_kernel, configs.queries, b * h, inputs, to_queries, *call)
    whole_dk, whole_dv = (x[0] if split == 1 else x.sum(0).to(q.dtype) for x in (dk, dv))
    return dq, whole_dk.transpose(1, 2), whole_dv.transpose(1, 2)


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
