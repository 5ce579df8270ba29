"""Losses of logits of which each rank has the columns of some words, for the tokens of all ranks.

Vocabulary parallel (Megatron-LM, arXiv 1909.08053, section 3). With m_r the maximum of a token's
logits y_r on rank r, the rank that holds the token is told m_r, z_r and the label's logit:

    z_r = sum exp(y_r - m_r);  m = max m_r;  log sum exp y = m + log sum_r exp(m_r - m) z_r

Throughout, ``columns`` says which words are this rank's and how ranks meet, and ``x`` or ``logits``
[.., S, columns] are the rank's columns for all tokens; labels are of the rank's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paradyse.strategies.loss import NONE, loss_sums
from paradyse.strategies.weight_stream import sum_dtype

aten = torch.ops.aten


@dataclass(frozen=True)
class Stretch:
    """The words whose rows of a table, or columns of logits, this rank has."""

    start: int
    size: int
    total: int
    """How many words there are."""

    def find(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Where ``words`` are in the stretch, 0 for those elsewhere; and which of them are in it.

        What is no word is in the first stretch or the last one, so that looking it up raises there.
        """
        at = words - self.start
        elsewhere = torch.zeros_like(at, dtype=torch.bool)
        if self.start > 0:
            elsewhere = elsewhere | (at < 0)
        if self.start + self.size < self.total:
            elsewhere = elsewhere | (at >= self.size)
        return at.masked_fill(elsewhere, 0), ~elsewhere


@dataclass(frozen=True)
class Columns:
    """How ranks meet of which each has the columns of other words."""

    words: Stretch
    """Of this rank."""
    to_all: Callable[[Tensor], Tensor]
    """Values of the rank's tokens [.., s, ..] -> those of all tokens [.., S, ..]."""
    to_owners: Callable[[Tensor], Tensor]
    """Numbers for all tokens [.., S, .., k] -> those of every rank for this one's tokens
    [.., s, .., k, p]."""

    def pick(self, x: Tensor, words: Tensor) -> Tensor:
        """The elements of ``x`` at ``words`` [.., S, k]; 0 for words of other ranks."""
        at, here = self.words.find(words)
        return x.gather(-1, at).masked_fill(~here, 0)


def _maximum_and_sum(x: Tensor) -> list[Tensor]:
    """m_r and z_r [.., S]: finite also where all columns are -inf."""
    top = x.detach().amax(-1).clamp(min=torch.finfo(x.dtype).min)
    return [top, (x - top[..., None]).exp().sum(-1)]


def _log_sum_exp(found: Tensor) -> Tensor:
    """[..] of ``found`` [.., 2, p], the ``_maximum_and_sum`` of every rank."""
    tops, sums = found.unbind(-2)
    top = tops.amax(-1, keepdim=True)
    return ((tops - top).exp() * sums).sum(-1).log() + top.squeeze(-1)


def _cross_entropies(
    columns: Columns,
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
) -> tuple[Tensor, Tensor]:
    """Cross entropies [n], and the weights of their labels [n]; 0 where labels are ignored."""
    x = logits.to(sum_dtype(logits))
    counts = labels != ignore_index
    words = columns.to_all(torch.where(counts, labels, 0))[:, None]
    scale = x.new_ones(1, x.shape[1]) if weight is None else weight.detach().to(x.dtype)[None]
    numbers = [
        *_maximum_and_sum(x),
        *(columns.pick(y, words)[:, 0] for y in (x, scale.expand_as(x))),
    ]
    if smoothing:
        numbers += [(x * scale).sum(-1), scale.sum(-1).expand(x.shape[0])]
    found = columns.to_owners(torch.stack(numbers, -1))
    total, (picked, own, *smooth) = _log_sum_exp(found[:, :2]), found[:, 2:].sum(-1).unbind(-1)
    losses = own * (total - picked)
    if smoothing:
        scaled, scales = smooth
        others = (scales * total - scaled) / columns.words.total
        losses = (1 - smoothing) * losses + smoothing * others
    return losses.masked_fill(~counts, 0), own.masked_fill(~counts, 0)


def split_loss_sums(
    columns: Columns,
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    smoothing: float = 0.0,
    weight: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """``loss_sums`` over the rank's own tokens.

    Args:
        labels: [n] int, no probabilities; so ``rows`` is None.
        ignore_index, smoothing: as of ``loss_sums``.
        weight: [columns].
    """
    assert rows is None, rows
    losses, counts = _cross_entropies(columns, logits, labels, weight, ignore_index, smoothing)
    return torch.stack([losses.sum(), counts.sum()])


def split_cross_entropy(
    columns: Columns,
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``cross_entropy_loss`` of single tokens, [n].

    Args:
        labels, weight: as of ``split_loss_sums``.
        reduction: 0, which stands for none.
        ignore_index, label_smoothing: as of the operator.
    """
    assert reduction == NONE, reduction
    losses, _ = _cross_entropies(columns, logits, labels, weight, ignore_index, label_smoothing)
    return losses.to(logits.dtype)


def split_logsumexp(columns: Columns, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """``logsumexp`` over all columns, [.., s], or [.., s, 1] with ``keepdim``; ``dim`` is the
    last."""
    wide = x.to(sum_dtype(x))
    found = columns.to_owners(torch.stack(_maximum_and_sum(wide), -1))
    total = _log_sum_exp(found).to(x.dtype)
    return total[..., None] if keepdim else total


def split_log_softmax(
    columns: Columns, x: Tensor, dim: int, dtype: torch.dtype | None = None
) -> Tensor:
    """``log_softmax`` over all columns, [.., S, columns] in ``dtype``; ``dim`` is the last."""
    x = x.to(dtype or x.dtype)
    wide = x.to(sum_dtype(x))
    total = split_logsumexp(columns, wide, dim, keepdim=True)
    return (wide - columns.to_all(total)).to(x.dtype)


def split_gather(columns: Columns, x: Tensor, dim: int, index: Tensor, **options: Any) -> Tensor:
    """``gather`` of columns, [.., s, k].

    Args:
        dim: the last.
        index: [.., s, k].
        options: as of the operator.
    """
    return columns.to_owners(columns.pick(x, columns.to_all(index))).sum(-1)


SPLIT_OPERATORS: Mapping[Any, Callable[..., Tensor]] = {
    loss_sums: split_loss_sums,
    aten.cross_entropy_loss.default: split_cross_entropy,
    aten.logsumexp.default: split_logsumexp,
    aten.log_softmax.int: split_log_softmax,
    aten.gather.default: split_gather,
}
"""Operator over the words -> the same where each rank has some columns."""
