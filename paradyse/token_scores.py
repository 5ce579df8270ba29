"""What TRL's trainers ask of each token instead of logits, as a part of the model's graph.

TRL (``add_fused_lm_head``) gives a causal model a forward that takes log-probabilities of labels
from the hidden states and the weight of the head, chunk by chunk, in a custom autograd function. No
pass sees into that: every rank would compute the whole model. Here the model's own forward gives
the logits and what follows from them is written out, so that ranks share it like any head, and the
head's lever ``tiled`` takes the place of the chunks.

It was tried with TRL 1.16 (``tests/test_trl.py``). The local names of TRL's that it reads are not
public.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
"""The label of what is no target, as HuggingFace's losses have it."""

SCORES = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
"""What TRL calls them: of the label log p; of the distribution p of the next token the entropy in
nats, log of the sum of p^2, and the mean logit; whether the label is the likeliest token; whether
it counts."""


class TokenScores(NamedTuple):
    """What a forward with ``fused_lm_head=True`` returns: its attributes are those of ``SCORES``.

    They are [B, S - 1], as the last token has none that follows it, and 0 where the label does not
    count; None where TRL did not ask for them.
    """

    every: Mapping[str, Tensor]
    """The same by name, [B, S]."""
    aux_loss: Tensor | None = None
    """[], of routing to experts."""

    def __getattr__(self, name: str) -> Tensor | None:
        if name not in SCORES:
            raise AttributeError(f"a model gives TRL {', '.join(SCORES)} and aux_loss, not {name}")
        every = self.every.get(name)
        return None if every is None else every[:, :-1]


def score_in_graph(model: nn.Module) -> None:
    """Give the modules of ``model`` whose forward is TRL's one that returns ``TokenScores``.

    Raises:
        NotImplementedError: the head is to be computed in float32, whatever the model is in.
    """
    for module in model.modules():
        forward = vars(module).get("forward")
        if not isinstance(forward, MethodType):
            continue
        kept = inspect.getclosurevars(forward).nonlocals
        if not {"original_forward", "outputs", "temperature"} <= kept.keys():
            continue
        if kept["cast_lm_head_to_fp32"]:
            raise NotImplementedError(
                "cast_lm_head_to_fp32=True computes the head in another dtype than the model's: "
                "leave it out"
            )
        how = kept["original_forward"], kept["outputs"], kept["temperature"]
        module.forward = MethodType(_scoring(type(module), *how), module)


def _scoring(
    cls: type[nn.Module], original: Callable[..., Any], asked: Sequence[str], temperature: float
) -> Callable[..., Any]:
    """TRL's forward of a ``cls``, by the ``original`` one."""

    @functools.wraps(cls.forward)
    def forward(
        self: nn.Module, *args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any
    ) -> Any:
        if not fused_lm_head:
            given = {} if labels is None else {"labels": labels}
            return original(*args, **given, **kwargs)
        out = original(*args, **kwargs)
        logits = out.logits.float()
        if temperature != 1:
            logits = logits / temperature
        following = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        return TokenScores(_score(logits, following, asked), getattr(out, "aux_loss", None))

    return forward


def _score(logits: Tensor, labels: Tensor, asked: Sequence[str]) -> dict[str, Tensor]:
    """Those of ``SCORES`` that are ``asked`` for, and which labels count: [B, S] each.

    Args:
        logits: [B, S, V].
        labels: [B, S].
    """
    ignored = labels == IGNORED
    log_p = logits.log_softmax(-1)
    scores: dict[str, Callable[[], Tensor]] = {
        "log_probs": lambda: log_p.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1),
        "entropy": lambda: -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": lambda: (2 * log_p.detach()).logsumexp(-1),
        "mean_logits": lambda: logits.detach().mean(-1),
        "is_top1": lambda: logits.detach().argmax(-1) == labels,
    }
    found = {name: scores[name]().masked_fill(ignored, 0) for name in asked}
    return {"label_mask": labels != IGNORED, **found}
