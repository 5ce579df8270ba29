"""Which tiles of the scores a kernel has to visit, found on the device and without a sync.

Order: kernels, the tables they fill, public function.

By position a query sees the keys whose position lies in one interval [lo, hi]: causal, window,
chunk and length are all of this form. A hidden key (padding, past the end) gets a position beyond
every interval, so all that remains per pair is two comparisons and, with documents, one more.
Bounds of both over groups of tokens tell which tiles nobody sees and which everybody sees. Visited
tiles of one row of tiles are kept as segments [begin, end): memory grows with the length, not with
its square, and the loops that read them step through keys in order. Inspired by the block masks of
FlexAttention (arXiv 2412.05496), which list each tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paradyse.kernels.attention_mask import AttentionSpec
from paradyse.kernels.triton_heads import place_of

GROUP = 16
"""Tokens that share one entry of the bounds; every tile size is a multiple."""

MAX_SEGMENTS = 32
"""Segments kept per row of tiles and kind. A row with more (documents shuffled in runs of tiles) is
visited from its first visible tile to its last, with a mask throughout: slower, and as exact."""

FAR = 2**30
"""Position of a key that nobody sees. Positions are below it."""

_GROUP = tl.constexpr(GROUP)
_FAR = tl.constexpr(FAR)
_CAP = tl.constexpr(MAX_SEGMENTS)
_HEADER = tl.constexpr(4)
ROW_INTS = 4 + 2 * (2 * MAX_SEGMENTS + 1)
"""int32 values per row of tiles: number and first of the full segments, number and first of the
partial ones; then (begin, end) of the full ones, and of the partial ones, whose last entry is the
one of a row with too many."""
_ROW_INTS = tl.constexpr(ROW_INTS)


# Kernels


@triton.jit
def _group_minmax(x, valid, low, high):
    return tl.min(tl.where(valid, x, high), 1), tl.max(tl.where(valid, x, low), 1)


@triton.jit(
    do_not_specialize=["num_rows", "num_groups", "num_queries", "seq_len", "stride_documents"]
    + ["left", "right", "chunk"]
)
def _describe_queries(
    positions,
    documents,
    rows,
    row_documents,
    bounds,
    document_bounds,
    num_rows,
    num_groups,
    num_queries,
    seq_len,
    stride_documents,
    left,
    right,
    chunk,
    HAS_DOCUMENTS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Per query [lo, hi, position]; per group the least and largest lo and hi, and document."""
    tile, b = place_of(tl.cdiv(num_groups, GROUPS))
    group = tile * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = at < num_rows
    i = tl.load(positions + at, mask=inside, other=-1).to(tl.int32)
    valid = inside & (i >= 0) & (i < num_queries)
    lo = tl.where(left >= 0, tl.maximum(i - left, 0), 0)
    hi = tl.where(right >= 0, tl.minimum(i + right, seq_len - 1), seq_len - 1)
    size = tl.maximum(chunk, 1)
    begin = i // size * size
    lo = tl.where(chunk > 0, tl.maximum(lo, begin), lo)
    hi = tl.where(chunk > 0, tl.minimum(hi, begin + size - 1), hi)
    lo = tl.where(valid, lo, _FAR)
    hi = tl.where(valid, hi, -1)
    tl.store(rows + at, lo, mask=inside)
    tl.store(rows + num_rows + at, hi, mask=inside)
    tl.store(rows + 2 * num_rows + at, i, mask=inside)
    in_bounds = group < num_groups
    tl.store(bounds + group, tl.min(lo, 1), mask=in_bounds)
    tl.store(bounds + num_groups + group, tl.max(lo, 1), mask=in_bounds)
    tl.store(bounds + 2 * num_groups + group, tl.min(hi, 1), mask=in_bounds)
    tl.store(bounds + 3 * num_groups + group, tl.max(hi, 1), mask=in_bounds)
    if HAS_DOCUMENTS:
        ids = tl.load(documents + b.to(tl.int64) * stride_documents + i, mask=valid, other=0)
        tl.store(row_documents + b.to(tl.int64) * num_rows + at, ids, mask=inside)
        least, most = _group_minmax(ids, valid, -_FAR, _FAR)
        where = document_bounds + b.to(tl.int64) * 2 * num_groups + group
        tl.store(where, least, mask=in_bounds)
        tl.store(where + num_groups, most, mask=in_bounds)


