"""What the flash kernels take, and do to one pair of a query and a key.

In all of them ``q``, ``k``, ``v`` and ``grad`` (of the output) are ``Heads``, ``mask`` is a
``Mask``, ``pairs`` are ``Pairs`` and ``C`` ``Constants``; ``num_heads`` are query heads, ``group``
of them to a key head, ``num_rows`` and ``num_keys`` the queries and keys of a sequence.
``threshold`` is the hash from which on dropout keeps a pair, as int32 of the same bits. ``b`` and
``h`` are the indices of a sequence and of a query head, int32.

In the functions of a tile, ``at`` are the indices of its queries or keys, and ``inside`` says which
of them there are. ``queries`` are what ``load_queries`` returns, ``position`` (int32) and
``document`` are the keys'. ``QUERY_DIM`` is the dim of ``scores`` along which its queries lie: 0,
or 1 in transposed tiles. ``head_bias`` points to the bias of one sequence and head. ``MASKED``
tells tiles that are partly visible from full ones.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from paradyse.kernels.flash_tiles import FAR, ROW_INTS

_FAR = tl.constexpr(FAR)
_ROW_INTS = tl.constexpr(ROW_INTS)
_LOG2_E = tl.constexpr(1.4426950408889634)
_HIDES = tl.constexpr(-1e30)
"""Finite, and less than any score: keys that all have it are seen alike."""

NO_BIAS, BOOL_BIAS, FLOAT_BIAS = 0, 1, 2


class Constants(NamedTuple):
    """What a kernel is compiled for."""

    D: int
    """Width of queries and keys."""
    DV: int
    """Width of values."""
    BLOCK_D: int
    """D in a tile, ``padded_width``."""
    BLOCK_DV: int
    BLOCK_M: int
    """Queries of a tile."""
    BLOCK_N: int
    """Keys of a tile."""
    MASKED_STAGES: int
    """Of the load pipeline in loops over partly visible tiles."""
    HAS_LO: bool
    """As ``Visibility.has_lo``."""
    HAS_DOCUMENTS: bool
    SOFTCAP: bool
    BIAS: int
    """NO_BIAS, BOOL_BIAS or FLOAT_BIAS."""
    DROPOUT: bool
    HAS_HEAD_IDS: bool
    HAS_SEQUENCE_IDS: bool
    WIDEN: bool
    """To float32, for the interpreter, which cannot compute in bfloat16."""
    STRIDE_Q: int
    """Elements from one token of q to the next; the others likewise."""
    STRIDE_K: int
    STRIDE_V: int
    STRIDE_G: int = 0
    SUM_DK: bool = True
    """Of a program with a tile of keys: whether it computes dk."""
    SUM_DV: bool = True


class Mask(NamedTuple):
    """The arrays of a ``Visibility``, or inside a kernel those of one sequence."""

    rows: Tensor
    row_documents: Tensor
    key_positions: Tensor
    key_documents: Tensor
    table: Tensor
    """``Visibility.segments``, or those of one row of tiles."""
    num_masks: int


class Pairs(NamedTuple):
    """What else the score of a pair depends on. ``rows`` of the mask are in place of a tensor that
    is not there.
    """

    bias: Tensor
    """As ``AttentionSpec.head_bias``, uint8 for bool."""
    seed: Tensor
    """int64 []."""
    head_ids: Tensor
    """int64 [H]."""
    sequence_ids: Tensor
    """int64 [B]."""
    bias_b: int
    """Stride of the bias, in elements; 0 along dims of size 1."""
    bias_h: int
    bias_row: int
    bias_key: int
    pre: float
    """Scores are multiplied by this before the softcap."""
    post: float
    """Scores are multiplied by this after softcap and bias, to be of base 2."""
    inv_keep: float
    """1 / (1 - p) of dropout."""


@triton.jit
def mask_of(mask, b, tile, num_tiles, num_rows, num_keys):
    """The ``Mask`` of one sequence and of ``tile``, a row of its table of ``num_tiles``."""
    i = (b % mask.num_masks).to(tl.int64)
    return Mask(
        mask.rows,
        mask.row_documents + i * num_rows,
        mask.key_positions + i * num_keys,
        mask.key_documents + i * num_keys,
        mask.table + (i * num_tiles + tile) * _ROW_INTS,
        mask.num_masks,
    )


@triton.jit
def bias_of(pairs, b, h):
    """``head_bias`` of the sequence ``b`` and the query head ``h``, int64 here."""
    return pairs.bias + b * pairs.bias_b + h * pairs.bias_h


@triton.jit
def tanh(x):
    """Of ``x`` by exp2, which is one instruction; saturates without overflow, absolute error
    1e-7.
    """
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * _LOG2_E)))


@triton.jit
def _mix(x):
    """``attention_mask._mix`` on uint32."""
    x = (x ^ (x >> 16)) * 0x45D9F3B
    x = (x ^ (x >> 16)) * 0x45D9F3B
    return x ^ (x >> 16)


@triton.jit
def hash_rows(pairs, b, h, position, C: tl.constexpr):
    """The part of ``attention_mask.dropout_keep``'s hash that queries have, uint32, from their
    ``position``, an int32 vector.
    """
    if C.HAS_HEAD_IDS:
        h = tl.load(pairs.head_ids + h).to(tl.int32)
    if C.HAS_SEQUENCE_IDS:
        b = tl.load(pairs.sequence_ids + b)
    seed = tl.load(pairs.seed)
    zero = tl.zeros_like(position).to(tl.uint32)
    low = (seed & 0xFFFFFFFF).to(tl.uint32) + zero
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32) + zero
    head_bits = (h.to(tl.uint32) + zero) * 0x27D4EB2D
    rows = _mix(_mix(low) ^ (b.to(tl.uint32) + zero))
    return _mix(_mix(rows ^ high ^ head_bits) ^ position.to(tl.uint32))


@triton.jit
def kept_pairs(row_hash, position, threshold, QUERY_DIM: tl.constexpr):
    """Which pairs dropout keeps: bool, from ``row_hash`` of ``hash_rows`` and the keys'
    positions.
    """
    key_hash = _mix(position.to(tl.uint32) + 0x3C6EF372)
    rows = tl.expand_dims(row_hash, 1 - QUERY_DIM)
    return _mix(rows ^ tl.expand_dims(key_hash, QUERY_DIM)) >= threshold.to(tl.uint32)


@triton.jit
def mask_scores(
    scores, queries, position, document, head_bias, pairs, C: tl.constexpr, QUERY_DIM: tl.constexpr
):
    """Scores after the bias, still to be multiplied by ``post``, and bool of the same shape:
    whether a query sees a key.
    """
    lo, hi, row_document, row_position = queries
    keys = tl.expand_dims(position, QUERY_DIM)
    seen = keys <= tl.expand_dims(hi, 1 - QUERY_DIM)
    if C.HAS_LO:
        seen = seen & (keys >= tl.expand_dims(lo, 1 - QUERY_DIM))
    if C.HAS_DOCUMENTS:
        documents = tl.expand_dims(document, QUERY_DIM)
        seen = seen & (tl.expand_dims(row_document, 1 - QUERY_DIM) == documents)
    if C.BIAS > 0:
        rows = tl.expand_dims(row_position, 1 - QUERY_DIM).to(tl.int64) * pairs.bias_row
        where = head_bias + rows + keys.to(tl.int64) * pairs.bias_key
        if C.BIAS == 1:
            seen = seen & (tl.load(where, mask=seen, other=0) != 0)
        else:
            bias = tl.load(where, mask=seen, other=0).to(tl.float32)
            # The least finite numbers hide a key as well, and are to stay finite when scaled.
            bias = tl.where(bias > -float("inf"), tl.maximum(bias, _HIDES), bias)
            scores += bias * (_LOG2_E / pairs.post)
    return scores, seen


@triton.jit
def load_queries(at, inside, mask, num_rows, C: tl.constexpr, MASKED: tl.constexpr):
    """First and last visible position, document, and position of queries; ``at`` in place of what
    is not needed.
    """
    NEEDS_POSITION: tl.constexpr = C.DROPOUT or C.BIAS > 0
    lo, hi, document, position = at, at, at, at
    if MASKED:
        hi = tl.load(mask.rows + num_rows + at, mask=inside, other=-1)
        if C.HAS_LO:
            lo = tl.load(mask.rows + at, mask=inside, other=_FAR)
        if C.HAS_DOCUMENTS:
            document = tl.load(mask.row_documents + at, mask=inside, other=0)
        if NEEDS_POSITION:
            position = tl.load(mask.rows + 2 * num_rows + at, mask=inside, other=0)
    elif NEEDS_POSITION:
        position = tl.load(mask.rows + 2 * num_rows + at)
    return lo, hi, document, position


@triton.jit
def load_keys(
    at, mask, num_keys, C: tl.constexpr, MASKED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr
):
    """Whether keys are visible at all, their positions, and if ``HAS_DOCUMENTS`` their documents;
    ``at`` in place of what is not needed.
    """
    valid = at < num_keys
    position, document = at, at
    if MASKED:
        position = tl.load(mask.key_positions + at, mask=valid, other=_FAR)
        valid = position < _FAR
        if HAS_DOCUMENTS:
            document = tl.load(mask.key_documents + at, mask=valid, other=0)
    elif C.DROPOUT:
        position = tl.load(mask.key_positions + at)
    return valid, position, document


@triton.jit
def store_tile(place, stride, tile, inside, D: tl.constexpr):
    """Write ``tile`` [BLOCK, BLOCK_D] to ``place`` on, its rows ``stride`` elements apart: those
    ``inside``, and of each the first ``D`` elements.
    """
    d = tl.arange(0, tile.shape[1])
    where = place + tl.arange(0, tile.shape[0])[:, None] * stride + d[None, :]
    tl.store(where, tile.to(place.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])


@triton.jit
def load_tile(
    base, start, stride, valid,
    D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """[BLOCK, ``BLOCK_D``] tokens of a head.

    Args:
        base: where the head begins.
        start: the first token.
        stride: from one token to the next.
        valid: bool [BLOCK]. Tokens that are not are 0 if MASKED, and not read.
        D: the width, past which all is 0.
        WIDEN: see ``Constants``.
    """
    d = tl.arange(0, BLOCK_D)
    # Rows before columns: addresses from one offset [BLOCK, BLOCK_D] take more registers.
    row = tl.cast(start, tl.int64) + tl.arange(0, valid.shape[0])
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
    scores, base, queries, position, document, head_bias, pairs,
    C: tl.constexpr, MASKED: tl.constexpr, QUERY_DIM: tl.constexpr,
):  # fmt: skip
    """Probabilities before dropout, and the slope of the softcap. ``base`` is minus the lse in base
    2, and broadcasts against ``scores``.
    """
    slope = 1.0
    if C.SOFTCAP:
        scores = tanh(scores * pairs.pre)
        slope = 1.0 - scores * scores
    if MASKED:
        scores, seen = mask_scores(
            scores, queries, position, document, head_bias, pairs, C, QUERY_DIM
        )
        return tl.where(seen, tl.exp2(scores * pairs.post + base), 0.0), slope
    else:
        return tl.exp2(scores * pairs.post + base), slope
