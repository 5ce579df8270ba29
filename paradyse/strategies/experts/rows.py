"""What an expert computes of its rows, compiled once for all groups of experts and numbers of
rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from paradyse.graph.lower import Dims
from paradyse.graph.subgraph import Piece, run
from paradyse.strategies.base import SPLIT, LoweredPiece, Scope, StepContext, piece_key
from paradyse.strategies.experts.model import ExpertGroups
from paradyse.strategies.groups.evaluate import local_shape
from paradyse.strategies.local import LocalPiece

ROWS = "R"
"""The letter of the number of rows."""


class ExpertRows:
    """The experts of a group over rows in their order, and what surrounds them on local tokens.

    Args:
        scope: what all variants of the capture share.
        groups: of the block.
        piece: the block's nodes, inputs and outputs.
    """

    def __init__(self, scope: Scope, groups: ExpertGroups, piece: Piece):
        self.scope, self.groups = scope, groups
        self.order = [*groups.rows, *[groups.in_order] * (groups.in_order is not None)]
        self.order += [groups.ends, *groups.forms]
        rows = scope.names.of(groups.rows[0])[0]
        dims: list[Dims] = []
        for node in self.order:
            shape = local_shape(scope, node, groups.sizes, SPLIT)
            if node in groups.forms or node is groups.ends:
                dims.append(shape)
            else:
                assert scope.names.of(node)[0] == rows
                dims.append(((ROWS,), *shape[1:]))
        key = piece_key(scope, piece, SPLIT, f"experts, {len(groups.dealt[0])} of a group")
        self.lowered = LoweredPiece(scope, key, self._compute, dims)
        self.before = LocalPiece(scope, groups.before, SPLIT, "before experts", within=piece)
        self.after = LocalPiece(scope, groups.after, SPLIT, "behind experts", within=piece)

    def _compute(
        self, sizes: dict[str, Any], common: Sequence[Tensor], own: Iterator[Tensor]
    ) -> Sequence[Any]:
        factors = {**self.groups.sizes, self.scope.seq: sizes[ROWS]}
        given = dict(zip(self.order, own))
        piece = self.groups.experts
        return run(piece, [given[n] for n in piece.inputs], self.scope.names, factors)

    def __call__(
        self,
        sizes: Mapping[str, int],
        common: Sequence[Tensor],
        rows: Sequence[Tensor],
        in_order: Tensor,
        ends: Tensor,
        weights: Sequence[Tensor],
    ) -> Tensor:
        """[R, ...], what the experts of a group give for ``rows``.

        Args:
            sizes, common: of the step.
            rows: values [R, ...] of ``ExpertGroups.rows``.
            in_order, ends: [R] and [experts of a group], counted from the group's first expert.
            weights: of ``ExpertGroups.forms``, as a group takes them.
        """
        own = [*rows, *[in_order] * (self.groups.in_order is not None), ends, *weights]
        (out,) = self.lowered({**sizes, ROWS: len(in_order)}, common, own)
        result: Tensor = out
        return result

    def take_rows(self, step: StepContext) -> dict[Any, Tensor]:
        """Values of ``ExpertGroups.before`` in ``step``, by node."""
        piece = self.groups.before
        return dict(zip(piece.outputs, self.before(step), strict=True))

    def put_back(self, step: StepContext, values: Mapping[Any, Tensor]) -> Any:
        """The block's outputs in ``step`` from ``values``, which ``take_rows`` gave, and the
        experts' result."""
        body = self.after
        at = zip(body.inputs, body.layouts, strict=True)
        own = [values[n] if n in values else step.get(n, layout) for n, layout in at]
        return body.lowered(step.sizes, step.common, [*own, *step.weights(body.uses)])
