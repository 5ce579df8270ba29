"""The Z strategies: each rank computes its own tokens with whole weights; attention crosses ranks.

``megatron_cz`` rings K/V (context parallel), ``ulysses_z`` turns sequence into heads and back by
all-to-all, ``colossal_z`` rings K and V over rows of scores. Everything else of the block is
local, so the three are one program with another attention operator, and for an MLP they are the
same program. One rank is the case without any exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from paradyse.graph.attention_call import ATTENTION, Apply, AttentionCall, apply_operator
from paradyse.graph.dropouts import dropout_places
from paradyse.graph.factors import Factor
from paradyse.graph.lower import Dims
from paradyse.graph.subgraph import Override, Piece, run
from paradyse.strategies.attention.operators import attend_across_ranks
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
from paradyse.strategies.groups.evaluate import local_shape
from paradyse.strategies.work import CORE_OPS, EXCHANGE_OPS, Exchange, Work
from paradyse.types import EXPERTS

_METHODS = {"megatron_cz": "ring", "ulysses_z": "ulysses", "colossal_z": "colossal"}
"""How attention crosses ranks under each strategy."""

APART = "apart"
"""In place of a strategy where attention is over a dim that is not split: each rank computes its
own sequences, and nothing crosses ranks."""

KEYS_GO_ROUND = (
    "keys and values go round the ranks; each has all of its heads' under ulysses_z alone"
)
"""Why a strategy cannot fetch them from the host by chunks."""


def attention_override(
    scope: Scope, strategy: str, common: Sequence[Tensor], apply: Apply, ids: Tensor | None
) -> Override:
    """The attention operator of ``strategy`` over the axis of ``scope``, called by ``apply`` with
    the arguments of ``paradyse::attention``; ``common`` is ``StepContext.common``, ``ids`` the
    ``sequence_ids`` where the rank has some sequences.
    """
    *_, info, seed = common

    def local(*args: Any) -> Any:
        return AttentionCall(*args).seeded(seed, ids).run(apply)

    def across_ranks(*args: Any) -> Any:
        call = replace(AttentionCall(*args).seeded(seed), info=info)
        return attend_across_ranks(call, _METHODS[strategy], scope.axis, apply)

    return across_ranks if strategy in _METHODS and scope.axis.size > 1 else local


class LocalPiece(PieceVariant):
    """A piece run in one layout with whole weights; attention by a strategy of this file.

    Args:
        layout: of its values, on the rank's tokens ("s") or whole ("S").
        strategy: of ``attention``; for a piece without it, what tells it from others.
        within: the block that the piece is a part of; None: it stands alone.
        eager: run operator by operator; else compiled on first use.
        parts: sizes of dims other than tokens of which the rank has a part.
    """

    def __init__(
        self,
        scope: Scope,
        piece: Piece,
        layout: str,
        strategy: str,
        attention: fx.Node | None = None,
        within: Piece | None = None,
        eager: bool = False,
        parts: Mapping[Factor, int] | None = None,
    ):
        self.scope, self.piece, self.layout, self.parts = scope, piece, layout, parts or {}
        self.strategy, self.attention, self.within = strategy, attention, within or piece
        # it waits for queries, keys and values of all ranks before it attends
        self.begins_with_message = attention is not None and strategy == "ulysses_z"
        whole = AttentionCall.of(attention).mask_nodes if attention is not None else []
        if strategy == APART:
            whole = []  # masks of the sequences that the rank has
        self.inputs, self.weight_nodes = split_inputs(piece)
        self.uses: Uses = [(n, None) for n in self.weight_nodes]
        self.layouts = [WHOLE if n in whole else layout for n in self.inputs]
        self.order = [*self.inputs, *self.weight_nodes]
        self.unread = {n for n in self.weight_nodes if _is_looked_up(piece, n)}
        """Weights that backward does not read."""
        at = dict(zip(self.inputs, self.layouts, strict=True))
        dims = [local_shape(scope, n, self.parts, at.get(n, layout)) for n in self.order]
        key = piece_key(scope, self.within, layout, f"{strategy} {list(self.parts.values())}")
        self.lowered = LoweredPiece(scope, key, self.compute, dims, eager)

    def compute(
        self,
        sizes: dict[str, Any],
        common: Sequence[Tensor],
        own: Iterator[Tensor],
        apply: Apply = apply_operator,
    ) -> Sequence[Any]:
        """See ``PieceVariant``: of ``sizes``, ``common``, ``own`` and ``apply``."""
        scope, piece = self.scope, self.piece
        overrides = dropout_overrides(scope, self.within.nodes, self.layout, sizes, common)
        if self.attention is not None:
            ids = None
            if self.strategy == APART:
                ids = sequence_ids(scope, self.attention, self.layout, sizes, common)
            way = attention_override(scope, self.strategy, common, apply, ids)
            overrides[self.attention] = way
        overrides |= self._attention_beside(sizes, common, apply)
        given = dict(zip(self.order, own))
        factors = {**bind_factors(scope, self.layout, sizes), **self.parts}
        return run(piece, [given[n] for n in piece.inputs], scope.names, factors, overrides)

    def _attention_beside(
        self, sizes: dict[str, Any], common: Sequence[Tensor], apply: Apply
    ) -> dict[fx.Node, Override]:
        """What runs in place of attention with dropout that is in no block."""
        out: dict[fx.Node, Override] = {}
        for node, i in dropout_places(self.within.nodes).items():
            if node.target is ATTENTION and node is not self.attention:
                ids = sequence_ids(self.scope, node, self.layout, sizes, common)

                def attend(*args: Any, seed: Tensor = common[-1] + (i + 1), ids: Any = ids) -> Any:
                    return AttentionCall(*args).seeded(seed, ids).run(apply)

                out[node] = attend
        return out

    def tensors(self, step: StepContext) -> list[Tensor]:
        """See ``PieceVariant``, of ``step``."""
        inputs = [step.get(n, at) for n, at in zip(self.inputs, self.layouts, strict=True)]
        return [*inputs, *step.weights(self.uses)]

    def output_dims(self) -> list[Dims]:
        """See ``PieceVariant``."""
        return [spec_dims(self.scope, n, self.layout) for n in self.piece.outputs]

    def attended_dims(self) -> Dims | None:
        """See ``PieceVariant``."""
        if self.attention is None:
            return None
        return spec_dims(self.scope, attended_by(self.attention), self.layout)


def _is_looked_up(piece: Piece, weight: fx.Node) -> bool:
    """Whether ``piece`` reads rows of ``weight`` by their numbers and nothing else of it."""
    readers = (n for n in piece.nodes if weight in n.all_input_nodes)
    return all(n.target == torch.ops.aten.embedding.default for n in readers)


def zero_variant(
    scope: Scope, piece: Piece, attention: fx.Node | None, strategy: str
) -> LocalPiece:
    """A whole block as one local ``piece`` on the rank's tokens, ``attention`` by ``strategy``.

    Args:
        scope: what all variants of the capture share.
    """
    layout = SPLIT if scope.axis.size > 1 else WHOLE
    return LocalPiece(scope, piece, layout, strategy, attention)


def _count_ring(work: Work) -> None:
    work.ring(work.keys_bytes(2 * work.block.num_kv_heads), work.block.num_heads)
    work.attend(work.block.num_heads, work.pairs / work.p)
    work.workspace_bytes += work.out_bytes


def _count_exchange(work: Work) -> None:
    """q, k, v in one message, the output in another; or several of each, one turn's after the
    other's."""
    p, passes = work.p, 1 + work.back
    moved = work.heads_bytes(2 * work.own_heads * p) + work.keys_bytes(2 * work.own_kv * p)
    messages = 2 if work.workload.key_len is None else 3
    sent = moved * (p - 1) / p * passes, messages * passes
    work.send("all_to_all", *sent)
    each_bytes = work.heads_bytes(work.own_heads) + work.keys_bytes(2 * work.own_kv)
    work.exchange = Exchange(*sent, each_bytes)
    work.attend(work.own_heads, work.pairs)
    work.moved_bytes += 12 * moved * passes  # six copies, each read and written
    work.num_ops += (CORE_OPS + EXCHANGE_OPS) * passes
    work.save_attended(work.out_bytes)  # own heads and own tokens: for the core and the projection
    work.workspace_bytes += 2 * moved


