"""Differentiable moves between tokens split over ranks (the rest layout) and the whole sequence.

Shapes: S is the length of the sequence, s what a rank holds of it (``TokenLayout.local_len``), p
the number of ranks. ``gather_tokens``, ``reduce_scatter_tokens`` and ``exchange_tokens`` are
operators for use inside compiled pieces; ``SplitTokens`` and ``GatherTokens`` are the steps between
pieces. The gradient of a replicated value is whole on every rank; the gradient of a split value is
the rank's rows.
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
    """The rows of ``x`` [.., S, ..] that ``rank`` holds in ``layout`` along ``dim``, [.., s, ..].

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
    """Rows of every rank, ``stacked`` [p, .., s, ..], as one tensor [.., p s, ..] in sequence
    order; ``dim`` is that of the result. An odd s is one chunk (``TokenLayout``)."""
    p = stacked.shape[0]
    if stacked.shape[dim + 1] % 2:
        return torch.cat(stacked.unbind(0), dim)
    halves = [t.chunk(2, dim) for t in stacked.unbind(0)]
    return torch.cat([h[0] for h in halves] + [halves[r][1] for r in range(p - 1, -1, -1)], dim)


def rank_order(x: Tensor, layout: TokenLayout, dim: int, fill: int | None = 0) -> Tensor:
    """``x`` [.., S, ..], in sequence order along ``dim``, as the rows that every rank holds in
    ``layout``, [p, .., s, ..]; rows past the end are ``fill``, or where that is None, copies of the
    last."""
    return torch.stack([take_rows(x, layout, r, dim, fill) for r in range(layout.num_ranks)])


def take_own(x: Tensor, layout: TokenLayout, rank: int, dim: int) -> Tensor:
    """The rows of ``x`` [.., S, ..] (in sequence order along ``dim``) that ``rank`` holds in
    ``layout``, [.., s, ..]; 0 past the end, as in a gradient."""
    return take_rows(x, layout, rank, dim, 0)


def _gather(x: Tensor, axis: Axis, block_id: int, dim: int, seq_len: int) -> Tensor:
    """Rows [.., s, ..] of every rank as one tensor [.., S, ..] in sequence order."""
    stacked = collectives.all_gather(x, axis, block_id)
    return natural_order(stacked, dim).narrow(dim, 0, seq_len).contiguous()


@torch.library.custom_op("paradyse::gather_tokens", mutates_args=())
def gather_tokens(
    x: Tensor, local: Tensor, whole: Tensor, info: Tensor, dim: int, axis: str
) -> Tensor:
    """The whole [.., S, ..] in sequence order. Its gradient is a reduce-scatter.

    Args:
        x: the rank's rows, [.., s, ..].
        local: the rank's positions [s], of which only the length is read.
        whole: all positions [S], of which only the length is read.
        info: int64 [2] on the CPU: sequence length S, block id.
        dim: the dim of the sequence.
        axis: name of the sequence axis.
    """
    return _gather(x, axis_named(axis), int(info[1]), dim, whole.shape[0])


@gather_tokens.register_fake
def _(x: Tensor, local: Tensor, whole: Tensor, info: Tensor, dim: int, axis: str) -> Tensor:
    return x.new_empty([*x.shape[:dim], whole.shape[0], *x.shape[dim + 1 :]])


@torch.library.custom_op("paradyse::reduce_scatter_tokens", mutates_args=())
def reduce_scatter_tokens(
    x: Tensor,
    local: Tensor,
    whole: Tensor,
    info: Tensor,
    dim: int,
    axis: str,
    is_gradient: bool = False,
) -> Tensor:
    """The rank's rows [.., s, ..] of the sum over ranks of ``x`` [.., S, ..].

    Its gradient is an all-gather.

    Args:
        x: one summand, [.., S, ..] in sequence order.
        local, whole, info, dim, axis: as for ``gather_tokens``.
        is_gradient: rows past the end are 0; else they are copies of the last row, of which a norm
            without an epsilon has a gradient.
    """
    a, fill = axis_named(axis), 0 if is_gradient else None
    rows = rank_order(x, a.layout(x.shape[dim]), dim, fill)
    return collectives.reduce_scatter(rows, a, int(info[1]))


@reduce_scatter_tokens.register_fake
def _(x: Tensor, local: Tensor, whole: Tensor, info: Tensor, dim: int, *_: Any) -> Tensor:
    return x.new_empty([*x.shape[:dim], local.shape[0], *x.shape[dim + 1 :]])


