"""Tokens dealt to experts: rows in the order of experts, and a matmul with each expert's weight.

``ids`` [n] int say which expert computes each of n rows, k of them for every token. ``order`` [n]
has the rows by expert, ``inverse`` [n] the way back, and ``ends`` [E] int32 how many rows are those
of the first 1, 2, .. E experts. Nothing here depends on how many rows an expert has, which may be
none or all.

The matmul is that of ``torch.nn.functional.grouped_mm`` for every dtype and device; on CUDA
PyTorch's kernel computes it in bfloat16, where it can. Gradients add nothing up in an order that
may change: where a token was read k times they are k rows that are next to each other again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op(
    "paradyse::route_rows",
    mutates_args=(),
    schema="(Tensor ids, int num_experts) -> (Tensor, Tensor, Tensor, Tensor)",
)
def route_rows(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The order of rows by expert; rows of one expert stay in their order.

    Args:
        ids: [n] int, of experts 0 to ``num_experts`` - 1.
        num_experts: E.
    Returns:
        the sorted ids [n], order [n] and inverse [n] int64, ends [E] int32.
    """
    in_order, order = torch.sort(ids, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=ids.device)
    experts = torch.arange(num_experts, device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(in_order, experts, right=True)
    return in_order, order, inverse, ends.to(torch.int32)


@route_rows.register_fake
def _route_fake(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order, inverse = (torch.empty_like(ids, dtype=torch.int64) for _ in range(2))
    ends = ids.new_empty(num_experts, dtype=torch.int32)
    return torch.empty_like(ids), order, inverse, ends


@torch.library.custom_op(
    "paradyse::take_rows",
    mutates_args=(),
    schema="(Tensor x, Tensor order, Tensor inverse, int repeats) -> Tensor",
)
def take_rows(x: Tensor, order: Tensor, inverse: Tensor, repeats: int) -> Tensor:
    """Row ``order[j] // repeats`` of ``x``, for every j.

    Args:
        x: [n / repeats, ...].
        order: [n] int64, a permutation.
        inverse: [n] int64, its inverse, for the gradient.
        repeats: how often each row of ``x`` is taken.
    Returns:
        [n, ...].
    """
    return x.index_select(0, order if repeats == 1 else order // repeats)


@take_rows.register_fake
def _take_fake(x: Tensor, order: Tensor, inverse: Tensor, repeats: int) -> Tensor:
    return x.new_empty((order.shape[0], *x.shape[1:]))


def _save_orders(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, order, inverse, ctx.repeats = inputs
    ctx.save_for_backward(order, inverse)


def _take_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    order, inverse = ctx.saved_tensors
    rows = torch.ops.paradyse.take_rows(grad.contiguous(), inverse, order, 1)
    if ctx.repeats > 1:
        rows = rows.view(-1, ctx.repeats, *grad.shape[1:]).sum(1)
    return rows, None, None, None


take_rows.register_autograd(_take_gradient, setup_context=_save_orders)


@torch.library.custom_op(
    "paradyse::grouped_mm",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor ends) -> Tensor",
)
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows of each expert times its weight.

    Args:
        x: [n, i], rows in the order of experts.
        weight: [E, i, o].
        ends: [E] int32, the last one n.
    Returns:
        [n, o].
    """
    if _has_kernel(x, weight):
        return F.grouped_mm(x.contiguous(), weight, offs=ends)
    out = x.new_zeros(x.shape[0], weight.shape[2])
    for w, start, end in _stretches(weight, ends):
        torch.mm(x[start:end], w, out=out[start:end])
    return out


_ALIGNED_BYTES = 16
"""Rows of what PyTorch's kernel reads and writes start at multiples of it."""


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    if not x.is_cuda or x.dtype != torch.bfloat16 or not len(x):
        return False
    aligned = all(n * x.itemsize % _ALIGNED_BYTES == 0 for n in weight.shape[1:])
    return aligned and torch.cuda.get_device_capability(x.device) >= (8, 0)


@grouped_mm.register_fake
def _mm_fake(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op(
    "paradyse::grouped_outer",
    mutates_args=(),
    schema="(Tensor x, Tensor y, Tensor ends) -> Tensor",
)
def grouped_outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """The gradient of the weight of ``grouped_mm``.

    Args:
        x: [n, i], rows in the order of experts.
        y: [n, o], the gradient of what they gave.
        ends: [E] int32.
    Returns:
        [E, i, o]: of each expert the sum of outer products of its rows; zeros where it has none.
    """
    out = x.new_zeros(ends.shape[0], x.shape[1], y.shape[1])
    for w, start, end in _stretches(out, ends):
        torch.mm(x[start:end].t(), y[start:end], out=w)
    return out


@grouped_outer.register_fake
def _outer_fake(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], y.shape[1])


Reader = Callable[[Tensor], list[int]]

_READERS: list[Reader] = [Tensor.tolist]
"""How the host reads ``ends``: the last one."""


def read_by(reader: Reader) -> Reader:
    """Have the host read ``ends`` by ``reader``, as where what they are made of may never come."""
    _READERS.append(reader)
    return reader


def _stretches(of_experts: Tensor, ends: Tensor) -> Any:
    """(what is an expert's, its first row, the row behind its last) of those that have rows."""
    bounds = [0, *_READERS[-1](ends)]
    for w, start, end in zip(of_experts, bounds, bounds[1:]):
        if start < end:
            yield w, start, end


def _save_factors(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _mm_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, ends = ctx.saved_tensors
    grad, d_x, d_weight = grad.contiguous(), None, None
    if ctx.needs_input_grad[0]:
        d_x = torch.ops.paradyse.grouped_mm(grad, weight.transpose(1, 2), ends)
    if ctx.needs_input_grad[1]:
        d_weight = torch.ops.paradyse.grouped_outer(x, grad, ends)
    return d_x, d_weight, None


grouped_mm.register_autograd(_mm_gradient, setup_context=_save_factors)