def _count_scores(work: Work) -> None:
    """K goes round, then V; rows [s, p s] of the scores are dense, in float32."""
    heads, pairs = work.block.num_heads, work.local_len * work.local_keys * work.p
    work.ring(work.keys_bytes(2 * work.block.num_kv_heads), heads, messages=2)
    work.attend(heads, pairs)
    scores_bytes = 4.0 * work.workload.batch * heads * pairs
    work.moved_bytes += scores_bytes * (4 + 6 * work.back)
    work.workspace_bytes += scores_bytes * (2 + work.back) + work.out_bytes


def count_apart(work: Work) -> None:
    """Count attention over a dim of which each rank has all as ``work``."""
    work.attend(work.block.num_heads, work.pairs / work.p)
    work.num_ops += CORE_OPS * (1 + work.back)
    work.workspace_bytes += work.out_bytes


def _strategy(
    name: str, count_core: Callable[[Work], None], without: Mapping[str, str] | None = None
) -> Strategy:
    def build(scope: Scope, block: Any, piece: Piece) -> LocalPiece:
        way = APART if block.apart and scope.axis.size > 1 else name
        return zero_variant(scope, piece, block.attention, way)

    def count(work: Work) -> None:
        work.project_here(1 + 2 * work.back)
        work.saved_bytes += work.between_bytes
        if work.workload.over_len is not None:
            count_apart(work)
        elif work.is_attention:
            count_core(work)
        else:
            work.workspace_bytes += work.between_bytes

    same_as = dict.fromkeys(("mlp", EXPERTS), "megatron_cz")
    return Strategy(name, build, count, "whole", same_as, without=without or {})


MEGATRON_CZ = _strategy("megatron_cz", _count_ring, {"chunked": KEYS_GO_ROUND})
ULYSSES_Z = _strategy(
    "ulysses_z",
    _count_exchange,
    {"selective": "ulysses keeps the queries, keys and values that it has exchanged"},
)
COLOSSAL_Z = _strategy("colossal_z", _count_scores, {"chunked": KEYS_GO_ROUND})
