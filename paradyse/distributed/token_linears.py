"""Linears that read tokens of all ranks, or give summands for them: a rank multiplies its own
tokens while the others' are on their way.

The decomposition of "Overlap Communication with Dependent Computation via Decomposition in Large
Deep Learning Models" (ASPLOS 2023), with two messages for all ranks instead of one for each:
``gather_linears`` begins with the rank's own tokens, ``linear_scatter`` with those of the others.
In backward, gradients of weights are computed while messages are under way too (Megatron-LM,
arXiv 1909.08053 and its code).

Shapes: S is the length of the sequence, s what a rank holds of it (``TokenLayout.local_len``). Each
operator is one between the other operators of a compiled piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis, axis_named
from paradyse.distributed.held import start_held
from paradyse.distributed.tokens import natural_order, rank_order

MIN_ROWS = 64
"""Of a chunk: shorter ones are multiplied all at once, as each matmul reads the weights anew."""


class _Rows:
    """Which of the ``seq_len`` tokens this rank of ``axis`` holds, without padding."""

    def __init__(self, axis: Axis, seq_len: int) -> None:
        self.axis, self.seq_len, self.layout = axis, seq_len, axis.layout(seq_len)
        self.apart = axis.size > 1 and self.layout.chunk >= MIN_ROWS
        """Whether own tokens are multiplied apart from the others'."""
        self.own: list[tuple[int, int, int]] = []
        """Stretches of own tokens: place in the sequence, place among the own, length."""
        self.others: list[tuple[int, int]] = []
        """Stretches of all other tokens: place in the sequence, length."""
        at = 0
        for start, n in self.layout.runs(axis.rank):
            if start < seq_len:
                self.own.append((start, at, min(n, seq_len - start)))
            at += n
        end = 0
        for start, _, n in [*self.own, (seq_len, 0, 0)]:
            if start > end:
                self.others.append((end, start - end))
            end = start + n

    def ordered(self, stacked: Tensor) -> Tensor:
        """Tokens of every rank, [p, B, s, h], in the order of the sequence, [B, S, h]."""
        return natural_order(stacked, 1).narrow(1, 0, self.seq_len).contiguous()


def _three_dims(x: Tensor) -> Tensor:
    """``x`` [.., n, h] as [B, n, h]."""
    return x.contiguous().view(-1, *x.shape[-2:])


def _multiply(
    x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, add: bool = False
) -> None:
    """``out`` [B, n, m] = ``x`` [B, n, h] @ ``weight`` [h, m] + ``bias`` [m]; ``add``: to what is
    there. Sequence by sequence, each of which is contiguous, where all together are not."""
    if x.is_contiguous() and out.is_contiguous():
        x, out = x.view(1, -1, x.shape[-1]), out.view(1, -1, out.shape[-1])
    for rows, into in zip(x, out, strict=True):
        if add:
            into.addmm_(rows, weight)
        elif bias is None:
            torch.mm(rows, weight, out=into)
        else:
            torch.addmm(bias, rows, weight, out=into)


def _gathered(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    of: _Rows,
    block_id: int,
    meanwhile: Callable[[], object] = lambda: None,
) -> list[Tensor]:
    """Tokens of every rank [B, S, h], of ``x`` [B, s, h], and their products with ``weights``
    [h, m] each, [B, S, m]; ``meanwhile`` is called before the others' are waited for."""
    coming = collectives.start_all_gather(x, of.axis, block_id)
    shape = x.shape[0], of.seq_len
    found = [x.new_empty((*shape, weight.shape[1])) for weight in weights]
    terms = list(zip(weights, found, biases or [None] * len(weights), strict=True))
    for start, at, n in of.own if of.apart else ():
        for weight, out, bias in terms:
            _multiply(x.narrow(1, at, n), weight, out.narrow(1, start, n), bias)
    meanwhile()
    stacked = coming.wait()
    start_held(of.axis)
    everyone = of.ordered(stacked)
    for start, n in of.others if of.apart else [(0, of.seq_len)]:
        for weight, out, bias in terms:
            _multiply(everyone.narrow(1, start, n), weight, out.narrow(1, start, n), bias)
    return [everyone, *found]


