"""Attention sinks: one more column of the softmax, of a number that is learned for each head.

The column has no value, so it changes attention's result by a factor alone. With s a head's sink,
a row's output is out * sigmoid(lse - s) and its log-sum-exp log(exp(lse) + exp(s)). From these two
every kernel's backward is right as it is: probabilities are exp(score - lse), and the gradient of a
score takes off the row's sum of grad_out * out, to which the sink adds nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paradyse.kernels.attention_mask import AttentionSpec


def with_sinks(out: Tensor, lse: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Attention with the sinks of ``spec``, if it has any, from attention without.

    Args:
        out, lse: [B, H, S, Dv] and [B, H, S] over all keys that the rows see.
    Returns:
        out and lse in their dtypes. A row that sees no key stays as it is: out 0, lse -inf.
    """
    sinks = spec.head_sinks(lse.shape[1])
    if sinks is None:
        return out, lse
    column = sinks.detach().to(lse.dtype)[:, None]
    unseeing = lse == -torch.inf  # a sink may be as low
    factor = torch.sigmoid(lse - column).masked_fill_(unseeing, 0)[..., None]
    both = torch.logaddexp(lse, column).masked_fill_(unseeing, -torch.inf)
    return (out * factor).to(out.dtype), both


def sink_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec) -> Tensor:
    """Gradient of ``spec.sinks`` through some rows.

    Args:
        grad_out: [B, H, S, Dv].
        out, lse: of these rows, from ``with_sinks``.
        spec: as ``with_sinks`` had it.
    Returns:
        a tensor like the sinks; 0 for heads that are not here.
    """
    assert spec.sinks is not None
    num_heads, column = lse.shape[1], spec.head_sinks(lse.shape[1])
    assert column is not None
    weight = torch.exp(column.detach().to(lse.dtype)[:, None] - lse)
    rows = weight * (grad_out.to(lse.dtype) * out).sum(-1)
    # rows that see nothing, such as padding, may hold anything
    own = -rows.masked_fill(lse == -torch.inf, 0).sum((0, 2))
    if spec.sinks.shape[0] == num_heads:
        return own.to(spec.sinks.dtype)
    assert spec.head_ids is not None
    heads = spec.head_ids.to(own.device)
    own = own * (heads < spec.sinks.shape[0])  # heads past the end are padding
    total = own.new_zeros(spec.sinks.shape)
    total.index_add_(0, heads.clamp(max=spec.sinks.shape[0] - 1), own)
    return total.to(spec.sinks.dtype)
