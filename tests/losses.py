"""Losses as people write them behind a model's logits, of a sequence's next tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from models import VOCAB, make_model
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of logits [B, S, V], token ids [B, S] and logits of a teacher [B, S, V]."""


def rows(y: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """Soft targets over rows."""
    return F.cross_entropy(y.flatten(0, 1), teacher.softmax(-1).flatten(0, 1))


def classes_second(y: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """Labels where the batch's dims stand."""
    return F.cross_entropy(y.transpose(1, 2), ids.roll(-1, 1))


def soft_classes_second(y: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """Soft targets in the same way."""
    return F.cross_entropy(y.transpose(1, 2), teacher.softmax(-1).transpose(1, 2))


def shifted_classes_second(y: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """The last logits cut off, classes second."""
    return F.cross_entropy(y[:, :-1].transpose(1, 2), ids[:, 1:], label_smoothing=0.1)


def distilled(y: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """Kullback-Leibler divergence from a teacher, by batch, as the recipes of distillation."""
    log_p, q = (y / 2).log_softmax(-1), (teacher / 2).softmax(-1)
    return F.kl_div(log_p, q, reduction="batchmean") * 4 / y.shape[1]


def shifted_distilled(y: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """The same of all next tokens, flattened, beside their cross entropy."""
    y, t = y[:, :-1].reshape(-1, VOCAB), teacher[:, :-1].reshape(-1, VOCAB)
    soft = F.kl_div(y.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="batchmean")
    return 0.3 * soft + 0.7 * F.cross_entropy(y, ids[:, 1:].reshape(-1))


def shifted_soft(y: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """Soft targets of next tokens."""
    return F.cross_entropy(y[:, :-1].flatten(0, 1), teacher[:, :-1].softmax(-1).flatten(0, 1))


def log_likelihood(y: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """nll_loss of log_softmax."""
    log_p = y[:, :-1].log_softmax(-1).flatten(0, 1)
    return F.nll_loss(log_p, ids[:, 1:].flatten(), ignore_index=3)


def token_losses(y: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """Cross entropies one by one, weighed by a mask."""
    shape = ids[:, 1:].shape
    found = F.cross_entropy(y[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    mask = (ids[:, 1:] % 3 > 0).float()
    return (found.view(shape) * mask).sum() / mask.sum()


def log_probabilities(y: Tensor, ids: Tensor) -> Tensor:
    """Of the tokens, [B, S - 1]."""
    return y[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def policy(y: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """GRPO: clipped ratios to an old policy, an estimate of the divergence, a mean per sequence."""
    now, old = log_probabilities(y, ids), log_probabilities(teacher.view_as(y), ids)
    advantages = torch.linspace(-1.0, 1.0, ids.shape[0])[:, None]
    ratio = (now - old).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    divergence = (old - now).exp() - (old - now) - 1
    mask = (torch.arange(ids.shape[1]) > 3)[None, 1:].float()
    loss = 0.04 * divergence - gain
    return ((loss * mask).sum(-1) / mask.sum(-1)).mean()


def preference(y: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """DPO of the first sequence against the second, logits less their logsumexp."""
    y, old = y[:, :-1] / 0.9, teacher.view_as(y)[:, :-1] / 0.9
    label = ids[:, 1:, None]

    def of(x: Tensor) -> Tensor:
        return (x.gather(-1, label).squeeze(-1) - x.logsumexp(-1)).sum(-1)

    margin = of(y) - of(old)
    return -F.logsigmoid(0.1 * (margin[0] - margin[1]))


def entropy(y: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """Entropy of all but the first distribution, and a penalty on logits."""
    log_p = y[:, 1:].log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).mean() + 1e-3 * y.square().mean()


def squared(y: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """Distance from a teacher's logits."""
    return F.mse_loss(y, teacher) + F.smooth_l1_loss(y, teacher, reduction="sum") / y.numel()


LOSSES: dict[str, Loss] = {
    fn.__name__: fn
    for fn in (
        rows,
        classes_second,
        soft_classes_second,
        shifted_classes_second,
        distilled,
        shifted_distilled,
        shifted_soft,
        log_likelihood,
        token_losses,
        policy,
        preference,
        entropy,
        squared,
    )
}


class WithLoss(nn.Module):
    """A Llama, and the loss ``name`` of its logits.

    Args:
        name: of ``LOSSES``.
        dtype: of the weights.
    """

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = make_model("llama", dtype)
        self.name = name

    def forward(self, input_ids: Tensor, teacher: Tensor) -> Tensor:
        logits = self.model(input_ids=input_ids).logits
        return LOSSES[self.name](logits, input_ids, teacher)


def batch_of(n: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Two sequences of ``n`` tokens, and a teacher's logits."""
    g = torch.Generator().manual_seed(n)
    return {
        "input_ids": torch.randint(VOCAB, (2, n), generator=g),
        "teacher": torch.randn(2, n, VOCAB, generator=g).to(dtype),
    }
