"""Switches of the split between two dims of the same tokens, by one all-to-all each way.

Dynamic Sequence Parallelism (arXiv 2403.10266): where a dim is about to be mixed, the split goes to
another one. Each rank sends what it has, less its own part: (p - 1) / p of M / p for a value of M
elements on p ranks.

Shapes: S is the length of the dim that tokens lie split along at rest, s what a rank holds of it
(``TokenLayout.local_len``). N is the length of the other dim; rank r has the rows from r n on, n =
ceil(N / p) of them. Rows past the end, of either dim, are copies of the last row in a value, so
that what is computed from them stays finite, and 0 in a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import axis_named
from paradyse.distributed.tokens import natural_order, rank_order


def rows_per_rank(num: Any, num_ranks: int) -> Any:
    """n: of ``num`` rows, those that each of ``num_ranks`` has, padding included."""
    return (num + num_ranks - 1) // num_ranks


@torch.library.custom_op("paradyse::switch_split", mutates_args=())
def switch_split(
    x: Tensor,
    local: Tensor,
    whole: Tensor,
    info: Tensor,
    dim: int,
    to: int,
    num: int,
    is_gradient: bool,
    axis: str,
) -> Tensor:
    """From the split along ``dim`` to that along ``to``: [.., S, .., n, ..]. Its gradient is
    ``switch_back``.

    Args:
        x: the rank's rows of ``dim`` and all of ``to``, [.., s, .., N, ..], the two in any order.
        local: the rank's positions [s], of which only the length is read.
        whole: all positions [S], of which only the length is read.
        info: int64 [2] on the CPU: sequence length S, block id.
        dim, to: the dims of S and of N.
        num: N.
        is_gradient: rows past the end are 0.
        axis: name of the sequence axis.
    """
    a = axis_named(axis)
    p, n = a.size, rows_per_rank(num, a.size)
    if n * p > num:
        last = x.narrow(to, num - 1, 1)
        shape = [*x.shape[:to], n * p - num, *x.shape[to + 1 :]]
        x = torch.cat([x, x.new_zeros(shape) if is_gradient else last.expand(shape)], to)
    message = x.unflatten(to, (p, n)).movedim(to, 0).contiguous()
    came = collectives.all_to_all(message, a, int(info[1]))
    return natural_order(came, dim).narrow(dim, 0, whole.shape[0]).contiguous()


@switch_split.register_fake
def _(
    x: Tensor,
    local: Tensor,
    whole: Tensor,
    info: Tensor,
    dim: int,
    to: int,
    num: int,
    is_gradient: bool,
    axis: str,
) -> Tensor:
    shape = list(x.shape)
    shape[dim], shape[to] = whole.shape[0], rows_per_rank(num, axis_named(axis).size)
    return x.new_empty(shape)


@torch.library.custom_op("paradyse::switch_back", mutates_args=())
def switch_back(
    x: Tensor,
    local: Tensor,
    whole: Tensor,
    info: Tensor,
    dim: int,
    to: int,
    num: int,
    is_gradient: bool,
    axis: str,
) -> Tensor:
    """From the split along ``to`` back to that along ``dim``: [.., s, .., N, ..]. Its gradient is
    ``switch_split``.

    Args:
        x: all of ``dim`` and the rank's rows of ``to``, [.., S, .., n, ..].
        local, whole, info, dim, to, num, is_gradient, axis: as for ``switch_split``.
    """
    a = axis_named(axis)
    layout, fill = a.layout(whole.shape[0]), 0 if is_gradient else None
    came = collectives.all_to_all(rank_order(x, layout, dim, fill), a, int(info[1]))
    return came.movedim(0, to).flatten(to, to + 1).narrow(to, 0, num).contiguous()


@switch_back.register_fake
def _(
    x: Tensor,
    local: Tensor,
    whole: Tensor,
    info: Tensor,
    dim: int,
    to: int,
    num: int,
    is_gradient: bool,
    axis: str,
) -> Tensor:
    shape = list(x.shape)
    shape[dim], shape[to] = local.shape[0], num
    return x.new_empty(shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, local, whole, info, ctx.dim, ctx.to, ctx.num, _, ctx.axis = inputs
    ctx.save_for_backward(local, whole, info)


def _register_gradient(op: Any, of_gradient: Any) -> None:
    def backward(ctx: Any, grad: Tensor) -> Any:
        given = ctx.dim, ctx.to, ctx.num, True, ctx.axis
        return of_gradient(grad, *ctx.saved_tensors, *given), *[None] * 8

    op.register_autograd(backward, setup_context=_save)


_register_gradient(switch_split, switch_back)
_register_gradient(switch_back, switch_split)