@torch.library.custom_op("paradyse::exchange_tokens", mutates_args=())
def exchange_tokens(
    x: Tensor, local: Tensor, whole: Tensor, info: Tensor, dim: int, axis: str
) -> Tensor:
    """What every rank has for the tokens of this one, [.., s, .., p]. Its gradient is
    ``return_tokens``.

    Args:
        x: what this rank has for all tokens, [.., S, ..] in sequence order.
        local, whole, info, dim, axis: as for ``gather_tokens``.
    """
    a = axis_named(axis)
    rows = rank_order(x, a.layout(x.shape[dim]), dim)
    return collectives.all_to_all(rows, a, int(info[1])).movedim(0, -1).contiguous()


@exchange_tokens.register_fake
def _(x: Tensor, local: Tensor, whole: Tensor, info: Tensor, dim: int, axis: str) -> Tensor:
    shape = [*x.shape[:dim], local.shape[0], *x.shape[dim + 1 :]]
    return x.new_empty([*shape, axis_named(axis).size])


@torch.library.custom_op("paradyse::return_tokens", mutates_args=())
def return_tokens(
    x: Tensor, local: Tensor, whole: Tensor, info: Tensor, dim: int, axis: str
) -> Tensor:
    """What the ranks that hold the tokens have for this one, [.., S, ..] in sequence order. Its
    gradient is ``exchange_tokens``.

    Args:
        x: what this rank has for its tokens and each rank, [.., s, .., p].
        local, whole, info, dim, axis: as for ``gather_tokens``.
    """
    a = axis_named(axis)
    came = collectives.all_to_all(x.movedim(-1, 0), a, int(info[1]))
    return natural_order(came, dim).narrow(dim, 0, whole.shape[0]).contiguous()


@return_tokens.register_fake
def _(x: Tensor, local: Tensor, whole: Tensor, info: Tensor, dim: int, axis: str) -> Tensor:
    return x.new_empty([*x.shape[:dim], whole.shape[0], *x.shape[dim + 1 : -1]])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, local, whole, info, ctx.dim, ctx.axis, *_ = inputs
    ctx.save_for_backward(local, whole, info)


def _register_gradient(op: Any, of_gradient: Any, *more: bool) -> None:
    def backward(ctx: Any, grad: Tensor) -> Any:
        found = of_gradient(grad, *ctx.saved_tensors, ctx.dim, ctx.axis, *more)
        return found, *[None] * (len(ctx.needs_input_grad) - 1)

    op.register_autograd(backward, setup_context=_save)


_register_gradient(gather_tokens, reduce_scatter_tokens, True)
_register_gradient(reduce_scatter_tokens, gather_tokens)
_register_gradient(exchange_tokens, return_tokens)
_register_gradient(return_tokens, exchange_tokens)


class SplitTokens(torch.autograd.Function):
    """Replicated [.., S, ..] to this rank's rows [.., s, ..]: a local slice; backward gathers."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, axis: Axis, block_id: int, fill: int | None = None
    ) -> Tensor:
        ctx.where = (axis, block_id, dim, x.shape[dim])
        return take_rows(x, axis.layout(x.shape[dim]), axis.rank, dim, fill)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gather(grad, *ctx.where), None, None, None, None


class GatherTokens(torch.autograd.Function):
    """This rank's rows [.., s, ..] to the whole [.., S, ..] on every rank; backward slices, or
    where each rank has a summand of the gradient, scatters the sum."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        seq_len: int,
        axis: Axis,
        block_id: int,
        summed: bool = False,
    ) -> Tensor:
        ctx.where = (axis, axis.layout(seq_len), dim, block_id, summed)
        return _gather(x, axis, block_id, dim, seq_len)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        axis, layout, dim, block_id, summed = ctx.where
        if summed:
            rows = collectives.reduce_scatter(rank_order(grad, layout, dim), axis, block_id)
        else:
            rows = take_own(grad, layout, axis.rank, dim)
        return rows, None, None, None, None, None


class SumOverRanks(torch.autograd.Function):
    """A rank's summand to the total on every rank; backward passes the (whole) gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, block_id: int) -> Tensor:
        return collectives.all_reduce(x, axis, block_id)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


class ReduceGrad(torch.autograd.Function):
    """A replicated value unchanged, for a reader that does a part of its work on each rank;
    backward sums the ranks' parts of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, block_id: int) -> Tensor:
        ctx.where = (axis, block_id)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return collectives.all_reduce(grad, *ctx.where), None, None
