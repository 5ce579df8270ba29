"""Which keys each query sees: intervals by position, tiles that cover them, additive masks,
dropout.

Queries and keys are tensors of tokens whose global positions are known on the host as runs of
(start, length). Keys lie in ascending order, so under the positional conditions (left, right,
chunk, length) the keys a row sees are one interval [lo, hi) of key indices. Rows whose intervals
move together form tiles that need no mask; a dense mask exists only for the tiles that are left,
one block of rows at a time.

``q_runs`` and ``kv_runs`` are the positions of the queries and of the keys, ``spec`` the attention
of the whole sequence, ``intervals`` the keys that each row sees. ``bytes_per_pair`` is what a score
or an element of the mask takes, over all sequences and heads that are computed at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from paradyse.torch_private import FakeTensor

Runs = tuple[tuple[int, int], ...]
"""Contiguous stretches of global positions, (start, length) each, in the order a tensor holds
them.
"""

TILE_BYTES = 32 * 2**20
"""Most memory for one tile of scores or of an additive mask."""

FULL, DIAGONAL, MASKED = "full", "diagonal", "masked"
"""A tile whose every pair is visible; whose row i sees keys 0..i of it; any other."""


@dataclass(frozen=True)
class AttentionSpec:
    """What turns products of queries and keys into attention. All positions are global."""

    seq_len: int
    """Positions >= seq_len are padding: no query sees them, and their own rows are 0."""
    scale: float
    left: int | None = None
    """Keys behind the query that are visible; None for all."""
    right: int | None = None
    """Keys ahead of the query that are visible; None for all, 0 is causal."""
    chunk: int | None = None
    """Attention stays within chunks of this many positions."""
    key_padding: Tensor | None = None
    """[B|1, S] bool, True where a key may be seen."""
    document_ids: Tensor | None = None
    """[B|1, S] int, tokens see their own document only."""
    bias: Tensor | None = None
    """[B|1, H|1, S|1, S|1]: bool (True = visible) or float, added to the scores. Or by
    distance, float, [H|1, 2, S]: what is added for keys so far behind their query, or ahead, as 0
    is taken to be. H may be more than the query has, then ``head_ids`` selects."""
    softcap: float | None = None
    """Before mask and bias, scores become softcap * tanh(score / softcap): Gemma 2, arXiv
    2408.00118."""
    dropout_p: float = 0.0
    seed: Tensor | None = None
    """int64 []: with the global indices of a pair, all that its dropout depends on."""
    head_ids: Tensor | None = None
    """[H] int64, the global index of each query head; None for 0..H-1."""
    sinks: Tensor | None = None
    """[H]: one more score for each row of a head, of a key without a value (arXiv 2309.17453; GPT-
    OSS). H and ``head_ids`` as of the bias."""
    sequence_ids: Tensor | None = None
    """[B] int64, the global index of each sequence for dropout; None for 0..B-1. Masks and bias
    are those of the sequences at hand."""
    query_len: int | None = None
    """Where queries are of another sequence than keys, its length: ``seq_len`` is then that of the
    keys alone. A bias is [B|1, H|1, query_len|1, S|1], and nothing else depends on positions."""

    @property
    def num_queries(self) -> int:
        """The length of the queries' sequence."""
        return self.seq_len if self.query_len is None else self.query_len

    @property
    def positional(self) -> AttentionSpec:
        """What of it depends on positions alone: a key for caches."""
        reach = self.left, self.right, self.chunk
        return AttentionSpec(self.seq_len, 1.0, *reach, query_len=self.query_len)

    def head_bias(self, num_heads: int) -> Tensor | None:
        """The bias of the query's own ``num_heads`` heads: [B|1, H|1, S|1, S|1] or [H|1, 2, S].

        Raises:
            ValueError: the bias has another number of heads, and there are no ``head_ids``.
        """
        if self.bias is None:
            return None
        at = 0 if self.bias.dim() == 3 else 1
        shared = self.bias.shape[at] == 1
        return self.bias if shared else self._own_heads("bias", self.bias, at, num_heads)

    def head_sinks(self, num_heads: int) -> Tensor | None:
        """The sinks [H] of the query's own ``num_heads`` heads.

        Raises:
            ValueError: there are others, and no ``head_ids``.
        """
        return None if self.sinks is None else self._own_heads("sinks", self.sinks, 0, num_heads)

    def _own_heads(self, name: str, x: Tensor, dim: int, num_heads: int) -> Tensor:
        if x.shape[dim] == num_heads:
            return x
        if self.head_ids is None:
            raise ValueError(
                f"{name} has {x.shape[dim]} heads, the query {num_heads}: give head_ids"
            )
        # Heads past the end are padding.
        ids = self.head_ids.to(x.device).clamp(max=x.shape[dim] - 1)
        return x.index_select(dim, ids)


