"""``metp`` of a block of experts: the rank's own rows, and one group of experts after the other.

No token leaves its rank. The weights of a group come from the rank that holds them while the group
before is computed, and backward computes each group again, so that what is between an expert's
matmuls exists for one group at a time. Saved are the rows, in the order of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed.host_numbers import on_device
from paradyse.graph.subgraph import Piece, cast_of
from paradyse.strategies.base import Scope, StepContext, Uses, gradients
from paradyse.strategies.experts.exchange import FEWEST, num_rows_of
from paradyse.strategies.experts.model import split_experts
from paradyse.strategies.experts.rows import ExpertRows
from paradyse.strategies.streaming import GroupContext, Streaming
from paradyse.strategies.work import PIECE_OPS, Work


class StreamedExpertsVariant(Streaming):
    """A block of experts computed group by group on local tokens."""

    def __init__(self, scope: Scope, block: Any, piece: Piece):
        self.scope = scope
        self.groups = groups = split_experts(scope, block)
        self.rows = ExpertRows(scope, groups, piece)
        self.used = [g for g, (first, end) in enumerate(groups.bounds) if end > first]
        self.forms, self.streamed = list(groups.forms.values()), list(groups.forms.items())
        self.casts = [cast_of(piece, n) for n in groups.forms]
        around = [*self.rows.before.uses, *self.rows.after.uses]
        self.uses: Uses = list(dict.fromkeys([*around, *groups.forms.items()]))

    def __call__(self, step: StepContext) -> Any:
        values = self.rows.take_rows(step)
        rows = [values[n] for n in self.groups.rows]
        counts = num_rows_of(values[self.groups.ends], len(rows[0]), self.scope.axis)
        tensors = [*rows, *self.whole_or_shards(step, self.streamed).values()]
        at = GroupContext(step.sizes, step.common, step.block_id, step.sync, step.streams)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            result = _Stream.apply(self, at, counts, *tensors)
        else:
            result = self.forward_groups(at, counts, tensors, [False] * len(tensors))
        return self.rows.put_back(step, {**values, self.groups.result: result})

    def forward_groups(
        self,
        step: GroupContext,
        counts: Sequence[int],
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
    ) -> Tensor:
        """What the experts give for all rows.

        Args:
            step: the step.
            counts: rows of each expert.
            tensors: the rows, then the weights, whole or sharded by groups.
            needs: which need gradients; groups then run as they will in backward, so that nothing
                is compiled twice.
        """
        n = len(self.groups.rows)
        out, behind = None, step.streams.begin_following
        taken = self.taken(step, tensors[n:], any(needs), behind)
        for group in self.used:
            weights = taken.take(group, needs[n:])
            with torch.set_grad_enabled(any(needs)):
                y, at, _ = self._group(step, counts, group, tensors[:n], needs[:n], weights)
            if out is None:
                out = y.new_empty(len(tensors[0]), *y.shape[1:], requires_grad=False)
            out[at] = y.detach()[: at.stop - at.start]
        assert out is not None, "some group has experts"
        return out

    def backward_groups(
        self,
        step: GroupContext,
        counts: Sequence[int],
        tensors: Sequence[Tensor],
        grad: Tensor,
        needs: Sequence[bool],
        nodes: Sequence[Any],
    ) -> list[Tensor | None]:
        """Gradients of ``tensors``, each group computed again.

        Args:
            step, counts, tensors, needs: as ``forward_groups`` had them.
            grad: of what it gave.
            nodes: of autograd's graph, that the gradients go to.
        """
        n = len(self.groups.rows)
        before = partial(step.streams.begin_before, step.block_id)
        taken = self.taken(step, tensors[n:], True, before)
        pairs = zip(tensors[:n], needs)
        of_rows: list[Any] = [torch.zeros_like(x) if need else None for x, need in pairs]
        for group in self.used:
            weights = taken.take(group, needs[n:])
            with torch.enable_grad():
                y, at, leaves = self._group(step, counts, group, tensors[:n], needs[:n], weights)
            num = at.stop - at.start
            given = _with_missing(grad[at], len(y) - num)
            where = [i for i, need in enumerate(needs) if need]
            inputs = [*leaves, *weights]
            found = gradients([y], [given], [inputs[i] for i in where])
            for i, g in zip(where, found, strict=True):
                if i >= n:
                    taken.add(group, [i - n], [g])
                elif g is not None:
                    of_rows[i][at] = g[:num]
            del y
            taken.send(group)
        return [*of_rows, *taken.gradients(nodes[n:])]

    def _group(
        self,
        step: GroupContext,
        counts: Sequence[int],
        group: int,
        rows: Sequence[Tensor],
        needs: Sequence[bool],
        weights: Sequence[Tensor],
    ) -> tuple[Tensor, slice, list[Tensor]]:
        """What ``group`` gives, with its missing rows at the end; where its rows are among all;
        and the rows that it read."""
        (first, end), most = self.groups.bounds[group], len(self.groups.dealt[0])
        mine = [*counts[first:end], *[0] * (most - end + first)]
        start, num = sum(counts[:first]), sum(mine)
        missing = max(0, FEWEST - num)
        mine[-1] += missing
        leaves = [
            _with_missing(x.detach()[start : start + num], missing).requires_grad_(need)
            for x, need in zip(rows, needs, strict=True)
        ]
        device = leaves[0].device
        numbers, experts = on_device(mine, device), torch.arange(most, device=device)
        in_order = experts.repeat_interleave(numbers, output_size=num + missing)
        ends = numbers.cumsum(0, dtype=torch.int32)
        result = self.rows(step.sizes, step.common, leaves, in_order, ends, weights)
        return result, slice(start, start + num), leaves


def _with_missing(rows: Tensor, num_missing: int) -> Tensor:
    """``rows`` with so many of zeros behind them, in memory of their own."""
    zeros = rows.new_zeros(num_missing, *rows.shape[1:])
    return torch.cat([rows, zeros]) if num_missing else rows.contiguous()


class _Stream(torch.autograd.Function):
    """All groups, with what backward does written out."""

    @staticmethod
    def forward(
        ctx: Any,
        variant: StreamedExpertsVariant,
        step: GroupContext,
        counts: Sequence[int],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.of = variant, step, counts
        ctx.save_for_backward(*tensors)
        return variant.forward_groups(step, counts, tensors, ctx.needs_input_grad[3:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        variant, *of = ctx.of
        tensors = ctx.saved_tensors
        needs, nodes = ctx.needs_input_grad[3:], [node for node, _ in ctx.next_functions]
        return None, None, None, *variant.backward_groups(*of, tensors, grad, needs, nodes)


def count_streamed_experts(work: Work) -> None:
    """One group of experts after the other, in backward again.

    Args:
        work: of a block of experts.
    """
    p, back, rows_bytes = work.p, work.back, work.x_bytes * work.block.experts_per_token
    work.project_here(1 + 3 * back)
    work.num_ops += (p + 1) * PIECE_OPS * (1 + 2 * back)
    work.saved_bytes += 2 * rows_bytes
    work.workspace_bytes += work.between_bytes / p * (1 + back) + 2 * rows_bytes
