"""What runs on the ranks of the small benchmarks: one model whose plan is set before each step."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from common import check_equal, llama, random_tokens
from ranks import slower_rank
from torch import Tensor

from paradyse.profiling.steps import peak_beyond
from paradyse.types import ATTENTION_STRATEGIES

TOLERANCE = 1e-4
"""Relative, float32, of losses and of each gradient (by norm), against one-process eager."""


class Switched:
    """The Llama of ``common``, compiled once for all plans."""

    def __init__(self, layers: int, hidden: int, inner: str) -> None:
        self.model = llama(layers, hidden)
        self._reference = llama(layers, hidden)
        self._plan = ATTENTION_STRATEGIES[0]
        options = {"plan": lambda workload: self._plan, "inner": inner}
        self.compiled = torch.compile(self.model, backend="paradyse", options=options)

    def step(self, plan: str, ids: Tensor) -> Tensor:
        """zero_grad, forward, backward; the loss."""
        self._plan = plan
        self.model.zero_grad()
        loss = self.compiled(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def check(self, plan: str, seq_len: int) -> None:
        """Loss and every gradient against one-process eager.

        Raises:
            SystemExit: they differ.
        """
        ids = random_tokens(seq_len)
        self._reference.zero_grad()
        expected = self._reference(input_ids=ids, labels=ids, use_cache=False).loss
        expected.backward()
        at = f"{plan} at {seq_len} tokens"
        loss = self.step(plan, ids)
        check_equal({"eager": float(expected.detach()), at: float(loss)}, TOLERANCE)
        found = dict(self.model.named_parameters())
        for name, p in self._reference.named_parameters():
            error = float((found[name].grad - p.grad).norm() / p.grad.norm())
            if not error <= TOLERANCE:
                sys.exit(f"not timed: {at} has the gradient of {name} off by {error:.1e}")

    def time_s(self, plan: str, ids: Tensor) -> float:
        """Seconds of one step on the slower rank."""
        return slower_rank(lambda: self.step(plan, ids))

    def peak_bytes(self, plan: str, ids: Tensor) -> int:
        """The most that a step holds beyond what was held before, on the rank that held more.
        It begins without gradients."""
        self.model.zero_grad()
        device = next(self.model.parameters()).device
        peak = torch.tensor(peak_beyond(self.compiled, device, lambda: self.step(plan, ids)))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        return int(peak)
