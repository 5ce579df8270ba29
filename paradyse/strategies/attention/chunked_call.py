"""One call of attention in chunks: tiles of the rank's tokens turned into rows of its own heads for
the tokens of all ranks, and back.

A tile has stretches of tokens of every rank, which lie apart in the sequence; a chunk is one
stretch of the sequence. Rows go to their places on the host, and so come by chunks in its order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed.axis import Runs, TokenLayout
from paradyse.graph.attention_call import AttentionCall
from paradyse.kernels.attention_op import make_spec
from paradyse.strategies.attention.in_chunks import by_heads, by_tokens
from paradyse.strategies.attention.method import Context
from paradyse.strategies.attention.ulysses import OwnHeads
from paradyse.strategies.base import WHOLE, Common, Scope
from paradyse.strategies.host_memory import HostMemories, HostRows, one_ahead
from paradyse.strategies.tiles import chunk_tokens, make_tiles


def _cut(layout: TokenLayout, rank: int, start: int, n: int) -> Runs:
    """Positions of ``n`` tokens of ``rank`` from its ``start``-th one on."""
    found, before = [], 0
    for first, length in layout.runs(rank):
        a, b = max(start, before), min(start + n, before + length)
        if a < b:
            found.append((first + a - before, b - a))
        before += length
    return tuple(found)


def places_of(layout: TokenLayout, start: int, n: int) -> Runs:
    """Positions in ``layout`` of the tokens of a tile, of all ranks, in the order in which
    ``OwnHeads.gather`` gives them.

    Args:
        start, n: the tile among the tokens of a rank; on several ranks an odd ``n`` is all of them.
    """
    p, half = layout.num_ranks, n // 2
    if p == 1:
        return ((start, n),)
    if n % 2:
        return tuple(run for r in range(p) for run in layout.runs(r))
    found = [_cut(layout, r, start, half) for r in range(p)]
    found += [_cut(layout, r, start + half, half) for r in reversed(range(p))]
    return tuple(run for runs in found for run in runs)


class ChunkedCall:
    """One call: its tiles, where their tokens lie in the sequence, its chunks, its attention.

    Args:
        scope: what all variants of the capture share.
        attention: q, k and v as nodes of the graph, masks as whole tensors.
        sizes, common: of the step.
        device: of the step's values.
    """

    def __init__(
        self,
        scope: Scope,
        attention: AttentionCall,
        sizes: Mapping[str, int],
        common: Common,
        device: torch.device,
    ):
        axis, layout = scope.axis, scope.axis.layout(sizes[WHOLE])
        self.tiles = make_tiles(axis, sizes, common, chunk_tokens(sizes.get("B", 1)))
        self.places = [places_of(layout, t.start, t.num_tokens) for t in self.tiles]
        lengths = [axis.size * t.num_tokens for t in self.tiles]
        ends = accumulate(lengths)
        self.chunks: Runs = tuple((end - n, n) for end, n in zip(ends, lengths, strict=True))
        self.host = axis.session.of(HostMemories)[device]
        self.spec = make_spec((sizes[WHOLE], sizes[WHOLE]), *attention.seeded(common[4]).rest)
        q, k, v = (x.meta["val"].shape for x in attention.qkv)
        block_id = int(common[3][1])
        self.own = OwnHeads.of(q[1], v[3], Context(self.spec, axis, block_id, k[1], q[3]))
        if axis.size > 1:
            self.spec = self.own.spec(self.spec, device)

    @property
    def several(self) -> bool:
        """Whether there are several tiles."""
        return len(self.tiles) > 1

    def gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Rows [n, B, h, D] of a tile's tokens of all ranks, in the order of ``places``.

        Args:
            tensors: q, k and v of the rank's tokens, or what is like attention's output,
                [B, s, H, D].
        """
        if self.own.axis.size == 1:
            return [x.transpose(0, 1) for x in tensors]
        message = self.own.gather([x.transpose(1, 2) for x in tensors])
        one = len(tensors) == 1
        found = [self.own.output_heads(message)] if one else self.own.heads([message])
        return [by_tokens(x) for x in found]

    def scatter(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """The transpose of ``gather``: [B, s, H, D] from ``rows``."""
        if self.own.axis.size == 1:
            return [x.transpose(0, 1).contiguous() for x in rows]
        widths = [self.own.value_width] if len(rows) == 1 else self.own.widths
        found = self.own.scatter([by_heads(x) for x in rows], widths)
        return [x.transpose(1, 2).contiguous() for x in found]

    def fill_past_the_end(self, out: HostRows, v: HostRows) -> None:
        """Give rows of ``out`` past the end the last of ``v``, as ``attention_across_ranks``
        does."""
        end, heads = self.spec.num_queries, out.shape[1]
        if out.num_rows > end and heads:
            last = v.read(((end - 1, 1),)).get()
            of_head = torch.arange(heads, device=last.device) * last.shape[2] // heads
            past = last[:, :, of_head].expand(out.num_rows - end, -1, -1, -1)
            out.write(((end, out.num_rows - end),), past.contiguous())
            out.settle()

    def fetched(self, *rows: HostRows, dtype: torch.dtype) -> Iterator[list[Tensor]]:
        """Of each tile in turn what ``rows`` have of it, one ahead, as ``scatter`` gives it, in
        ``dtype``."""

        def read(at: Runs) -> Any:
            return [x.read(at) for x in rows]

        def scattered(found: list[Tensor]) -> list[Tensor]:
            return self.scatter([x.to(dtype) for x in found])

        return map(scattered, one_ahead(partial(read, at) for at in self.places))
