"""What kernels do to one pair of a query and a key: visibility, softcap, bias, dropout.

``rows`` and ``keys`` stand for values per query and per key that broadcast against each other, as
[R, 1] and [1, K] or, in transposed tiles, [1, R] and [K, 1].
"""

from __future__ import annotations

import triton
import triton.language as tl

from paradyse.kernels.flash_tiles import FAR

_FAR = tl.constexpr(FAR)
_LOG2_E = tl.constexpr(1.4426950408889634)

NO_BIAS, BOOL_BIAS, FLOAT_BIAS = 0, 1, 2


@triton.jit
def tanh(x):
    """By exp2, which is one instruction; saturates without overflow, absolute error 1e-7."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * _LOG2_E)))


@triton.jit
def mix(x):
    """``attention_mask._mix`` on uint32."""
    x = (x ^ (x >> 16)) * 0x45D9F3B
    x = (x ^ (x >> 16)) * 0x45D9F3B
    return x ^ (x >> 16)


@triton.jit
def hash_rows(seed, b, head, position):
    """The part of ``attention_mask.dropout_keep``'s hash that a query has. ``seed`` int64, the
    others int32, ``position`` a vector; uint32.
    """
    zero = tl.zeros_like(position).to(tl.uint32)
    low = (seed & 0xFFFFFFFF).to(tl.uint32) + zero
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32) + zero
    head_bits = (head.to(tl.uint32) + zero) * 0x27D4EB2D
    rows = mix(mix(low) ^ (b.to(tl.uint32) + zero))
    return mix(mix(rows ^ high ^ head_bits) ^ position.to(tl.uint32))


@triton.jit
def hash_keys(position):
    """The part of the hash that a key has: uint32, from its position, int32."""
    return mix(position.to(tl.uint32) + 0x3C6EF372)


@triton.jit
def kept_pairs(row_hash, key_hash, threshold):
    """Whether dropout keeps a pair, whose hash is at least ``threshold``, uint32."""
    return mix(row_hash ^ key_hash) >= threshold


@triton.jit
def mask_scores(
    scores,
    lo,
    hi,
    row_position,
    row_document,
    key_position,
    key_document,
    bias,
    stride_bias_row,
    stride_bias_key,
    post,
    HAS_LO: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Scores after the bias of one sequence and head, and whether a query sees a key: bool, of the
    shape to which all broadcast. Scores are still to be multiplied by ``post`` to be of base 2.
    """
    seen = key_position <= hi
    if HAS_LO:
        seen = seen & (key_position >= lo)
    if HAS_DOCUMENTS:
        seen = seen & (row_document == key_document)
    if BIAS > 0:
        rows = bias + row_position.to(tl.int64) * stride_bias_row
        where = rows + key_position.to(tl.int64) * stride_bias_key
        if BIAS == 1:
            seen = seen & (tl.load(where, mask=seen, other=0) != 0)
        else:
            scores += tl.load(where, mask=seen, other=0).to(tl.float32) * (_LOG2_E / post)
    return scores, seen


@triton.jit
def load_queries(
    at,
    inside,
    rows,
    documents,
    num_rows,
    NEEDS_POSITION: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):
    """First and last visible position, document, and position of the queries ``at``; ``at`` in
    place of what is not needed.
    """
    lo, document, position = at, at, at
    hi = tl.load(rows + num_rows + at, mask=inside, other=-1)
    if HAS_LO:
        lo = tl.load(rows + at, mask=inside, other=_FAR)
    if HAS_DOCUMENTS:
        document = tl.load(documents + at, mask=inside, other=0)
    if NEEDS_POSITION:
        position = tl.load(rows + 2 * num_rows + at, mask=inside, other=0)
    return lo, hi, document, position


@triton.jit
def load_keys(
    start,
    num_keys,
    positions,
    documents,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Whether the keys from ``start`` on are visible at all, their positions, their documents."""
    at = start + tl.arange(0, BLOCK_N)
    valid = at < num_keys
    position, document = at, at
    if MASKED:
        position = tl.load(positions + at, mask=valid, other=_FAR)
        valid = position < _FAR
        if HAS_DOCUMENTS:
            document = tl.load(documents + at, mask=valid, other=0)
    elif DROPOUT:
        position = tl.load(positions + at)
    return valid, position, document


@triton.jit
def head_hash(seed, b, h, head_ids, position, HAS_HEAD_IDS: tl.constexpr):
    """``hash_rows`` of query head ``h`` of those that are here."""
    head = h
    if HAS_HEAD_IDS:
        head = tl.load(head_ids + h).to(tl.int32)
    return hash_rows(tl.load(seed), b, head, position)


@triton.jit
def store_tile(
    place, stride, tile, inside, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Write rows [BLOCK, BLOCK_D] to ``place`` on, those ``inside``, each the first D elements."""
    d = tl.arange(0, BLOCK_D)
    where = place + tl.arange(0, BLOCK)[:, None] * stride + d[None, :]
    tl.store(where, tile.to(place.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])


@triton.jit
def load_tile(
    base,
    start,
    stride,
    valid,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """[BLOCK, BLOCK_D] tokens from ``start`` on, 0 past the width and, if MASKED, where not
    ``valid`` [BLOCK]. WIDEN: to float32, for the interpreter, which cannot compute in bfloat16.
    """
    d = tl.arange(0, BLOCK_D)
    # Rows before columns: addresses from one offset [BLOCK, BLOCK_D] take more registers.
    row = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
    where = (base + row * stride)[:, None] + d[None, :]
    if MASKED:
        if D == BLOCK_D:
            tile = tl.load(where, mask=valid[:, None], other=0.0)
        else:
            tile = tl.load(where, mask=valid[:, None] & (d < D)[None, :], other=0.0)
    elif D == BLOCK_D:
        tile = tl.load(where)
    else:
        tile = tl.load(where, mask=(d < D)[None, :], other=0.0)
    if WIDEN:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def probabilities(
    scores,
    base,
    lo,
    hi,
    row_position,
    row_document,
    key_position,
    key_document,
    bias,
    stride_bias_row,
    stride_bias_key,
    pre,
    post,
    MASKED: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Probabilities before dropout, and the slope of the softcap. Values per row and key broadcast
    against the tile, which may be transposed. ``base`` is minus the lse in base 2.
    """
    slope = 1.0
    if SOFTCAP:
        scores = tanh(scores * pre)
        slope = 1.0 - scores * scores
    if MASKED:
        scores, seen = mask_scores(
            scores, lo, hi, row_position, row_document, key_position, key_document, bias,
            stride_bias_row, stride_bias_key, post, HAS_LO, HAS_DOCUMENTS, BIAS,
        )  # fmt: skip
        return tl.where(seen, tl.exp2(scores * post + base), 0.0), slope
    else:
        return tl.exp2(scores * post + base), slope
