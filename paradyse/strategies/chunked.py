"""Attention blocks in chunks of the sequence, with queries, keys and values on the host.

FPDT (arXiv 2408.16978): the part of the block before attention gives queries, keys and values of
one tile of the rank's tokens after the other. An all-to-all turns each into the rank's own heads of
all ranks' tokens, as Ulysses does for the whole sequence, and they go to the host. Attention then
fetches them in chunks of the sequence (``attention.in_chunks``), and what it gives goes back the
same way for the part of the block behind it. So the device holds a tile's values, or a chunk of
queries and two of keys, however long the sequence is. Backward does the same three in reverse
order, and computes the part before attention again.

On one rank the same is done without messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

from paradyse.graph.attention_call import AttentionCall
from paradyse.graph.lower import Dims
from paradyse.graph.subgraph import Piece, live_nodes, make_piece
from paradyse.strategies.attention.chunked_call import ChunkedCall
from paradyse.strategies.attention.in_chunks import Kept, attend, attend_backward
from paradyse.strategies.base import (
    NUM_COMMON,
    Common,
    LoweredGradients,
    LoweredPiece,
    Scope,
    StepContext,
    attended_by,
)
from paradyse.strategies.host_memory import HostRows
from paradyse.strategies.local import LocalPiece
from paradyse.strategies.metp import masks_inside
from paradyse.strategies.tiles import (
    computing_a_tile,
    mixes_tokens,
    over_tiles,
)


def unchunkable(scope: Scope, block: Any) -> str:
    """Why ``block``, of the capture of ``scope``, cannot be computed in chunks; "" if it can."""
    if block.attention is None:
        return "it has no attention"
    if block.keys is not None:
        return "its keys are of another sequence than its queries"
    if block.apart:
        return "its attention is over a dim that is not split"
    results = (block.attention, *block.attention.users)
    around = [n for n in block.nodes if n not in results]
    return masks_inside(block) or mixes_tokens(scope, around)


def _token_major(dims: Dims) -> Dims:
    """Dims [B, H, s, D] as [B, s, H, D]."""
    b, h, s, d = dims
    return b, s, h, d


class _Side:
    """What of a block lies before its attention, or behind it, on a tile of tokens.

    Values with heads that enter or leave are [B, s, H, D].

    Args:
        variant: the whole block.
        name: of the side.
        piece: its operators.
        attended: attention's output, which comes before the side's own tensors; None before it.
    """

    def __init__(self, variant: LocalPiece, name: str, piece: Piece, attended: fx.Node | None):
        scope, layout = variant.scope, variant.layout
        self.attended = attended
        text = f"{variant.strategy} {name}"
        self.local = LocalPiece(scope, piece, layout, text, within=variant.piece)
        self.own = [n for n in self.local.order if n is not attended]
        self.at = [variant.order.index(n) for n in self.own]
        """Which of the block's tensors it takes."""
        of = dict(zip(self.local.order, self.local.lowered.dims[NUM_COMMON:], strict=True))
        self.own_dims = [of[n] for n in self.own]
        self.dims = [_token_major(of[attended])] if attended is not None else []
        self.dims += self.own_dims
        self.output_dims = self.local.output_dims()
        if attended is None:
            self.output_dims = [_token_major(d) for d in self.output_dims]
        key = self.local.lowered.key
        self.forward = LoweredPiece(scope, f"forward\n{key}", self._compute, self.dims)
        dims = [*self.dims, *self.output_dims]
        self.gradients_for = LoweredGradients(
            scope,
            key,
            lambda sizes, common, own, rest: (self._compute(sizes, common, iter(own)), rest),
            dims,
        )

    def _compute(
        self, sizes: dict[str, Any], common: Sequence[Tensor], given: Iterator[Tensor]
    ) -> Sequence[Any]:
        values = {self.attended: next(given).transpose(1, 2)} if self.attended is not None else {}
        values.update(zip(self.own, given, strict=True))
        own = iter([values[n] for n in self.local.order])
        results = self.local.compute(sizes, common, own)
        return [x.transpose(1, 2) for x in results] if self.attended is None else results

    def given(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Dims]]:
        """Those of the block's ``tensors`` that the side takes, with their dims."""
        return [(tensors[i], d) for i, d in zip(self.at, self.own_dims, strict=True)]


