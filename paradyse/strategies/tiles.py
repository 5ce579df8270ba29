"""Tiles: the rank's tokens in stretches, each computed as a sequence of its own.

Mini-sequence transformer (arXiv 2407.15892): what is computed for each token alone, such as an MLP,
needs the memory of one tile's values between its linears, however long the sequence is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.distributed.axis import Axis, local_positions
from paradyse.distributed.tokens import natural_order
from paradyse.graph.lower import Dims, dim_size
from paradyse.graph.subgraph import is_tensor
from paradyse.strategies.base import SPLIT, WHOLE, Common, Scope
from paradyse.strategies.groups.analyse import factors_of
from paradyse.strategies.weight_stream import sum_dtype

TILE_TOKENS, MIN_TILE_TOKENS = 4096, 1024
"""Tokens of all sequences of a batch in one tile, and the fewest of one sequence: fewer leave the
matmuls too small (arXiv 2407.15892)."""

CHUNK_TOKENS = 16384
"""Tokens of a rank in one tile where attention goes in chunks too. A chunk of keys and values of
one head, 128 wide in 16 bits, comes at 25 GB/s (PCIe 4.0) in 0.3 ms on one rank; a query head takes
0.7 ms for its part of a chunk of so many queries at 2e14 operations/s, and on more ranks longer, as
chunks are longer there. FPDT's sequences of 64K tokens on four ranks are as long (arXiv 2408.16978,
section 5)."""


_num_tiles: ContextVar[int] = ContextVar("num_tiles", default=0)
"""Of every step, where a caller asks for so many; 0: as many as its tokens make."""

_inside: ContextVar[bool] = ContextVar("inside_a_tile", default=False)
"""Whether a tile is being computed."""


@contextmanager
def cut_into(num_tiles: int) -> Iterator[None]:
    """Inside, this thread's steps have ``num_tiles`` tiles, however many tokens there are."""
    token = _num_tiles.set(num_tiles)
    try:
        yield
    finally:
        _num_tiles.reset(token)


@contextmanager
def computing_a_tile(of_several: bool) -> Iterator[None]:
    """Inside, this thread computes a tile; ``of_several``: not the only one of its step."""
    token = _inside.set(of_several)
    try:
        yield
    finally:
        _inside.reset(token)


def inside_a_tile() -> bool:
    """Whether this thread computes one of several tiles: what is made now is as large as that, or
    as a weight."""
    return _inside.get()


