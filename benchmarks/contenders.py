"""For benchmarks of training on several ranks: a model under a plan, and its steps timed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from ranks import slower_rank
from torch import Tensor

many_models = torch._dynamo.config.patch(recompile_limit=256, fail_on_recompile_limit_hit=True)
"""Decorates what compiles one model under many plans: Dynamo counts them all as recompilations of
one function, and at its limit would run it eagerly without a word."""


class Ours:
    """A contender: the unmodified model, compiled with a plan and further options."""

    def __init__(self, model: Any, plan: Any, inner: str, **options: Any):
        self.model = model
        options = {"plan": plan, "inner": inner, **options}
        self.run = torch.compile(model, backend="paradyse", options=options)

    def step(self, ids: Tensor) -> Tensor:
        loss = self.run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}


def time_step(contender: Any, ids: Tensor) -> float:
    """Seconds of one step on the slowest rank."""
    contender.model.zero_grad()
    return slower_rank(lambda: contender.step(ids))


def plans_of(compiled: Any) -> dict[int, str]:
    """Length -> the plan that a compiled model ran last, for people."""
    import paradyse

    out = {}
    known: Mapping[int, str] = paradyse.stats(compiled).plan_per_length
    for seq_len, plan in known.items():
        parts = plan.split(",")
        kinds = sorted(set(parts), key=parts.index)
        out[seq_len] = " + ".join(f"{parts.count(k)} {k}" for k in kinds)
    return out
