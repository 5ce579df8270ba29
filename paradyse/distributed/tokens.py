"""Moving values between the rest layout (tokens split over ranks) and the whole sequence,
differentiably.

``paradyse::gather_tokens`` and ``paradyse::reduce_scatter_tokens`` are operators for use inside
compiled pieces; ``SplitTokens`` and ``GatherTokens`` are the steps between pieces. Gradient
convention: the gradient of a replicated value is whole on every rank, the gradient of a split
value is the rank's rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis, TokenLayout, axis_named


def take_rows(
    x: Tensor, layout: TokenLayout, rank: int, dim: int, fill: int | None = None
) -> Tensor:
    """The rows of ``x`` [.., S, ..] that ``rank`` holds, [.., s, ..].

    Rows past the end are copies of the last row, so that whatever is computed from them stays
    finite, or ``fill``.
    """
    if layout.num_ranks == 1:
        return x
    parts = []
    for start, n in layout.runs(rank):
        have = max(0, min(n, layout.seq_len - start))
        if have:
            parts.append(x.narrow(dim, start, have))
        if have < n:
            last = x.narrow(dim, layout.seq_len - 1, 1)
            shape = [*x.shape[:dim], n - have, *x.shape[dim + 1 :]]
            parts.append(last.expand(shape) if fill is None else x.new_full(shape, fill))
    return torch.cat(parts, dim)


def natural_order(stacked: Tensor, dim: int) -> Tensor:
    """``stacked`` [p, .., s, ..] of all ranks' rows as one tensor [.., p s, ..] in sequence
    order.
    """
    p = stacked.shape[0]
    halves = [t.chunk(2, dim) for t in stacked.unbind(0)]
    return torch.cat([h[0] for h in halves] + [halves[r][1] for r in range(p - 1, -1, -1)], dim)


def rank_order(x: Tensor, layout: TokenLayout, dim: int) -> Tensor:
    """[.., S, ..] in sequence order to [p, .., s, ..], every rank's rows; rows past the end are
    0.
    """
    short = layout.padded_len - x.shape[dim]
    if short:
        x = torch.nn.functional.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, short])
    p = layout.num_ranks
    chunks = x.chunk(2 * p, dim)
    return torch.stack([torch.cat([chunks[r], chunks[2 * p - 1 - r]], dim) for r in range(p)])


def gather_whole(x: Tensor, axis: Axis, block_id: int, dim: int) -> Tensor:
    """All ranks' rows [.., p s, ..] in sequence order, padding included."""
    return natural_order(collectives.all_gather(x, axis, block_id), dim)


@torch.library.custom_op("paradyse::gather_tokens", mutates_args=())
def gather_tokens(
    x: Tensor, local: Tensor, whole: Tensor, info: Tensor, dim: int, axis: str
) -> Tensor:
    """[.., s, ..] of this rank to the whole [.., S, ..] in sequence order. Backward:
    reduce-scatter.

    Args:
        local: the rank's positions [s], whole: all positions [S]; only their lengths are read.
        info: int64 [2] on the CPU: sequence length S, block id.
    """
    gathered = gather_whole(x, axis_named(axis), int(info[1]), dim)
    return gathered.narrow(dim, 0, whole.shape[0]).contiguous()


@gather_tokens.register_fake
def _(x: Tensor, local: Tensor, whole: Tensor, info: Tensor, dim: int, axis: str) -> Tensor:
    return x.new_empty([*x.shape[:dim], whole.shape[0], *x.shape[dim + 1 :]])


@torch.library.custom_op("paradyse::reduce_scatter_tokens", mutates_args=())
def reduce_scatter_tokens(
    x: Tensor, local: Tensor, whole: Tensor, info: Tensor, dim: int, axis: str
) -> Tensor:
    """Sum over ranks of partial [.., S, ..], this rank's rows [.., s, ..]. Backward: all-gather."""
    a = axis_named(axis)
    return collectives.reduce_scatter(rank_order(x, a.layout(x.shape[dim]), dim), a, int(info[1]))


@reduce_scatter_tokens.register_fake
def _(x: Tensor, local: Tensor, whole: Tensor, info: Tensor, dim: int, axis: str) -> Tensor:
    return x.new_empty([*x.shape[:dim], local.shape[0], *x.shape[dim + 1 :]])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, local, whole, info, ctx.dim, ctx.axis = inputs
    ctx.save_for_backward(local, whole, info)


gather_tokens.register_autograd(
    lambda ctx, g: (reduce_scatter_tokens(g, *ctx.saved_tensors, ctx.dim, ctx.axis), *[None] * 5),
    setup_context=_save,
)
reduce_scatter_tokens.register_autograd(
    lambda ctx, g: (gather_tokens(g, *ctx.saved_tensors, ctx.dim, ctx.axis), *[None] * 5),
    setup_context=_save,
)


class SplitTokens(torch.autograd.Function):
    """Replicated [.., S, ..] to this rank's rows [.., s, ..]: a local slice; backward gathers."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, axis: Axis, block_id: int, fill: int | None = None
    ) -> Tensor:
        ctx.where = (dim, axis, block_id, x.shape[dim])
        return take_rows(x, axis.layout(x.shape[dim]), axis.rank, dim, fill)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dim, axis, block_id, seq_len = ctx.where
        return (
            gather_whole(grad, axis, block_id, dim).narrow(dim, 0, seq_len),
            None,
            None,
            None,
            None,
        )


class GatherTokens(torch.autograd.Function):
    """This rank's rows [.., s, ..] to the whole [.., S, ..] on every rank; backward is a local
    slice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, seq_len: int, axis: Axis, block_id: int) -> Tensor:
        ctx.where = (dim, axis, seq_len)
        return gather_whole(x, axis, block_id, dim).narrow(dim, 0, seq_len).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dim, axis, seq_len = ctx.where
        rows = rank_order(grad, axis.layout(seq_len), dim)[axis.rank]
        return rows, None, None, None, None


class SumOverRanks(torch.autograd.Function):
    """Partial sums to the total on every rank. Backward: the (whole) gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, block_id: int) -> Tensor:
        return collectives.all_reduce(x, axis, block_id)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


class ReduceGrad(torch.autograd.Function):
    """A replicated value used for a part of the work: itself; backward sums the parts of its
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, block_id: int) -> Tensor:
        ctx.where = (axis, block_id)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return collectives.all_reduce(grad, *ctx.where), None, None
