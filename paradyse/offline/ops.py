"""Operators that communicate, computed by operators that a ``Timeline`` can see.

These are the operators' own bodies, with two differences. They are given the length of the sequence
and the block's id as numbers, as there is no tensor to read them from. And a ring has at most
``RING`` steps, since from its third one on the same buffers come and go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis, TokenLayout, register_axis
from paradyse.distributed.switch import switch_back, switch_split
from paradyse.distributed.token_linears import (
    gather_linears,
    gather_linears_backward,
    linear_scatter,
    linear_scatter_backward,
)
from paradyse.distributed.tokens import (
    exchange_tokens,
    gather_tokens,
    reduce_scatter_tokens,
    return_tokens,
)
from paradyse.strategies.attention.operators import (
    METHODS,
    attention_across_ranks,
    attention_across_ranks_backward,
)
from paradyse.torch_private import body_of, overload_of, schema_of

RING = 4
"""How many steps of a ring are run: the first, two that are like all others, and the last."""


MANY_RANKS = 64
"""From so many ranks on, one copy puts rows into sequence order instead of two for each rank: the
bytes are the same, the operators a thousand times fewer."""


@dataclass(frozen=True)
class _ShortRing(Axis):
    """An axis of few ranks for a ring, whose tokens are laid out over all ranks."""

    num_ranks: int = 1

    def layout(self, seq_len: int) -> TokenLayout:
        return TokenLayout(self.num_ranks, seq_len)


def bodies(axis: Axis) -> dict[Any, Callable[..., Any]]:
    """Operator that communicates on ``axis`` -> function of the same arguments."""
    block_id, p = collectives.AGREEMENT, axis.size
    numbers: dict[Any, Callable[..., Any]] = {
        # what code reads off a tensor outside these operators is the id of a block
        torch.ops.aten._local_scalar_dense.default: lambda x: block_id
    }
    if p == 1:
        return numbers
    short = _ShortRing(f"{axis.name} dry", min(p, RING), 0, axis.group, num_ranks=p)
    register_axis(short)

    def with_numbers(op: Any) -> Callable[..., Any]:
        """The body of ``op``, told the sequence's length; a ring's on the short axis."""
        names = [a.name for a in schema_of(op).arguments]
        at = names.index

        def run(*args: Any) -> Any:
            given, length, name = list(args), 0, axis.name
            keys: tuple[int, ...] = ()
            if op in attention:
                length = args[0].shape[2] * p
                if len(args[at("info")]) > 2:  # of another sequence
                    local = args[at("k")].shape[2] if "k" in names else args[at("num_keys")]
                    keys = (local * p,)
                if METHODS[args[at("method")]].steps_alike:
                    name = short.name
            given[at("info")], given[at("axis")] = (length, block_id, *keys), name
            return body_of(op)(*given)

        return run

    def gather(x: Tensor, local: Tensor, whole: Tensor, info: Any, dim: int, name: str) -> Tensor:
        stacked = collectives.all_gather(x, axis, block_id)
        ordered = x.new_empty([*x.shape[:dim], p * x.shape[dim], *x.shape[dim + 1 :]])
        del stacked
        return ordered.narrow(dim, 0, whole.shape[0]).contiguous()

    def scatter(
        x: Tensor, local: Tensor, whole: Tensor, info: Any, dim: int, name: str, *_: bool
    ) -> Tensor:
        shape = [p, *x.shape[:dim], local.shape[0], *x.shape[dim + 1 :]]
        parts = x.new_empty(shape)
        stacked = torch.empty_like(parts)
        del parts
        return collectives.reduce_scatter(stacked, axis, block_id)

    def gather_and_multiply(
        x: Tensor, weights: Any, biases: Any, local: Tensor, whole: Tensor, info: Any, name: str
    ) -> list[Tensor]:
        everyone = gather(x, local, whole, info, x.ndim - 2, name)
        pairs = zip(weights, biases or [None] * len(weights), strict=True)
        return [everyone, *(linear(everyone, weight, bias) for weight, bias in pairs)]

    def multiply_and_scatter(
        x: Tensor, weight: Tensor, local: Tensor, whole: Tensor, info: Any, name: str
    ) -> Tensor:
        return scatter(linear(x, weight), local, whole, info, x.ndim - 2, name)

    def gradients_of_gathered(
        grads: Any, weights: Any, x: Any, beside: Any, needed: Any, needs_x: bool, *where: Any
    ) -> list[Tensor]:
        (local, whole, info, name), found = where, list[Tensor]()
        if needs_x:
            first, *others = zip(grads, weights, strict=True)
            summand = first[0] @ first[1] if beside is None else beside.clone()
            for grad, weight in others if beside is None else [first, *others]:
                summand.view(-1, weight.shape[1]).addmm_(grad.flatten(0, -2), weight)
            found.append(scatter(summand, local, whole, info, summand.ndim - 2, name))
            del summand
        return found + [grads[i].flatten(0, -2).T @ x.flatten(0, -2) for i in needed]

    def gradients_of_scattered(grad: Tensor, x: Any, weight: Any, *where: Any) -> list[Tensor]:
        local, whole, info, name = where
        everyone = gather(grad, local, whole, info, grad.ndim - 2, name)
        found = [] if weight is None else [everyone @ weight]
        return found if x is None else [*found, everyone.flatten(0, -2).T @ x.flatten(0, -2)]

    attention = (attention_across_ranks, attention_across_ranks_backward)
    moves = gather_tokens, reduce_scatter_tokens, exchange_tokens, return_tokens
    linears = gather_linears, gather_linears_backward, linear_scatter, linear_scatter_backward
    communicate = (*attention, *moves, *linears, switch_split, switch_back)
    found = {op: with_numbers(op) for op in communicate}
    if p >= MANY_RANKS:
        found |= {
            gather_tokens: gather,
            reduce_scatter_tokens: scatter,
            gather_linears: gather_and_multiply,
            gather_linears_backward: gradients_of_gathered,
            linear_scatter: multiply_and_scatter,
            linear_scatter_backward: gradients_of_scattered,
        }
    return numbers | {overload_of(op): run for op, run in found.items()}
