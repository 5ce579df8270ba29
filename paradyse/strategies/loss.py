"""Losses as sums over the rows at hand, which add up over chunks of rows and over ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from paradyse.strategies.weight_stream import sum_dtype

NONE, MEAN, SUM = 0, 1, 2
"""What PyTorch's operators call a loss's reduction."""


def loss_sums(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    smoothing: float = 0.0,
    weight: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """(sum of cross entropies, sum of the weights of labels that count) over the rows at hand. The
    mean is their quotient, and only the first has a gradient.

    Args:
        logits: [rows, classes].
        labels: [rows] int; or probabilities [rows, classes], and then ``rows`` must be given.
        ignore_index: the int label that does not count.
        smoothing: label smoothing.
        weight: [classes], of each label; None: 1.
        rows: [rows], 1 for a row that counts and 0 for one that does not.
    Returns:
        [2] in float32 (in float64 for such logits): bfloat16 cannot count beyond 256, and a sum
        in float16 overflows after some thousand tokens.
    """
    dtype = sum_dtype(logits)
    losses = F.cross_entropy(
        logits,
        labels,
        weight,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=smoothing,
    )
    if rows is not None:
        losses, counts = losses * rows, rows
    else:
        counts = labels != ignore_index
        if weight is not None:
            counts = counts * weight.detach()[torch.where(counts, labels, 0)].to(dtype)
    return torch.stack([losses.sum(dtype=dtype), counts.sum().to(dtype)])