@dataclass(frozen=True)
class Tile:
    """Rows [r0, r1) against keys [k0, k1), both indices into the local tensors."""

    r0: int
    r1: int
    k0: int
    k1: int
    kind: str
    first: bool = True
    """No earlier tile of the plan holds these rows."""
    count: int = 1
    """As many tiles that are masked alike, each as many rows and keys behind the one before as a
    tile has rows; this is the first."""

    def moved(self, times: int) -> Tile:
        """``times`` as many rows and keys further as it has rows."""
        n = times * self.num_rows
        return replace(self, r0=self.r0 + n, r1=self.r1 + n, k0=self.k0 + n, k1=self.k1 + n)

    @property
    def num_rows(self) -> int:
        return self.r1 - self.r0

    @property
    def num_keys(self) -> int:
        return self.k1 - self.k0

    @property
    def rows(self) -> slice:
        return slice(self.r0, self.r1)

    @property
    def keys(self) -> slice:
        return slice(self.k0, self.k1)


@dataclass(frozen=True)
class Intervals:
    """Row i sees the keys [lo[i], hi[i]); lo == hi == 0 for a row that sees none. [Sq] int64 on the
    CPU.
    """

    lo: Tensor
    hi: Tensor

    @cached_property
    def _copies(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """``lo`` and ``hi`` on ``device``, copied there once."""
        if device not in self._copies:
            copied = self.lo.to(device), self.hi.to(device)
            if isinstance(copied[0], FakeTensor):
                return copied
            self._copies[device] = copied
        return self._copies[device]

    def relative_to(self, tile: Tile) -> Tensor:
        """[3, R]: first and end key of the rows of ``tile``, counted from its first key, and the
        number of its keys.
        """
        lo, hi = (x[tile.r0 : tile.r1] - tile.k0 for x in (self.lo, self.hi))
        return torch.stack([lo, hi, torch.full_like(lo, tile.k1 - tile.k0)])


def kind_of_pair(q: tuple[int, int], k: tuple[int, int], spec: AttentionSpec) -> str | None:
    """What tile queries and keys make by position alone: ``FULL`` or ``MASKED``; None where no
    query sees a key.

    Args:
        q, k: first and end position of the queries, and of the keys.
    """
    (q0, q1), (k0, k1) = ((a, b - 1) for a, b in (q, k))
    far = (spec.left, spec.right, spec.chunk)
    left, right, chunk = (math.inf if x is None else x for x in far)
    beyond = k0 > q1 + right or k1 < q0 - left
    apart = q1 // chunk < k0 // chunk or k1 // chunk < q0 // chunk
    if q1 < q0 or k1 < k0 or beyond or apart:
        return None
    one_chunk = min(q0, k0) // chunk == max(q1, k1) // chunk
    return FULL if one_chunk and k1 <= q0 + right and k0 >= q1 - left else MASKED


def run_positions(runs: Runs, device: torch.device | str = "cpu") -> Tensor:
    """The global positions of ``runs``, int64 [n] on ``device``."""
    return torch.cat([torch.arange(a, a + n, device=device) for a, n in runs])


def _count_below(runs: Runs, x: Tensor) -> Tensor:
    """How many positions of ``runs`` lie below each x."""
    return sum(((x - start).clamp(0, n) for start, n in runs), torch.zeros_like(x))


def _normalized(lo: Tensor, hi: Tensor) -> Intervals:
    seen = hi > lo
    return Intervals(lo * seen, hi * seen)


@lru_cache(maxsize=32)
def position_intervals(q_runs: Runs, kv_runs: Runs, spec: AttentionSpec) -> Intervals:
    """The keys visible by position alone, given an ``AttentionSpec.positional`` and ascending
    ``kv_runs``. O(Sq) work on the host.
    """
    assert all(a + n <= b for (a, n), (b, _) in zip(kv_runs, kv_runs[1:], strict=False)), kv_runs
    x = run_positions(q_runs)
    first, end = torch.zeros_like(x), torch.full_like(x, spec.seq_len)
    if spec.left is not None:
        first = torch.maximum(first, x - spec.left)
    if spec.right is not None:
        end = torch.minimum(end, x + spec.right + 1)
    if spec.chunk is not None:
        begin = x // spec.chunk * spec.chunk
        first, end = torch.maximum(first, begin), torch.minimum(end, begin + spec.chunk)
    end = end * (x < spec.num_queries)
    return _normalized(_count_below(kv_runs, first), _count_below(kv_runs, end))


def _of_sequence(x: Tensor, sequence: int) -> Tensor:
    return x[0 if x.shape[0] == 1 else sequence]


def data_intervals(
    by_position: Intervals, spec: AttentionSpec, batch: int, q_runs: Runs, kv_runs: Runs
) -> Intervals | None:
    """``by_position`` narrowed by key padding and documents of sequence ``batch``.

    Reads the values, so only for tensors on the CPU.

    Returns:
        None when a row's keys are not one interval (holes in the padding, a document in two parts).
    """
    lo, hi = by_position.lo, by_position.hi
    keys = run_positions(kv_runs)
    keys = keys[: int((keys < spec.seq_len).sum())]
    if spec.key_padding is not None:
        seen = _of_sequence(spec.key_padding, batch)[keys].nonzero().flatten()
        if len(seen) == 0:
            return Intervals(torch.zeros_like(lo), torch.zeros_like(hi))
        a, b = int(seen[0]), int(seen[-1]) + 1
        if b - a != len(seen):
            return None
        lo, hi = lo.clamp(min=a), hi.clamp(max=b)
    if spec.document_ids is not None and len(keys):
        documents = _of_sequence(spec.document_ids, batch)
        rows = run_positions(q_runs).clamp(max=spec.seq_len - 1)
        ids, counts = torch.unique_consecutive(documents[keys], return_counts=True)
        ids, order = ids.sort()
        if (ids[1:] == ids[:-1]).any():
            return None
        ends = counts.cumsum(0)
        mine = documents[rows]
        at = torch.searchsorted(ids, mine).clamp(max=len(ids) - 1)
        found, at = ids[at] == mine, order[at]
        lo, hi = torch.maximum(lo, (ends - counts)[at]), torch.minimum(hi, ends[at]) * found
    return _normalized(lo, hi)


def _stretches(values: Tensor) -> list[tuple[int, int, int]]:
    """(begin, end, value) of the stretches of equal values of a vector [n]."""
    if len(values) == 0:
        return []
    value, count = torch.unique_consecutive(values, return_counts=True)
    ends = count.cumsum(0)
    return list(zip((ends - count).tolist(), ends.tolist(), value.tolist(), strict=True))


def row_blocks(intervals: Intervals, bytes_per_pair: int, most_rows: int) -> tuple[Tile, ...]:
    """The visible rows in blocks of up to ``most_rows``, each against the hull of its keys, and of
    at most ``TILE_BYTES`` where possible.
    """
    lo, hi = intervals.lo, intervals.hi
    tiles = []
    for begin, end, seen in _stretches((hi > lo).long()):
        r0 = begin
        while seen and r0 < end:
            rows = min(most_rows, end - r0)
            while True:
                a, b = lo[r0 : r0 + rows], hi[r0 : r0 + rows]
                k0, k1 = int(a.min()), int(b.max())
                if rows == 1 or rows * (k1 - k0) * bytes_per_pair <= TILE_BYTES:
                    break
                rows = max(1, min(rows // 2, TILE_BYTES // ((k1 - k0) * bytes_per_pair)))
            full = bool((a == k0).all() and (b == k1).all())
            tiles.append(Tile(r0, r0 + rows, k0, k1, FULL if full else MASKED))
            r0 += rows
    return tuple(tiles)


_CONSTANT, _RISING, _OTHER, _BREAK = range(4)
_MIN_ROWS = 32
"""Fewer rows than this per tile on average: calls cost more than the mask that they save."""


def segments(intervals: Intervals, bytes_per_pair: int) -> tuple[Tile, ...]:
    """The fewest tiles without a mask: rows whose intervals stand still, or end one key later each.

    Rows of a sliding window, whose both ends move, get blocks with a mask, as does everything when
    the intervals change too often to be worth a call each.
    """
    lo, hi = intervals.lo, intervals.hi
    d_lo, d_hi, seen = lo.diff(), hi.diff(), hi > lo
    step = torch.full_like(d_lo, _OTHER)
    step[(d_lo == 0) & (d_hi == 0)] = _CONSTANT
    step[(d_lo == 0) & (d_hi == 1)] = _RISING
    # Elsewhere than in a window, a jump separates rows that are alike.
    step[((d_lo != 1) & (d_lo != 0)) | ((d_hi != 1) & (d_hi != 0)) | (seen[1:] != seen[:-1])] = (
        _BREAK
    )
    tiles: list[Tile] = []
    row, num_rows = 0, len(lo)
    changes = _stretches(step)
    if len(changes) > 2 * max(4, num_rows // _MIN_ROWS):
        return row_blocks(intervals, bytes_per_pair, 512)
    for begin, end, kind in changes + [(num_rows - 1, num_rows, _BREAK)]:
        # Rows row..end are joined by equal steps; row may already be past begin.
        if kind == _BREAK:
            for single in range(max(row, begin), end):
                tiles += _segment(intervals, single, single + 1, _CONSTANT, bytes_per_pair)
            row = max(row, end)
        elif end > row:
            tiles += _segment(intervals, row, end + 1, kind, bytes_per_pair)
            row = end + 1
    return tuple(tiles)


def _segment(intervals: Intervals, r0: int, r1: int, kind: int, bytes_per_pair: int) -> list[Tile]:
    lo, hi = int(intervals.lo[r0]), int(intervals.hi[r0])
    if hi <= lo:
        return []
    if kind == _CONSTANT:
        return [Tile(r0, r1, lo, hi, FULL)]
    if kind == _RISING:
        return _staircase(r0, r1, lo, hi - 1)
    rows = Intervals(intervals.lo[r0:r1], intervals.hi[r0:r1])
    width = int((rows.hi - rows.lo).max())
    # Work grows with width + rows, calls with 1 / rows. Measured flat between these, for widths 64
    # to 2048.
    blocks = row_blocks(rows, bytes_per_pair, max(64, min(128, width // 4)))
    return [Tile(t.r0 + r0, t.r1 + r0, t.k0, t.k1, t.kind) for t in blocks]


_DIAGONAL_ROWS, _MOST_DIAGONALS, _SHORT, _LONG = 128, 8, 256, 2048
"""PyTorch's flash kernel computes the hidden half of a diagonal tile of up to 512 keys: smaller
ones waste less, and more calls cost more. CPU time forward and backward at width 32 against one
tile: 0.70 at 512 rows, 0.83 at 1,024, 0.95 at 2,048; nothing is gained beyond. Nor up to 256 rows:
one tile takes 0.60 ms forward and 1.28 ms backward, two take 0.73 and 1.31."""


def _staircase(r0: int, r1: int, lo: int, key: int) -> list[Tile]:
    """Row r0 sees keys lo..key, each later row one more: full tiles left of small diagonals, or one
    diagonal tile."""
    tiles: list[Tile] = []
    rows = r1 - r0
    if _SHORT < rows <= _LONG:
        rows = max(_DIAGONAL_ROWS, -(-rows // _MOST_DIAGONALS))
    for a in range(r0, r1, rows):
        b, at = min(a + rows, r1), key + a - r0
        if at > lo:
            tiles.append(Tile(a, b, lo, at, FULL))
        tiles.append(Tile(a, b, at, at + b - a, DIAGONAL, first=at == lo))
    return tiles


def runs_len(runs: Runs) -> int:
    """The number of tokens that ``runs`` describe."""
    return sum(n for _, n in runs)


_WORD = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash, in place, of int64 values in [0, 2^32).

    Two rounds of xor-shift and multiplication; the multiplier is below 2^31, so products fit int64.
    """
    for _ in range(2):
        x.bitwise_xor_(x >> 16).mul_(0x45D9F3B).bitwise_and_(_WORD)
    return x.bitwise_xor_(x >> 16)


def dropout_keep(
    spec: AttentionSpec, batch: slice, num_heads: int, q_positions: Tensor, k_positions: Tensor
) -> Tensor:
    """Which probabilities dropout keeps: a function of seed and global indices only.

    So every strategy, number of ranks and tiling drops the same pairs, and backward draws them
    again.

    Args:
        batch: which of the sequences at hand.
        num_heads: H.
        q_positions, k_positions: int64 [R] and [K], global.
    Returns:
        bool [B, H, R, K], True where a probability is kept.
    """
    device = q_positions.device
    assert spec.seed is not None
    seed = spec.seed.to(device)
    heads = spec.head_ids
    if heads is None:
        heads = torch.arange(num_heads, device=device)
    if spec.sequence_ids is None:
        sequences = torch.arange(batch.start, batch.stop, device=device)
    else:
        sequences = spec.sequence_ids.to(device)[batch] & _WORD
    rows = _mix(_mix(seed & _WORD) ^ sequences)[:, None]
    rows = _mix(rows ^ ((seed >> 32) & _WORD) ^ (heads.to(device) * 0x27D4EB2D & _WORD))[..., None]
    rows = _mix(rows ^ q_positions)[..., None]
    bits = rows ^ _mix((k_positions + 0x3C6EF372) & _WORD)
    return _mix(bits) >= int(spec.dropout_p * 2**32)
