"""Embeddings by rows of the vocabulary: each rank looks up the rows of the table that it holds.

Vocabulary parallel (Megatron-LM, arXiv 1909.08053, section 3): every rank looks up the tokens of
all ranks, gives zeros for those whose rows another one has, and the sum over ranks is scattered to
the ranks that hold the tokens. Backward gathers the gradient of the tokens, and each rank adds it
to its own rows. Tiles of tokens bound what is gathered at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from paradyse.graph.rules import argument
from paradyse.graph.subgraph import Piece, make_piece
from paradyse.strategies.base import SPLIT, Common, Scope, StepContext, Uses, spec_dims
from paradyse.strategies.local import LocalPiece
from paradyse.strategies.tiles import make_tiles, over_tiles
from paradyse.strategies.vocabulary import TokenMoves, rows_at_rest, stretch_of
from paradyse.strategies.weight_stream import sum_dtype
from paradyse.weights.sharded_tensor import ShardedTensor


class LookUp:
    """One table in which a rank looks up the tokens of all ranks by its own rows.

    Args:
        scope: what all variants of the capture share.
        node: the operator ``embedding``.
    """

    def __init__(self, scope: Scope, node: fx.Node):
        self.scope, self.node = scope, node
        self.table, self.ids = node.args[0], node.args[1]
        num_words = self.table.meta["val"].shape[0]
        self.words = stretch_of(scope.axis, num_words)
        self.form = rows_at_rest(scope.axis, num_words)
        self.padding = argument(node, "padding_idx")
        """The word whose row has no gradient; -1: there is none."""
        self.dims = [spec_dims(scope, n, SPLIT) for n in (self.ids, node)]

    def run_forward(
        self, sizes: Mapping[str, int], common: Common, table: Tensor, ids: Tensor
    ) -> Tensor:
        """The rows [.., s, h] of the rank's tokens.

        Args:
            sizes, common: of the step.
            table: the rank's rows.
            ids: of the rank's tokens.
        """

        def rows(sizes: Any, common: Common, own: Sequence[Tensor]) -> list[Tensor]:
            moves = TokenMoves(self.scope, sizes, common)
            at, here = self.words.find(moves.gather(self.ids, own[0]))
            found = F.embedding(at, table).masked_fill_(~here[..., None], 0)
            return [moves.scatter(self.node, found)]

        tiles = make_tiles(self.scope.axis, sizes, common)
        (out,) = over_tiles(tiles, rows, [(ids, self.dims[0])], self.dims[1:])
        return out

    def run_backward(
        self, sizes: Mapping[str, int], common: Common, table: Tensor, ids: Tensor, grad: Tensor
    ) -> Tensor:
        """The gradient of ``table``.

        Args:
            sizes, common, table, ids: as of ``run_forward``.
            grad: of the rows, for the rank's tokens.
        """
        total = torch.zeros_like(table, dtype=sum_dtype(table))

        def add(sizes: Any, common: Common, own: Sequence[Tensor]) -> list[Tensor]:
            moves, (ids, grad) = TokenMoves(self.scope, sizes, common), own
            words = moves.gather(self.ids, ids)
            at, here = self.words.find(words)
            here = here & (words != self.padding)
            rows = moves.gather(self.node, grad).to(total.dtype)
            rows = rows.masked_fill_(~here[..., None], 0)
            total.index_add_(0, at.flatten(), rows.flatten(0, -2))
            return []

        tiles = make_tiles(self.scope.axis, sizes, common)
        over_tiles(tiles, add, list(zip((ids, grad), self.dims, strict=True)), [])
        return total.to(table.dtype)


class _Rows(torch.autograd.Function):
    """What a ``LookUp`` finds."""

    @staticmethod
    def forward(
        ctx: Any,
        look_up: LookUp,
        sizes: Mapping[str, int],
        common: Common,
        table: Tensor,
        ids: Tensor,
    ) -> Tensor:
        ctx.of = look_up, sizes, common, table.detach()
        ctx.save_for_backward(ids)
        return look_up.run_forward(sizes, common, table, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        look_up, *step = ctx.of
        return None, None, None, look_up.run_backward(*step, *ctx.saved_tensors, grad), None


class LookUpPiece:
    """A piece between blocks in which sharded tables are looked up by the rows at rest.

    Args:
        scope: what all variants of the capture share.
        piece: on the rank's tokens.
        nodes: the operators ``embedding``, whose ids the piece reads.
        eager: as of ``LocalPiece``.
    """

    def __init__(self, scope: Scope, piece: Piece, nodes: Sequence[fx.Node], eager: bool):
        self.piece, self.look_ups = piece, [LookUp(scope, n) for n in nodes]
        self.whole = LocalPiece(scope, piece, SPLIT, "between", eager=eager)
        others = [n for n in piece.nodes if n not in nodes]
        behind = make_piece(piece.name, others, [n for n in piece.outputs if n not in nodes])
        self.behind = LocalPiece(scope, behind, SPLIT, "behind", within=piece, eager=eager)
        self.uses: Uses = [*((t.table, t.form) for t in self.look_ups), *self.behind.uses]
        self.unread = self.behind.unread

    def __call__(self, step: StepContext) -> Any:
        if not any(isinstance(step.raw(t.table), ShardedTensor) for t in self.look_ups):
            return self.whole(step)
        env: dict[fx.Node, Tensor] = {}
        for look_up in self.look_ups:
            (table,) = step.weights([(look_up.table, look_up.form)])
            ids = step.get(look_up.ids, SPLIT)
            env[look_up.node] = _Rows.apply(look_up, step.sizes, step.common, table, ids)
        if self.behind.piece.nodes:
            after = replace(step, get=lambda n, at: env[n] if n in env else step.get(n, at))
            env.update(zip(self.behind.piece.outputs, self.behind(after), strict=True))
        return [env[n] for n in self.piece.outputs]
