"""dsp: the split goes to another dim of the tokens for the block, and back.

Dynamic Sequence Parallelism (arXiv 2403.10266): where tokens have two dims, such as time and space,
and attention mixes the one that is split at rest, an all-to-all of the block's input splits the
other one instead. The whole block is then computed on the rank with whole weights, and a second
all-to-all brings its output back. With M elements in a value and p ranks that sends 2 M / p, where
Ulysses sends q, k, v and the output. The batch is such a dim as well.

A block that mixes no dim that is split needs no switch: it is the variant of ``megatron_cz``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.distributed.switch import rows_per_rank, switch_back, switch_split
from paradyse.graph.attention_call import Apply, AttentionCall, apply_operator
from paradyse.graph.factors import Factor, size_of
from paradyse.graph.lower import Dims
from paradyse.graph.subgraph import Piece, run
from paradyse.strategies.base import (
    SPLIT,
    WHOLE,
    LoweredPiece,
    PieceVariant,
    Scope,
    StepContext,
    Strategy,
    Uses,
    attended_by,
    bind_factors,
    piece_key,
    spec_dims,
    split_inputs,
)
from paradyse.strategies.dropout import dropout_overrides, sequence_ids
from paradyse.strategies.groups.analyse import factors_of, may_be_split
from paradyse.strategies.groups.model import Unsplittable
from paradyse.strategies.local import APART, count_apart, zero_variant
from paradyse.strategies.work import CORE_OPS, EXCHANGE_OPS, Work
from paradyse.types import DSP as NAME
from paradyse.types import EXPERTS


class SwitchedPiece(PieceVariant):
    """A block computed with all of the dim that is split at rest and some rows of another one.

    Args:
        piece: the whole block.
        attention: its attention, if it has one.
        to: the dim that is split meanwhile, which nothing in it mixes.
    """

    def __init__(self, scope: Scope, piece: Piece, attention: fx.Node | None, to: Factor):
        self.scope, self.piece, self.attention, self.to = scope, piece, attention, to
        masks = AttentionCall.of(attention).mask_nodes if attention is not None else []
        self.inputs, self.weight_nodes = split_inputs(piece)
        self.uses: Uses = [(n, None) for n in self.weight_nodes]
        self.layouts = [WHOLE if n in masks or self._is_whole(n) else SPLIT for n in self.inputs]
        """SPLIT: it is switched. Of a whole value the rank's rows are at hand."""
        self.order = [*self.inputs, *self.weight_nodes]
        at = dict(zip(self.inputs, self.layouts, strict=True))
        dims = [spec_dims(scope, n, at.get(n, WHOLE)) for n in self.order]
        values = [*piece.outputs, *self.order]
        at_dims = [[d for d, f in enumerate(self._factors(n)) if f is to] for n in values]
        key = piece_key(scope, piece, SPLIT, f"{NAME} {at_dims} {self.layouts}")
        self.lowered = LoweredPiece(scope, key, self.compute, dims)

    def _is_whole(self, node: fx.Node) -> bool:
        """Whether ``node`` is taken whole: it is so at rest, or lacks a dim to switch, or has two
        of tokens, as a mask does."""
        if node.op == "placeholder" or not may_be_split(node):
            return True
        if self._factors(node).count(self.scope.seq) > 1:
            return True
        return not {self.scope.seq, self.to} <= factors_of(self.scope, node)

    def compute(
        self,
        sizes: dict[str, Any],
        common: Sequence[Tensor],
        own: Iterator[Tensor],
        apply: Apply = apply_operator,
    ) -> Sequence[Any]:
        """See ``PieceVariant``: of ``sizes``, ``common``, ``own`` and ``apply``."""
        scope, to, axis = self.scope, self.to, self.scope.axis
        whole, local, _, info, seed = common
        everywhere = bind_factors(scope, WHOLE, sizes)
        num = size_of((to,), everywhere)
        rows = rows_per_rank(num, axis.size)
        positions = torch.arange(rows, device=whole.device) + axis.rank * rows
        mine = positions.clamp(max=num - 1)
        factors = {**everywhere, to: rows}
        at_rest = bind_factors(scope, SPLIT, sizes)

        def switched(node: fx.Node, x: Tensor) -> Tensor:
            apart, dim, at = self._apart(node, x, at_rest)
            y = switch_split(apart, local, whole, info, dim, at, num, False, axis.name)
            return self._together(node, y, factors)

        def own_rows(node: fx.Node, x: Tensor) -> Tensor:
            if to not in factors_of(scope, node):
                return x
            apart, _, at = self._apart(node, x, everywhere)
            return self._together(node, apart.index_select(at, mine), factors)

        given = {}
        for node, layout in zip(self.inputs, self.layouts, strict=True):
            given[node] = (switched if layout == SPLIT else own_rows)(node, next(own))
        for node in self.weight_nodes:
            given[node] = own_rows(node, next(own))
        known = {to: (positions, num)}
        nodes = self.piece.nodes
        overrides = dropout_overrides(scope, nodes, WHOLE, sizes, common, own=known)
        if self.attention is not None:
            ids = sequence_ids(scope, self.attention, WHOLE, sizes, common, known)

            def attend(*args: Any) -> Any:
                return AttentionCall(*args).seeded(seed, ids).run(apply)

            overrides[self.attention] = attend
        values = [given[n] for n in self.piece.inputs]
        outputs = []
        for node, y in zip(
            self.piece.outputs,
            run(self.piece, values, scope.names, factors, overrides),
            strict=True,
        ):
            apart, dim, at = self._apart(node, y, factors)
            x = switch_back(apart, local, whole, info, dim, at, num, False, axis.name)
            outputs.append(self._together(node, x, at_rest))
        return outputs

    def _factors(self, node: fx.Node) -> list[Factor]:
        return [f for d in self.scope.names.of(node) for f in d]

    def _apart(self, node: fx.Node, x: Tensor, sizes: dict[Factor, Any]) -> tuple[Tensor, int, int]:
        """``x``, whose dims are those of ``node`` at ``sizes``, with a dim for each factor; and
        those of the split at rest (-1 where there is none) and of ``to``."""
        found = self._factors(node)
        seq = found.index(self.scope.seq) if self.scope.seq in found else -1
        return x.reshape([size_of((f,), sizes) for f in found]), seq, found.index(self.to)

    def _together(self, node: fx.Node, x: Tensor, sizes: dict[Factor, Any]) -> Tensor:
        """``x`` with a dim for each factor of ``node`` as ``node`` has them, at ``sizes``."""
        return x.reshape([size_of(d, sizes) for d in self.scope.names.of(node)])

    def tensors(self, step: StepContext) -> list[Tensor]:
        """See ``PieceVariant``, of ``step``."""
        inputs = [step.get(n, at) for n, at in zip(self.inputs, self.layouts, strict=True)]
        return [*inputs, *step.weights(self.uses)]

    def output_dims(self) -> list[Dims]:
        """See ``PieceVariant``."""
        return [spec_dims(self.scope, n, SPLIT) for n in self.piece.outputs]

    def attended_dims(self) -> Dims | None:
        """See ``PieceVariant``; with the dim that is split meanwhile whole."""
        if self.attention is None:
            return None
        return spec_dims(self.scope, attended_by(self.attention), WHOLE)


