"""Moving values between the rest layout (tokens split over ranks) and the whole sequence, differentiably.

``paradyse::gather_tokens`` and ``paradyse::reduce_scatter_tokens`` are operators for use inside compiled
pieces; ``SplitTokens`` and ``GatherTokens`` are the steps between pieces. Gradient convention: the gradient
of a replicated value is whole on every rank, the gradient of a split value is the rank's rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paradyse import comm
from paradyse.mesh import Axis, TokenLayout, axis_named


def take_rows(x: Tensor, layout: TokenLayout, rank: int, dim: int, fill: float | bool = 0) -> Tensor:
    """The rows of ``x`` [.., S or S', ..] that ``rank`` holds, [.., s, ..]; rows past the end are ``fill``."""
    if layout.num_ranks == 1:
        return x
    parts = []
    for start, n in layout.runs(rank):
        stop = min(start + n, x.shape[dim])
        part = x.narrow(dim, start, stop - start) if stop > start else x.narrow(dim, 0, 0)
        if part.shape[dim] < n:
            shape = list(x.shape)
            shape[dim] = n - part.shape[dim]
            part = torch.cat([part, x.new_full(shape, fill)], dim)
        parts.append(part)
    return torch.cat(parts, dim)


def natural_order(stacked: Tensor, dim: int) -> Tensor:
    """``stacked`` [p, .., s, ..] of all ranks' rows as one tensor [.., p s, ..] in sequence order."""
    p = stacked.shape[0]
    halves = [t.chunk(2, dim) for t in stacked.unbind(0)]
    return torch.cat([h[0] for h in halves] + [halves[r][1] for r in range(p - 1, -1, -1)], dim)


def rank_order(x: Tensor, num_ranks: int, dim: int) -> Tensor:
    """The inverse of ``natural_order``: [.., p s, ..] to [p, .., s, ..]."""
    chunks = x.chunk(2 * num_ranks, dim)
    return torch.stack(
        [torch.cat([chunks[r], chunks[2 * num_ranks - 1 - r]], dim) for r in range(num_ranks)]
    )


def gather_whole(x: Tensor, axis: Axis, block_id: int, dim: int) -> Tensor:
    """All ranks' rows [.., p s, ..] in sequence order, padding included."""
    return natural_order(comm.all_gather(x, axis, block_id), dim)


@torch.library.custom_op("paradyse::gather_tokens", mutates_args=())
def gather_tokens(x: Tensor, info: Tensor, dim: int, axis: str) -> Tensor:
    """[.., s, ..] of this rank to [.., p s, ..] in sequence order. Backward: reduce-scatter."""
    return gather_whole(x, axis_named(axis), int(info[1]), dim)


@gather_tokens.register_fake
def _(x: Tensor, info: Tensor, dim: int, axis: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] * axis_named(axis).size
    return x.new_empty(shape)


@torch.library.custom_op("paradyse::reduce_scatter_tokens", mutates_args=())
def reduce_scatter_tokens(x: Tensor, info: Tensor, dim: int, axis: str) -> Tensor:
    """Sum over ranks of partial [.., p s, ..], this rank's rows [.., s, ..]. Backward: all-gather."""
    a = axis_named(axis)
    return comm.reduce_scatter(rank_order(x, a.size, dim), a, int(info[1]))


@reduce_scatter_tokens.register_fake
def _(x: Tensor, info: Tensor, dim: int, axis: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] // axis_named(axis).size
    return x.new_empty(shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, info, ctx.dim, ctx.axis = inputs
    ctx.save_for_backward(info)


gather_tokens.register_autograd(
    lambda ctx, g: (reduce_scatter_tokens(g, ctx.saved_tensors[0], ctx.dim, ctx.axis), None, None, None),
    setup_context=_save,
)
reduce_scatter_tokens.register_autograd(
    lambda ctx, g: (gather_tokens(g, ctx.saved_tensors[0], ctx.dim, ctx.axis), None, None, None),
    setup_context=_save,
)


class SplitTokens(torch.autograd.Function):
    """Replicated [.., S, ..] to this rank's rows [.., s, ..]: a local slice; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis, block_id: int) -> Tensor:
        ctx.where = (dim, axis, block_id, x.shape[dim])
        return take_rows(x, axis.layout(x.shape[dim]), axis.rank, dim).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        dim, axis, block_id, seq_len = ctx.where
        return gather_whole(grad, axis, block_id, dim).narrow(dim, 0, seq_len), None, None, None


class GatherTokens(torch.autograd.Function):
    """This rank's rows [.., s, ..] to the whole [.., S, ..] on every rank; backward is a local slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, seq_len: int, axis: Axis, block_id: int) -> Tensor:
        ctx.where = (dim, axis, seq_len)
        return gather_whole(x, axis, block_id, dim).narrow(dim, 0, seq_len).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        dim, axis, seq_len = ctx.where
        return take_rows(grad, axis.layout(seq_len), axis.rank, dim), None, None, None, None


class SumOverRanks(torch.autograd.Function):
    """Partial sums to the total on every rank. Backward: the (whole) gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, block_id: int) -> Tensor:
        return comm.all_reduce(x, axis, block_id)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None, None
