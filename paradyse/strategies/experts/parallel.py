"""``megatron_ts`` of a block of experts: expert parallel (GShard, arXiv 2006.16668, section 3).

Each rank holds some of the experts, all of each. Every rank's router sends the rows of its tokens
to the ranks of their experts, by an all-to-all whose parts are as large as there are rows, and gets
back what those computed. Router, weighted sum and residual are of local tokens.
"""

from __future__ import annotations

from typing import Any

from paradyse.graph.subgraph import Piece
from paradyse.strategies.base import Scope, StepContext, Uses
from paradyse.strategies.experts.exchange import deal_rows
from paradyse.strategies.experts.model import split_experts
from paradyse.strategies.experts.rows import ExpertRows
from paradyse.strategies.work import EXCHANGE_OPS, PIECE_OPS, Work

COUNT_BYTES = 8
"""Of the number of rows of an expert."""


class ExpertParallelVariant:
    """A block of experts, each computed on the rank that holds it."""

    def __init__(self, scope: Scope, block: Any, piece: Piece):
        self.scope = scope
        self.groups = split_experts(scope, block)
        self.rows = ExpertRows(scope, self.groups, piece)
        self.own: Uses = list(self.groups.forms.items())
        around = [*self.rows.before.uses, *self.rows.after.uses]
        self.uses: Uses = list(dict.fromkeys([*around, *self.own]))

    def __call__(self, step: StepContext) -> Any:
        groups = self.groups
        values = self.rows.take_rows(step)
        ends, num_rows = values[groups.ends], len(values[groups.rows[0]])
        dealing = deal_rows(ends, num_rows, groups.bounds, self.scope.axis, step.block_id)
        came = [dealing.bring(values[n]) for n in groups.rows]
        weights = [w.contiguous() for w in step.weights(self.own)]
        own = step.sizes, step.common
        result = self.rows(*own, came, dealing.in_order, dealing.ends, weights)
        return self.rows.put_back(step, {**values, groups.result: dealing.take_back(result)})


def count_expert_parallel(work: Work) -> None:
    """Rows to their experts and back, in backward their gradients; as if each rank's experts had
    equally many.

    Args:
        work: of a block of experts.
    """
    p, block, passes = work.p, work.block, 1 + work.back
    work.project_here(1 + 2 * work.back, of_experts=1 / p)
    rows_bytes = work.x_bytes * block.experts_per_token
    work.send("all_to_all", 2 * passes * rows_bytes * (p - 1) / p, 2 * passes)
    work.send("all_gather", (p - 1) * block.num_experts * COUNT_BYTES)
    work.num_ops += (2 * PIECE_OPS + 2 * EXCHANGE_OPS) * passes
    work.moved_bytes += 8 * rows_bytes * passes
    work.saved_bytes += work.between_bytes + 2 * rows_bytes
    work.workspace_bytes += work.between_bytes + 2 * rows_bytes