def _build(scope: Scope, block: Any, piece: Piece) -> PieceVariant:
    if block.apart or scope.axis.size == 1:
        return zero_variant(scope, piece, block.attention, APART)
    if block.switch is None:
        raise Unsplittable(block.no_switch)
    return SwitchedPiece(scope, piece, block.attention, block.switch)


def _refuses(block: Any) -> str:
    needs_none = block.attention is None or block.apart or block.switch is not None
    return "" if needs_none else block.no_switch


def _count(work: Work) -> None:
    """The block's input in one message, its output in another."""
    if work.workload.over_len is not None:
        work.project_here(1 + 2 * work.back)
        work.saved_bytes += work.between_bytes
        count_apart(work)
        return
    p, passes, workload = work.p, 1 + work.back, work.workload
    num = workload.switch_len or workload.batch
    share = rows_per_rank(num, p) / num
    """Of all tokens, those that the rank with the most computes: 1 where there is one row."""
    more = share * workload.seq_len / work.local_len
    """By how many times that is more than at rest."""
    moved = p * share * work.x_bytes  # padding included
    work.send("all_to_all", 2 * moved * (p - 1) / p * passes, 2 * passes)
    work.projected *= more
    work.project_here(1 + 2 * work.back)
    work.attend(work.block.num_heads, work.pairs * share)
    values = 6 * work.block.hidden + 2 * work.columns  # of what ``Work.surround`` counts at rest
    work.moved_bytes += (more - 1) * work.tokens * values * work.itemsize * (1 + 2 * work.back)
    work.moved_bytes += 2 * 4 * moved * passes  # two copies at each end, each read and written
    work.num_ops += (CORE_OPS + EXCHANGE_OPS) * passes
    attended = work.attended_bytes
    work.saved_bytes += more * work.between_bytes + (more - 1) * (attended + 2 * work.x_bytes)
    work.workspace_bytes += 3 * moved + more * work.out_bytes


DSP = Strategy(
    NAME,
    _build,
    _count,
    same_as=dict.fromkeys(("mlp", EXPERTS), "megatron_cz"),
    refuses=_refuses,
    without={
        "selective": "dsp keeps no attention of the rank's own tokens",
        "chunked": "dsp switches the split of the block's input and output as a whole",
    },
)