def tile_tokens(batch: int) -> int:
    """Most tokens of one sequence in a tile, of ``batch`` sequences."""
    return max(TILE_TOKENS // batch, MIN_TILE_TOKENS)


def chunk_tokens(batch: int) -> int:
    """Most tokens of one sequence that a rank has in a chunk, of ``batch`` sequences."""
    return max(CHUNK_TOKENS // batch, MIN_TILE_TOKENS)


def tile_lengths(num_tokens: int, batch: int, most: int | None = None) -> list[int]:
    """Tokens of each tile where a rank holds ``num_tokens`` of ``batch`` sequences; at ``most`` so
    many, by default ``tile_tokens``.

    The tiles are as few as they can be and about equally long: none has a few last tokens alone. A
    rank's tokens lie in two stretches of the sequence, so where there are several ranks their
    number is even, and so is that of every tile.
    """
    pairs = num_tokens // 2
    num_tiles = max(1, min(-(-num_tokens // (most or tile_tokens(batch))), pairs))
    ends = [2 * (pairs * i // num_tiles) for i in range(num_tiles)] + [num_tokens]
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


@dataclass(frozen=True)
class Tile:
    """Some of the rank's tokens; with those of the other ranks a sequence of its own, whose
    positions are given."""

    start: int
    """Among the rank's tokens."""
    num_tokens: int
    """Of the rank's."""
    sizes: Mapping[str, int]
    """By letter, of the tile."""
    common: Common
    """``StepContext.common`` of the tile; the length of the whole sequence in it is true."""
    block_sizes: Mapping[str, int]
    """By letter, of all tokens."""

    @property
    def _own(self) -> str:
        """The letter of the rank's tokens."""
        return SPLIT if SPLIT in self.block_sizes else WHOLE

    def cut(self, x: Tensor, dims: Dims) -> Tensor:
        """The tile's part of ``x``, whose dims are ``dims`` with letters for tokens."""
        letter = token_letter(dims)
        if not letter or self.sizes is self.block_sizes:
            return x.contiguous()
        apart, at = _tokens_apart(x, dims, letter, self.block_sizes)
        rows = self._narrow(apart, at) if letter == self._own else apart.index_select(at, self._all)
        return rows.reshape([dim_size(d, self.sizes) for d in dims]).contiguous()

    def put(self, total: Tensor, dims: Dims, part: Tensor) -> None:
        """Write ``part``, the tile's part of ``total``; where other tiles have a share in it, add
        it. ``total_of`` has made ``total``, whose dims are ``dims``.
        """
        letter = token_letter(dims)
        if not letter:
            total.add_(part)
        elif letter == self._own:
            rows = self.rows_of(total, dims)
            rows.copy_(part.reshape(rows.shape))
        else:
            apart, at = _tokens_apart(total, dims, letter, self.block_sizes)
            shape = [*apart.shape[:at], self.sizes[letter], *apart.shape[at + 1 :]]
            apart.index_add_(at, self._all, part.reshape(shape).to(apart.dtype))

    def total_of(self, dims: Dims, part: Tensor) -> Tensor:
        """What ``put`` collects parts like ``part`` in, of these ``dims``; sums of 16-bit values
        have 32 bits.
        """
        shape = [dim_size(d, self.block_sizes) for d in dims]
        if self.is_of_rank(dims):
            return part.new_empty(shape)
        return part.new_zeros(shape, dtype=sum_dtype(part))

    def is_of_rank(self, dims: Dims) -> bool:
        """Whether what has ``dims`` has a row for each of the rank's tokens."""
        return token_letter(dims) == self._own

    def rows_of(self, total: Tensor, dims: Dims) -> Tensor:
        """A view of the tile's rows of the contiguous ``total``, of ``dims`` with the rank's
        tokens; these have a dim of their own."""
        return self._narrow(*_tokens_apart(total, dims, self._own, self.block_sizes))

    @property
    def _all(self) -> Tensor:
        """Positions of the tile's tokens on all ranks; padding is the last token, as everywhere."""
        return self.common[0].clamp(max=self.block_sizes[WHOLE] - 1)

    def _narrow(self, apart: Tensor, at: int) -> Tensor:
        return apart.narrow(at, self.start, self.num_tokens)


def all_tokens(sizes: Mapping[str, int], common: Common) -> list[Tile]:
    """The one tile of a step that is computed at once, with its ``sizes`` and ``common``."""
    return [Tile(0, common[1].shape[0], sizes, common, sizes)]


def make_tiles(
    axis: Axis, sizes: Mapping[str, int], common: Common, most: int | None = None
) -> list[Tile]:
    """The tiles of a step with these ``sizes`` and ``common``, as many on each rank of ``axis``.

    Args:
        most: as of ``tile_lengths``.
    """
    _, local, batch, info, seed = common
    layout = axis.layout(sizes[WHOLE])
    assert local.shape[0] == layout.local_len, (local.shape, layout)  # so ranks have equal tiles
    everyone = local[None]
    if axis.size > 1:
        ranks = range(axis.size)
        everyone = torch.stack([local_positions(layout, r, local.device) for r in ranks])
    if num_tiles := _num_tiles.get():
        most = -(-layout.local_len // num_tiles)
    tiles, start = [], 0
    lengths = tile_lengths(layout.local_len, sizes.get("B", 1), most)
    one_stretch = axis.size > 1 and layout.local_len % 2  # of few tokens
    if one_stretch or len(lengths) == 1:
        return all_tokens(sizes, common)
    for n in lengths:
        rows = everyone[:, start : start + n]
        whole = rows[0] if axis.size == 1 else natural_order(rows, 0)
        own = {WHOLE: n * axis.size} | ({SPLIT: n} if SPLIT in sizes else {})
        positions = (whole, local[start : start + n])
        tiles.append(Tile(start, n, {**sizes, **own}, (*positions, batch, info, seed), sizes))
        start += n
    return tiles


def over_tiles(
    tiles: Sequence[Tile],
    piece: Callable[..., Sequence[Tensor | None]],
    given: Sequence[tuple[Tensor, Dims]],
    dims: Sequence[Dims],
) -> list[Any]:
    """The results of ``piece`` for each of ``tiles``, put together: tokens side by side, what is of
    no single token added up. None stays None.

    Args:
        piece: (sizes, common, tensors) -> results, such as a ``LoweredPiece``.
        given: tensors of all tokens, with their dims.
        dims: of each result.
    """

    def run(tile: Tile) -> Sequence[Tensor | None]:
        with computing_a_tile(of_several=len(tiles) > 1):
            return piece(tile.sizes, tile.common, [tile.cut(x, d) for x, d in given])

    if len(tiles) == 1:
        return list(run(tiles[0]))
    totals: dict[int, Tensor] = {}
    dtypes: dict[int, torch.dtype] = {}

    def collect(tile: Tile, parts: Sequence[Tensor | None]) -> None:
        for i, (part, d) in enumerate(zip(parts, dims, strict=True)):
            if part is not None:
                if i not in totals:
                    totals[i], dtypes[i] = tile.total_of(d, part), part.dtype
                tile.put(totals[i], d, part)

    for tile in tiles:
        collect(tile, run(tile))
    return [totals[i].to(dtypes[i]) if i in totals else None for i in range(len(dims))]


def untileable(scope: Scope, block: Any) -> str:
    """Why the tokens of ``block``, of the capture of ``scope``, cannot be computed apart; "" if
    they can.
    """
    return "attention mixes tokens" if block.attention else mixes_tokens(scope, block.nodes)


def mixes_tokens(scope: Scope, nodes: Sequence[fx.Node]) -> str:
    """Why ``nodes``, of the capture of ``scope``, cannot be computed for some tokens apart from the
    others; "" if they can.
    """
    inside = set(nodes)
    read = [a for n in nodes for a in n.all_input_nodes if a not in inside]
    for node in filter(is_tensor, read):
        if any(f.origin()[0] is scope.seq and f.origin()[1] for f in factors_of(scope, node)):
            return f"it reads {node}, which has another number of tokens"
    for node in nodes:
        leaves = any(user not in inside for user in node.users)
        if leaves and scope.seq not in factors_of(scope, node):
            return f"it gives {node}, which is not of single tokens"
    return ""


def token_letter(dims: Dims) -> str:
    """The letter of tokens in ``dims``: the rank's, or all; "" where there is none."""
    return next((str(f) for d in dims for f in d if f in (SPLIT, WHOLE)), "")


def _tokens_apart(
    x: Tensor, dims: Dims, letter: str, sizes: Mapping[str, int]
) -> tuple[Tensor, int]:
    """``x`` with its tokens in a dim of their own, and that dim."""
    at = next(i for i, d in enumerate(dims) if letter in d)
    inner: Sequence[int] = [dim_size((f,), sizes) for f in dims[at]]
    apart = x.reshape([*x.shape[:at], *inner, *x.shape[at + 1 :]])
    return apart, at + dims[at].index(letter)