def _scattered(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    beside: Tensor | None,
    of: _Rows,
    block_id: int,
    fill: int | None,
    meanwhile: Callable[[], object] = lambda: None,
) -> Tensor:
    """This rank's tokens [B, s, m] of the sum over ranks, and over ``xs`` [B, S, h] and ``weights``
    [h, m], of the products, and of ``beside`` [B, S, m]; ``meanwhile`` is called before the others'
    summands are waited for. Rows past the end are ``fill``; for None, as the last token's."""
    batch, width = xs[0].shape[0], weights[0].shape[1]

    def multiply(start: int, n: int, out: Tensor) -> None:
        if beside is not None:
            out.copy_(beside.narrow(1, start, n))
        for i, (x, weight) in enumerate(zip(xs, weights, strict=True)):
            _multiply(x.narrow(1, start, n), weight, out, add=beside is not None or i > 0)

    summands = xs[0].new_empty((batch, of.seq_len, width))
    for start, _, n in of.own if of.apart else ():
        summands.narrow(1, start, n).zero_()
    for start, n in of.others if of.apart else [(0, of.seq_len)]:
        multiply(start, n, summands.narrow(1, start, n))
    summed = torch.promote_types(summands.dtype, torch.float32)
    if collectives.travel_dtype(summands.dtype, summed, of.axis) != summands.dtype:
        summed = summands.dtype
    stacked = rank_order(summands, of.layout, 1, fill)
    del summands
    coming = collectives.start_reduce_scatter(stacked, of.axis, block_id, summed)
    mine = xs[0].new_zeros((batch, of.layout.local_len, width)) if of.apart else None
    if mine is not None:
        for start, at, n in of.own:
            multiply(start, n, mine.narrow(1, at, n))
        if fill is None and of.own:
            _, at, n = of.own[-1]
            mine[:, at + n :] = mine[:, at + n - 1 : at + n]
    meanwhile()
    total: Tensor = coming.wait()
    return (total if mine is None else total + mine).to(xs[0].dtype)


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """[m, h] of a linear that gave something of ``x`` [B, n, h], with ``grad`` [B, n, m]."""
    return grad.flatten(0, 1).T @ x.flatten(0, 1)


@torch.library.custom_op("paradyse::gather_linears", mutates_args=())
def gather_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    local: Tensor,
    whole: Tensor,
    info: Tensor,
    axis: str,
) -> list[Tensor]:
    """The whole [.., S, h] in sequence order, and what linears make of it, [.., S, m] each.

    Args:
        x: the rank's tokens, [.., s, h].
        weights: [m, h] each.
        biases: [m] each; none, or one for each weight.
        local: the rank's positions [s], of which only the length is read.
        whole: all positions [S], of which only the length is read.
        info: int64 [2] on the CPU: sequence length S, block id.
        axis: name of the sequence axis.
    """
    of = _Rows(axis_named(axis), whole.shape[0])
    given = [weight.T for weight in weights], biases, of, int(info[1])
    found = _gathered(_three_dims(x), *given)
    return [y.view(*x.shape[:-2], *y.shape[1:]) for y in found]


@gather_linears.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    local: Tensor,
    whole: Tensor,
    info: Tensor,
    axis: str,
) -> list[Tensor]:
    widths = x.shape[-1], *(weight.shape[0] for weight in weights)
    return [x.new_empty([*x.shape[:-2], whole.shape[0], width]) for width in widths]


@torch.library.custom_op("paradyse::gather_linears_backward", mutates_args=())
def gather_linears_backward(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    x: Tensor | None,
    beside: Tensor | None,
    needed: Sequence[int],
    needs_x: bool,
    local: Tensor,
    whole: Tensor,
    info: Tensor,
    axis: str,
) -> list[Tensor]:
    """Gradients of what ``gather_linears`` read: of the rank's tokens, [.., s, h], if ``needs_x``,
    and of the weights that are ``needed``, [m, h] each.

    Args:
        grads: of what the linears gave, [.., S, m] each.
        weights: of these linears.
        x: the whole [.., S, h]; None where no weight is needed.
        beside: gradient of the whole from other readers, [.., S, h].
        needed: places of weights.
        needs_x: see above; only then there is a message.
        local, whole, info, axis: as for ``gather_linears``.
    """
    of = _Rows(axis_named(axis), whole.shape[0])
    columns, found = [_three_dims(g) for g in grads], list[Tensor]()

    def of_weights() -> None:
        if x is not None:
            rows = _three_dims(x)
            found.extend(_weight_gradient(columns[i], rows) for i in needed)

    if not needs_x:
        of_weights()
        return found
    other = None if beside is None else _three_dims(beside)
    mine = _scattered(columns, weights, other, of, int(info[1]), 0, of_weights)
    return [mine.view(*grads[0].shape[:-2], *mine.shape[1:]), *found]


@gather_linears_backward.register_fake
def _(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    x: Tensor | None,
    beside: Tensor | None,
    needed: Sequence[int],
    needs_x: bool,
    local: Tensor,
    whole: Tensor,
    info: Tensor,
    axis: str,
) -> list[Tensor]:
    shape = [*grads[0].shape[:-2], local.shape[0], weights[0].shape[1]]
    mine = [grads[0].new_empty(shape)] if needs_x else []
    return mine + [weights[i].new_empty(weights[i].shape) for i in needed]


@torch.library.custom_op("paradyse::linear_scatter", mutates_args=())
def linear_scatter(
    x: Tensor, weight: Tensor, local: Tensor, whole: Tensor, info: Tensor, axis: str
) -> Tensor:
    """The rank's tokens [.., s, m] of the sum over ranks of what a linear makes of ``x``.

    Args:
        x: [.., S, h] in sequence order, of this rank.
        weight: [m, h], of this rank.
        local, whole, info, axis: as for ``gather_linears``.
    """
    of = _Rows(axis_named(axis), whole.shape[0])
    mine = _scattered([_three_dims(x)], [weight.T], None, of, int(info[1]), None)
    return mine.view(*x.shape[:-2], *mine.shape[1:])