class ChunkedVariant:
    """What computes an attention block in chunks of the sequence.

    Args:
        variant: what computes the block otherwise, with whole weights.
    """

    def __init__(self, variant: LocalPiece):
        assert variant.attention is not None
        self.variant, self.scope, self.uses = variant, variant.scope, variant.uses
        self.attention = AttentionCall.of(variant.attention)
        piece, attended = variant.piece, attended_by(variant.attention)
        qkv = self.attention.qkv
        before = make_piece(piece.name, live_nodes(piece.nodes, qkv), qkv)
        others = [n for n in piece.nodes if n not in (variant.attention, attended)]
        behind = make_piece(piece.name, live_nodes(others, piece.outputs), piece.outputs)
        self.before = _Side(variant, "before attention", before, None)
        self.behind = _Side(variant, "behind attention", behind, attended)
        """What both need is computed in both."""
        self.bias_at, self.sinks_at = (
            variant.order.index(x) if isinstance(x, fx.Node) else None
            for x in (self.attention.bias, self.attention.sinks)
        )

    def __call__(self, step: StepContext) -> Any:
        tensors = self.variant.tensors(step)
        needs = tuple(torch.is_grad_enabled() and t.requires_grad for t in tensors)
        return _Chunked.apply(self, step.sizes, step.common, needs, *tensors)

    def _call(
        self, sizes: Mapping[str, int], common: Common, tensors: Sequence[Tensor]
    ) -> ChunkedCall:
        """The call of attention in a step, where the block's own ``tensors`` are these."""
        masks = {
            name: tensors[self.variant.order.index(node)]
            for name in ("key_padding", "document_ids", "bias", "sinks")
            if isinstance(node := getattr(self.attention, name), fx.Node)
        }
        attention = replace(self.attention, **masks)
        return ChunkedCall(self.scope, attention, sizes, common, tensors[0].device)

    def run_forward(
        self,
        sizes: Mapping[str, int],
        common: Common,
        tensors: Sequence[Tensor],
        needs: tuple[bool, ...],
    ) -> tuple[list[Tensor], Kept]:
        """The outputs, and what backward needs.

        Args:
            sizes, common: of the step.
            tensors: the block's own.
            needs: which of them need gradients.
        """
        call = self._call(sizes, common, tensors)
        rows: list[HostRows] = []
        places = iter(call.places)
        num_rows = sum(n for _, n in call.chunks)

        def send(sizes: Any, common: Any, own: Sequence[Tensor]) -> list[Tensor]:
            found = call.gather(self.before.forward(sizes, common, own))
            if not rows:
                rows.extend(HostRows(call.host, num_rows, x.shape[1:], x.dtype) for x in found)
            at = next(places)
            for to, x in zip(rows, found, strict=True):
                to.write(at, x)
            return []

        over_tiles(call.tiles, send, self.before.given(tensors), [])
        q, k, v = rows
        for x in rows:
            x.settle()
        with computing_a_tile(call.several):
            out, lse = attend(q, k, v, call.chunks, call.spec)
            call.fill_past_the_end(out, v)
        coming = call.fetched(out, dtype=out.dtype)

        def follow(sizes: Any, common: Any, own: Sequence[Tensor]) -> Any:
            return self.behind.forward(sizes, common, [*next(coming), *own])

        given, dims = self.behind.given(tensors), self.behind.output_dims
        outputs = over_tiles(call.tiles, follow, given, dims)
        if any(needs):
            self._compile(call, common, tensors, outputs, needs, q.dtype)
        return outputs, Kept(q, k, v, out, lse)

    def _compile(
        self,
        call: ChunkedCall,
        common: Common,
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor],
        needs: tuple[bool, ...],
        dtype: torch.dtype,
    ) -> None:
        """Compile what backward runs: autograd may run that in a thread of its own."""
        heads = common[0].new_empty(0, dtype=dtype)

        def compile_side(side: _Side, first: list[Tensor], last: Sequence[Tensor]) -> None:
            of = self._needs(side, needs)
            if any(of):
                like = [*common, *first, *(tensors[i] for i in side.at), *last]
                side.gradients_for(of).function_for(call.tiles[0].sizes, like)

        compile_side(self.behind, [heads], outputs)
        compile_side(self.before, [], [heads] * 3)

    def _needs(self, side: _Side, needs: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which of the tensors of ``side`` need gradients."""
        own = tuple(needs[i] for i in side.at)
        return own if side is self.before else (self._through(needs), *own)

    def _through(self, needs: tuple[bool, ...]) -> bool:
        """Whether attention needs gradients."""
        own = (self.bias_at, self.sinks_at)
        return any(i is not None and needs[i] for i in own) or any(self._needs(self.before, needs))

    def run_backward(
        self,
        sizes: Mapping[str, int],
        common: Common,
        tensors: Sequence[Tensor],
        kept: Kept,
        cotangents: Sequence[Tensor],
        needs: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """Gradients of the block's own tensors.

        Args:
            sizes, common, tensors, needs: as ``run_forward`` had them.
            kept: what it gave for backward.
            cotangents: gradients of the outputs.
        """
        call = self._call(sizes, common, tensors)
        found: list[Tensor | None] = [None] * len(tensors)
        d_out, through = kept.out.empty_like(), self._through(needs)
        places, coming = iter(call.places), call.fetched(kept.out, dtype=kept.out.dtype)

        def back(piece: Callable[..., Any]) -> Callable[..., Any]:
            def run(sizes: Any, common: Any, given: Sequence[Tensor]) -> Any:
                grads = piece(sizes, common, [*next(coming), *given])
                if through:
                    d_out.write(next(places), *call.gather(grads[:1]))
                return grads[int(through) :]

            return run

        self._over(self.behind, call, tensors, cotangents, needs, back, found)
        d_out.settle()
        if not through:
            return found
        bias_grad = self.bias_at is not None and needs[self.bias_at]
        with computing_a_tile(call.several):
            grads, d_bias, d_sinks = attend_backward(kept, d_out, call.chunks, call.spec, bias_grad)
        if bias_grad and self.bias_at is not None:
            bias = tensors[self.bias_at]
            d_bias = torch.zeros_like(bias) if d_bias is None else d_bias
            found[self.bias_at] = _sum(found[self.bias_at], d_bias)
        if self.sinks_at is not None and needs[self.sinks_at]:
            sinks = tensors[self.sinks_at]
            found[self.sinks_at] = torch.zeros_like(sinks) if d_sinks is None else d_sinks
        returning = call.fetched(*grads, dtype=kept.q.dtype)

        def down(piece: Callable[..., Any]) -> Callable[..., Any]:
            return lambda sizes, common, own: piece(sizes, common, [*own, *next(returning)])

        self._over(self.before, call, tensors, [], needs, down, found)
        return found

    def _over(
        self,
        side: _Side,
        call: ChunkedCall,
        tensors: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        needs: tuple[bool, ...],
        around: Callable[[LoweredPiece], Callable[..., Any]],
        found: list[Tensor | None],
    ) -> None:
        """Add to ``found`` the gradients of the tensors of ``side``, tile by tile.

        Args:
            cotangents: of what it gives, on all tokens.
            around: makes of the piece for gradients what runs on the tensors of a tile.
        """
        of = self._needs(side, needs)
        if not any(of):
            return
        where = [i for i in side.at if needs[i]]
        dims = [d for i, d in zip(side.at, side.own_dims, strict=True) if needs[i]]
        given = side.given(tensors)
        if cotangents:
            given += zip(cotangents, side.output_dims, strict=True)
        piece, tiles = around(side.gradients_for(of)), iter(call.tiles)

        def run(*args: Any) -> list[Any]:
            parts, tile = list(piece(*args)), next(tiles)
            for j, (i, d) in enumerate(zip(where, dims, strict=True)):
                total = found[i]
                if total is None or parts[j] is None or not call.several:
                    continue
                if tile.is_of_rank(d):  # in place: no more tensors of all tokens than one
                    rows = tile.rows_of(total, d)
                    rows += parts[j].reshape(rows.shape)
                    parts[j] = None
            return parts

        grads = over_tiles(call.tiles, run, given, dims)
        for i, grad in zip(where, grads, strict=True):
            found[i] = _sum(found[i], grad)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, either of which may be None for nothing."""
    return b if a is None else a if b is None else a + b


def _carry(kept: Kept) -> Tensor:
    """An empty tensor whose memory has ``kept``: this lasts as long as what autograd saves, and
    goes with it where a block that runs again in backward saves nothing the first time."""
    carrier = torch.empty(0)
    memory: Any = carrier.untyped_storage()
    memory.kept = kept
    return carrier


def _carried(carrier: Tensor) -> Kept:
    """What ``_carry`` gave ``carrier``.

    Raises:
        RuntimeError: it is a copy.
    """
    kept = getattr(carrier.untyped_storage(), "kept", None)
    if kept is None:
        raise RuntimeError(
            "hooks on saved tensors (such as torch.autograd.graph.save_on_cpu) have copied what a "
            "block keeps; under the lever chunked it is on the host already: call the model "
            "without them, or leave chunked out of levers="
        )
    found: Kept = kept
    return found


class _Chunked(torch.autograd.Function):
    """A block in chunks, without autograd inside."""

    @staticmethod
    def forward(
        ctx: Any,
        block: ChunkedVariant,
        sizes: Mapping[str, int],
        common: Common,
        needs: tuple[bool, ...],
        *tensors: Tensor,
    ) -> Any:
        outputs, kept = block.run_forward(sizes, common, tensors, needs)
        ctx.of = block, sizes, common, needs
        ctx.save_for_backward(*tensors, _carry(kept))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (block, sizes, common, needs), (*tensors, carrier) = ctx.of, ctx.saved_tensors
        kept = _carried(carrier)
        with torch.autocast(cotangents[0].device.type, enabled=False):  # casts are in the graph
            grads = block.run_backward(sizes, common, tensors, kept, cotangents, needs)
        return None, None, None, None, *grads