@triton.jit(
    do_not_specialize=["num_keys", "num_groups", "seq_len", "stride_documents", "stride_padding"]
)
def _describe_keys(
    positions,
    documents,
    padding,
    key_positions,
    key_documents,
    bounds,
    document_bounds,
    num_keys,
    num_groups,
    seq_len,
    stride_documents,
    stride_padding,
    HAS_DOCUMENTS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Per key its position (FAR for a hidden one) and document; per group the least position of a
    visible key, the largest of one, the largest of all, and the documents of the visible ones."""
    tile, b = place_of(tl.cdiv(num_groups, GROUPS))
    b = b.to(tl.int64)
    group = tile * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = at < num_keys
    j = tl.load(positions + at, mask=inside, other=-1).to(tl.int32)
    valid = inside & (j >= 0) & (j < seq_len)
    if HAS_PADDING:
        seen = tl.load(padding + b * stride_padding + j, mask=valid, other=0)
        valid = valid & (seen != 0)
    in_bounds = group < num_groups
    far = tl.where(valid, j, _FAR)
    tl.store(key_positions + b * num_keys + at, far, mask=inside)
    where = bounds + b * 3 * num_groups + group
    tl.store(where, tl.min(far, 1), mask=in_bounds)
    tl.store(where + num_groups, tl.max(tl.where(valid, j, -1), 1), mask=in_bounds)
    tl.store(where + 2 * num_groups, tl.max(far, 1), mask=in_bounds)
    if HAS_DOCUMENTS:
        ids = tl.load(documents + b * stride_documents + j, mask=valid, other=0)
        tl.store(key_documents + b * num_keys + at, ids, mask=inside)
        least, most = _group_minmax(ids, valid, -_FAR, _FAR)
        where = document_bounds + b * 2 * num_groups + group
        tl.store(where, least, mask=in_bounds)
        tl.store(where + num_groups, most, mask=in_bounds)


@triton.jit
def _tile_min(bounds, tile, num_groups, other, R: tl.constexpr):
    at = tile[:, None] * R + tl.arange(0, R)[None, :]
    return tl.min(tl.load(bounds + at, mask=(at >= 0) & (at < num_groups), other=other), 1)


@triton.jit
def _tile_max(bounds, tile, num_groups, other, R: tl.constexpr):
    at = tile[:, None] * R + tl.arange(0, R)[None, :]
    return tl.max(tl.load(bounds + at, mask=(at >= 0) & (at < num_groups), other=other), 1)


@triton.jit
def _query_tiles(
    tile, bounds, documents, num_groups, HAS_DOCUMENTS: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Bounds of tiles of queries. Groups past the end are hidden ones, so a tile that reaches past
    the end is never full.
    """
    lo_min = _tile_min(bounds, tile, num_groups, _FAR, R)
    lo_max = _tile_max(bounds + num_groups, tile, num_groups, _FAR, R)
    hi_min = _tile_min(bounds + 2 * num_groups, tile, num_groups, -1, R)
    hi_max = _tile_max(bounds + 3 * num_groups, tile, num_groups, -1, R)
    least, most = lo_min, lo_min
    if HAS_DOCUMENTS:
        least = _tile_min(documents, tile, num_groups, _FAR, R)
        most = _tile_max(documents + num_groups, tile, num_groups, -_FAR, R)
    return lo_min, lo_max, hi_min, hi_max, least, most


@triton.jit
def _key_tiles(tile, bounds, documents, num_groups, HAS_DOCUMENTS: tl.constexpr, R: tl.constexpr):
    first = _tile_min(bounds, tile, num_groups, _FAR, R)
    last = _tile_max(bounds + num_groups, tile, num_groups, -1, R)
    last_of_all = _tile_max(bounds + 2 * num_groups, tile, num_groups, _FAR, R)
    least, most = first, first
    if HAS_DOCUMENTS:
        least = _tile_min(documents, tile, num_groups, _FAR, R)
        most = _tile_max(documents + num_groups, tile, num_groups, -_FAR, R)
    return first, last, last_of_all, least, most


@triton.jit
def _kinds(queries, keys, HAS_DOCUMENTS: tl.constexpr, ALLOW_FULL: tl.constexpr):
    """0 where no pair of a tile is visible, 2 where all are, 1 between. One of the two arguments is
    of one tile.
    """
    lo_min, lo_max, hi_min, hi_max, q_least, q_most = queries
    first, last, last_of_all, k_least, k_most = keys
    some = (first <= hi_max) & (last >= lo_min)
    every = (first >= lo_max) & (last_of_all <= hi_min)
    if HAS_DOCUMENTS:
        some = some & (k_least <= q_most) & (k_most >= q_least)
        every = every & (q_least == q_most) & (k_least == k_most) & (q_least == k_least)
    if ALLOW_FULL:
        return some.to(tl.int32) + (some & every).to(tl.int32)
    else:
        return some.to(tl.int32)


@triton.jit
def _add_segments(segments, t, kind, before, count, KIND: tl.constexpr):
    """Store the begins and ends of a kind's segments among tiles ``t``; their number so far."""
    first = ((kind == KIND) & (before != KIND)).to(tl.int32)
    rank = count + tl.cumsum(first, 0) - 1
    at = segments + 2 * rank
    tl.store(at, t, mask=(rank < _CAP) & (first != 0))
    tl.store(at + 1, t, mask=(rank < _CAP) & (kind != KIND) & (before == KIND))
    return count + tl.sum(first, 0)


@triton.jit(do_not_specialize=["query_groups", "key_groups", "num_inner"])
def _find_segments(
    table,
    query_bounds,
    key_bounds,
    query_documents,
    key_documents,
    query_groups,
    key_groups,
    num_inner,
    ROWS_ARE_QUERIES: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    ALLOW_FULL: tl.constexpr,
    QR: tl.constexpr,
    KR: tl.constexpr,
    STEP: tl.constexpr,
):
    """One row of the table: the segments of tiles of keys for a tile of queries, or the reverse."""
    if ROWS_ARE_QUERIES:
        num_outer = tl.cdiv(query_groups, QR)
    else:
        num_outer = tl.cdiv(key_groups, KR)
    tile, b = place_of(num_outer)
    b = b.to(tl.int64)
    outer = tile + tl.zeros([1], tl.int32)
    row = table + (b * num_outer + tile) * _ROW_INTS
    keys = key_bounds + b * 3 * key_groups
    q_docs = query_documents + b * 2 * query_groups
    k_docs = key_documents + b * 2 * key_groups
    if ROWS_ARE_QUERIES:
        own = _query_tiles(outer, query_bounds, q_docs, query_groups, HAS_DOCUMENTS, QR)
    else:
        own = _key_tiles(outer, keys, k_docs, key_groups, HAS_DOCUMENTS, KR)
    num_full, num_partial, begin, end = 0, 0, num_inner, 0
    for start in range(0, num_inner + 1, STEP):  # tile num_inner, which is hidden, ends the last
        t = start + tl.arange(0, STEP)
        if ROWS_ARE_QUERIES:
            these = _key_tiles(t, keys, k_docs, key_groups, HAS_DOCUMENTS, KR)
            former = _key_tiles(t - 1, keys, k_docs, key_groups, HAS_DOCUMENTS, KR)
            kind = _kinds(own, these, HAS_DOCUMENTS, ALLOW_FULL)
            before = _kinds(own, former, HAS_DOCUMENTS, ALLOW_FULL)
        else:
            these = _query_tiles(t, query_bounds, q_docs, query_groups, HAS_DOCUMENTS, QR)
            former = _query_tiles(t - 1, query_bounds, q_docs, query_groups, HAS_DOCUMENTS, QR)
            kind = _kinds(these, own, HAS_DOCUMENTS, ALLOW_FULL)
            before = _kinds(former, own, HAS_DOCUMENTS, ALLOW_FULL)
        num_full = _add_segments(row + _HEADER, t, kind, before, num_full, 2)
        partial = row + _HEADER + 2 * _CAP
        num_partial = _add_segments(partial, t, kind, before, num_partial, 1)
        begin = tl.minimum(begin, tl.min(tl.where(kind > 0, t, num_inner), 0))
        end = tl.maximum(end, tl.max(tl.where(kind > 0, t + 1, 0), 0))
    too_many = (num_full > _CAP) | (num_partial > _CAP)
    tl.store(row, tl.where(too_many, 0, num_full))
    tl.store(row + 1, 0)
    tl.store(row + 2, tl.where(too_many, 1, num_partial))
    tl.store(row + 3, tl.where(too_many, _CAP, 0))
    tl.store(row + _HEADER + 4 * _CAP, begin)
    tl.store(row + _HEADER + 4 * _CAP + 1, end)


@triton.jit
def segments_of(row, KIND: tl.constexpr):
    """Of a ``row`` of the table, the number of its full (``KIND`` 0) or partial (1) segments, and
    where their (begin, end) lie.
    """
    first = row + _HEADER + 2 * _CAP * KIND
    return tl.load(row + 2 * KIND), first + 2 * tl.load(row + 2 * KIND + 1)


# Tables


@dataclass(frozen=True)
class Visibility:
    """What the kernels read of a mask: arrays per token, and bounds per group of tokens.

    M is 1, or the number of sequences if their masks differ.
    """

    rows: Tensor
    """[3, Sq] int32: first and last visible position, and the query's own. A row that sees nothing
    has FAR and -1."""
    row_documents: Tensor
    """[M, Sq], or ``rows`` without documents."""
    key_positions: Tensor
    """[M, Sk] int32, FAR where hidden."""
    key_documents: Tensor
    """[M, Sk], or ``key_positions`` without documents."""
    row_bounds: Tensor
    """[4, Gq] int32: least and largest first, least and largest last position."""
    row_document_bounds: Tensor
    """[M, 2, Gq]."""
    key_bounds: Tensor
    """[M, 3, Gk] int32."""
    key_document_bounds: Tensor
    """[M, 2, Gk]."""
    has_lo: bool
    """A query may not see keys that lie before others that it sees."""
    has_documents: bool
    keep: Callable[[Any, Callable[[], Tensor]], Tensor] = lambda key, make: make()
    """(key, what makes it) -> a table of ``segments``, which may have been made before."""

    @property
    def num_masks(self) -> int:
        """M."""
        return self.key_positions.shape[0]

    def segments(self, rows: int, keys: int, transposed: bool, allow_full: bool) -> Tensor:
        """[num_masks, T, ROW_INTS] int32 for tiles of ``rows`` queries and ``keys`` keys.

        T counts tiles of queries and segments are of tiles of keys; ``transposed``: the reverse.
        Without ``allow_full`` tiles that everybody sees count as partial.
        """
        tile = rows, keys, transposed, allow_full
        return self.keep(tile, lambda: self._find_segments(*tile))

    def _find_segments(self, rows: int, keys: int, transposed: bool, allow_full: bool) -> Tensor:
        assert rows % GROUP == 0 and keys % GROUP == 0, (rows, keys)
        num_q = triton.cdiv(self.rows.shape[1], rows)
        num_k = triton.cdiv(self.key_positions.shape[1], keys)
        outer, inner = (num_k, num_q) if transposed else (num_q, num_k)
        table = self.rows.new_empty((self.num_masks, outer, ROW_INTS))
        _find_segments[(outer * self.num_masks,)](
            table,
            self.row_bounds,
            self.key_bounds,
            self.row_document_bounds,
            self.key_document_bounds,
            self.row_bounds.shape[-1],
            self.key_bounds.shape[-1],
            inner,
            ROWS_ARE_QUERIES=not transposed,
            HAS_DOCUMENTS=self.has_documents,
            ALLOW_FULL=allow_full,
            QR=rows // GROUP,
            KR=keys // GROUP,
            STEP=64,
            num_warps=2,
            enable_fp_fusion=True,
        )
        return table


def _stride(x: Tensor | None) -> int:
    """Between sequences; 0 for one row for all."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


class Queries(NamedTuple):
    """What of a ``Visibility`` depends on queries."""

    rows: Tensor
    row_documents: Tensor
    row_bounds: Tensor
    row_document_bounds: Tensor


class Keys(NamedTuple):
    """What of a ``Visibility`` depends on keys."""

    key_positions: Tensor
    key_documents: Tensor
    key_bounds: Tensor
    key_document_bounds: Tensor


_GROUPS = 32
"""Groups of tokens that one program describes."""


def _num_masks(spec: AttentionSpec) -> int:
    return max(1 if x is None else x.shape[0] for x in (spec.key_padding, spec.document_ids))


def _documents(spec: AttentionSpec, device: torch.device) -> Tensor | None:
    if spec.document_ids is None:
        return None
    documents = spec.document_ids.to(device).contiguous()
    return documents if documents.dtype in (torch.int32, torch.int64) else documents.int()


def describe_queries(positions: Tensor, spec: AttentionSpec) -> Queries:
    """The queries' side of ``describe_mask`` with ``spec``, at ``positions`` [Sq]."""
    positions, num_rows = positions.contiguous(), len(positions)
    documents, num_masks = _documents(spec, positions.device), _num_masks(spec)
    num_groups = triton.cdiv(num_rows, GROUP)
    rows = positions.new_empty((3, num_rows), dtype=torch.int32)
    bounds = positions.new_empty((4, num_groups), dtype=torch.int32)
    row_documents, document_bounds = rows, bounds
    if documents is not None:
        row_documents = documents.new_empty((num_masks, num_rows))
        document_bounds = documents.new_empty((num_masks, 2, num_groups))
    limit = [-1 if x is None else min(x, FAR - 1) for x in (spec.left, spec.right, spec.chunk)]
    _describe_queries[(triton.cdiv(num_groups, _GROUPS) * num_masks,)](
        positions,
        positions if documents is None else documents,
        rows,
        row_documents,
        bounds,
        document_bounds,
        num_rows,
        num_groups,
        spec.num_queries,
        spec.seq_len,
        _stride(documents),
        *limit,
        HAS_DOCUMENTS=documents is not None,
        GROUPS=_GROUPS,
        enable_fp_fusion=True,
    )
    return Queries(rows, row_documents, bounds, document_bounds)


def describe_keys(positions: Tensor, spec: AttentionSpec) -> Keys:
    """The keys' side of ``describe_mask`` with ``spec``, at ``positions`` [Sk]."""
    positions, num_keys = positions.contiguous(), len(positions)
    documents, num_masks = _documents(spec, positions.device), _num_masks(spec)
    padding = spec.key_padding
    if padding is not None:
        padding = padding.to(positions.device).contiguous().view(torch.uint8)
    num_groups = triton.cdiv(num_keys, GROUP)
    key_positions = positions.new_empty((num_masks, num_keys), dtype=torch.int32)
    bounds = positions.new_empty((num_masks, 3, num_groups), dtype=torch.int32)
    key_documents, document_bounds = key_positions, bounds
    if documents is not None:
        key_documents = documents.new_empty((num_masks, num_keys))
        document_bounds = documents.new_empty((num_masks, 2, num_groups))
    _describe_keys[(triton.cdiv(num_groups, _GROUPS) * num_masks,)](
        positions,
        positions if documents is None else documents,
        positions if padding is None else padding,
        key_positions,
        key_documents,
        bounds,
        document_bounds,
        num_keys,
        num_groups,
        spec.seq_len,
        _stride(documents),
        _stride(padding),
        HAS_DOCUMENTS=documents is not None,
        HAS_PADDING=padding is not None,
        GROUPS=_GROUPS,
        enable_fp_fusion=True,
    )
    return Keys(key_positions, key_documents, bounds, document_bounds)


def visibility_of(queries: Queries, keys: Keys, spec: AttentionSpec, **given: Any) -> Visibility:
    """``queries`` and ``keys``, both sides of the mask of ``spec``, together; ``given`` may have
    ``Visibility.keep``."""
    return Visibility(
        *queries[:2],
        *keys[:2],
        *queries[2:],
        *keys[2:],
        has_lo=spec.left is not None or spec.chunk is not None,
        has_documents=spec.document_ids is not None,
        **given,
    )


def describe_mask(q_positions: Tensor, kv_positions: Tensor, spec: AttentionSpec) -> Visibility:
    """What of the mask of ``spec`` depends on positions, padding and documents.

    Args:
        q_positions, kv_positions: int [Sq] and [Sk] on the device, global, in any order.
    """
    queries, keys = describe_queries(q_positions, spec), describe_keys(kv_positions, spec)
    return visibility_of(queries, keys, spec)
