"""Models that train: an unmodified Llama, compiled by us or run eagerly, and its steps.

A step is zero_grad, forward, backward, without an optimizer.
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from runner import check_equal, seconds_of
from torch import Tensor

from paradyse.cli.launch import Rank
from paradyse.cli.models import make_model, read_config, vocabulary_of
from paradyse.profiling.steps import peak_beyond

AUTO = "auto"
VOCABULARY = 256
"""Byte-level tokens, as in ``paradyse demo``: the same small head for all contenders."""

TOLERANCE = 1e-4
"""Relative, float32, of losses and of each gradient (by norm), against one-process eager."""


def llama(
    layers: int, hidden: int, heads: int | None = None, kv_heads: int | None = None, **config: Any
) -> Any:
    """An unmodified HuggingFace Llama with random weights, equal on all ranks.

    Heads of width 32 and an MLP of 8/3 of the hidden width, unless said otherwise; ``config`` has
    any other field of a LlamaConfig.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = heads or hidden // 32
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": -(-hidden * 8 // 3 // 8) * 8,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads // 2,
        "max_position_embeddings": 65536,
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**{**fields, **config}))


def model_of(args: Namespace) -> Any:
    """The model of ``--model``, a config.json, or else a Llama, of ``--layers``."""
    if args.model:
        return make_model(read_config(args.model), args.layers)
    return llama(args.layers, args.hidden)


def make_profile(rank: Rank, model: Any, args: Namespace, lengths: list[int], repeats: int) -> None:
    """Writes ``args.profile_path``."""
    import paradyse

    def tell(p: Any) -> None:
        rank.send(f"profile: {p.done} of {p.total}  {p.text}")

    options = {"inner": args.inner}
    paradyse.profile(
        model, args.profile_path, lengths, repeats=repeats, options=options, progress=tell
    )


class Contender:
    """A model, and what runs it: the model itself, or the model compiled."""

    def __init__(self, model: Any, run: Any = None) -> None:
        self.model, self.run = model, model if run is None else run

    def tokens(self, seq_len: int) -> Tensor:
        """[1, seq_len] int64, equal on all ranks."""
        generator = torch.Generator().manual_seed(seq_len)
        return torch.randint(vocabulary_of(self.model), (1, seq_len), generator=generator)

    def step(self, ids: Tensor) -> Tensor:
        """The loss of a step."""
        self.model.zero_grad()
        loss = self.run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def loss(self, seq_len: int) -> float:
        """The loss of a step, whole on every rank."""
        return float(self.step(self.tokens(seq_len)))

    def time_s(self, seq_len: int) -> float:
        """Seconds of a step, on the slowest rank."""
        ids = self.tokens(seq_len)
        return seconds_of(lambda: self.step(ids))

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}

    def check(self, name: str, reference: Contender, seq_len: int) -> None:
        """Compares the loss and every gradient at this length with the reference's.

        Raises:
            SystemExit: they differ.
        """
        at = f"{name} at {seq_len} tokens"
        check_equal({"the reference": reference.loss(seq_len), at: self.loss(seq_len)}, TOLERANCE)
        expected, found = reference.gradients(), self.gradients()
        whole = math.hypot(*(float(g.norm()) for g in expected.values()))
        for weight, grad in expected.items():
            # A gradient that is zero but for rounding is held against all of them.
            norm = max(float(grad.norm()), TOLERANCE * whole)
            error = float((found[weight] - grad).norm()) / norm
            if not error <= TOLERANCE:
                sys.exit(f"not timed: {at} has the gradient of {weight} off by {error:.1e}")


def ours(model: Any, plan: Any, inner: str, **options: Any) -> Contender:
    """The model compiled by us, under a plan."""
    options = {"plan": plan, "inner": inner, **options}
    return Contender(model, torch.compile(model, backend="paradyse", options=options))


class Switched(Contender):
    """One model compiled once for all plans; its plan is set before a step."""

    def __init__(self, model: Any, inner: str, **options: Any) -> None:
        self.plan = AUTO
        made = ours(model, lambda workload: self.plan, inner, **options)
        super().__init__(model, made.run)

    def under(self, plan: str) -> Switched:
        self.plan = plan
        return self

    def peak_bytes(self, seq_len: int) -> int:
        """The most that a step without gradients at its start holds beyond what was held before,
        on the rank that held more."""
        self.model.zero_grad()
        ids, device = self.tokens(seq_len), next(self.model.parameters()).device
        peak = torch.tensor(peak_beyond(device, lambda: self.step(ids)))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        return int(peak)


def plans_of(compiled: Any) -> dict[int, str]:
    """Length -> the plan that a compiled model ran last, for people."""
    import paradyse

    out = {}
    for seq_len, plan in paradyse.stats(compiled).plan_per_length.items():
        counts = Counter(plan.split(","))
        out[seq_len] = " + ".join(f"{n} {k}" for k, n in counts.items())
    return out