@linear_scatter.register_fake
def _(x: Tensor, weight: Tensor, local: Tensor, whole: Tensor, info: Tensor, axis: str) -> Tensor:
    return x.new_empty([*x.shape[:-2], local.shape[0], weight.shape[0]])


@torch.library.custom_op("paradyse::linear_scatter_backward", mutates_args=())
def linear_scatter_backward(
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    local: Tensor,
    whole: Tensor,
    info: Tensor,
    axis: str,
) -> list[Tensor]:
    """Gradients of what ``linear_scatter`` read: of ``x`` [.., S, h], where ``weight`` is given,
    and of the weight [m, h], where ``x`` is.

    Args:
        grad: of the rank's tokens, [.., s, m].
        x, weight, local, whole, info, axis: as for ``linear_scatter``.
    """
    of, mine = _Rows(axis_named(axis), whole.shape[0]), _three_dims(grad)
    rows = None if x is None else _three_dims(x)
    total = None  # where the weight's gradient is summed by parts
    if rows is not None and of.apart and grad.itemsize >= 4:  # 16 bits would be rounded at each
        total = grad.new_zeros((grad.shape[-1], rows.shape[-1]))

    def add(part: Tensor, start: int, n: int) -> None:
        """The share of tokens whose gradients are ``part`` [B, n, m]."""
        if rows is not None and total is not None:
            for g, r in zip(part, rows.narrow(1, start, n), strict=True):
                total.addmm_(g.T, r)

    def add_own() -> None:
        for start, at, n in of.own:
            add(mine.narrow(1, at, n), start, n)

    weights = [] if weight is None else [weight]
    everyone, *found = _gathered(mine, weights, [], of, int(info[1]), add_own)
    for start, n in of.others:
        add(everyone.narrow(1, start, n), start, n)
    shaped = [y.view(*grad.shape[:-2], *y.shape[1:]) for y in found]
    if rows is None:
        return shaped
    return [*shaped, _weight_gradient(everyone, rows) if total is None else total]


@linear_scatter_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    local: Tensor,
    whole: Tensor,
    info: Tensor,
    axis: str,
) -> list[Tensor]:
    found = []
    if weight is not None:
        found.append(grad.new_empty([*grad.shape[:-2], whole.shape[0], weight.shape[1]]))
    if x is not None:
        found.append(grad.new_empty([grad.shape[-1], x.shape[-1]]))
    return found


def _keep_gathered(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, weights, biases, local, whole, info, ctx.axis = inputs
    ctx.num_weights, ctx.num_biases = len(weights), len(biases)
    kept = [output[0]] if any(w.requires_grad for w in weights) else []
    ctx.save_for_backward(local, whole, info, *weights, *kept)
    ctx.set_materialize_grads(False)


def _gradient_of_gathered(ctx: Any, grads: Sequence[Tensor | None]) -> Any:
    local, whole, info, *kept = ctx.saved_tensors
    weights, beside = kept[: ctx.num_weights], grads[0]
    needs_x, need_weights, need_biases, *_ = ctx.needs_input_grad
    of_weights: list[Tensor | None] = [None] * len(weights)
    there = [(i, g) for i, g in enumerate(grads[1:]) if g is not None]
    needed = [at for at, (i, _) in enumerate(there) if need_weights[i]]
    of_x = None
    if there:
        found = iter(
            gather_linears_backward(
                [g for _, g in there],
                [weights[i] for i, _ in there],
                kept[-1] if needed else None,
                beside,
                needed,
                needs_x,
                *(local, whole, info, ctx.axis),
            )
        )
        of_x = next(found) if needs_x else None
        for at in needed:
            of_weights[there[at][0]] = next(found)
    elif beside is not None and needs_x:
        of_x = torch.ops.paradyse.reduce_scatter_tokens(
            beside, local, whole, info, beside.ndim - 2, ctx.axis, True
        )
    of_biases: list[Tensor | None] = [None] * ctx.num_biases
    for i, g in there:
        if i < ctx.num_biases and need_biases[i]:
            of_biases[i] = g.flatten(0, -2).sum(0)
    return of_x, of_weights, of_biases, None, None, None, None


def _keep_scattered(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, local, whole, info, ctx.axis = inputs
    kept = x if weight.requires_grad else None, weight if x.requires_grad else None
    ctx.save_for_backward(*kept, local, whole, info)


def _gradient_of_scattered(ctx: Any, grad: Tensor) -> Any:
    x, weight, *rest = ctx.saved_tensors
    found = iter(linear_scatter_backward(grad, x, weight, *rest, ctx.axis))
    of_x = next(found) if weight is not None else None
    of_weight = next(found) if x is not None else None
    return of_x, of_weight, None, None, None, None


gather_linears.register_autograd(_gradient_of_gathered, setup_context=_keep_gathered)
linear_scatter.register_autograd(_gradient_of_scattered, setup_context=_keep_scattered)
