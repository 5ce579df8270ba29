"""Models that train: an unmodified Llama, compiled by us or run eagerly, and its steps.

A step is zero_grad, forward, backward, without an optimizer.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from runner import check_equal, seconds_of
from torch import Tensor

import paradyse
from paradyse.cli.launch import Rank
from paradyse.cli.models import LlamaSize, make_llama, make_model, read_config, vocabulary_of
from paradyse.planning.explain import short_key
from paradyse.profiling.steps import peak_beyond
from paradyse.verification import worst_gradient

AUTO = "auto"
BACKENDS = ("inductor", "paradyse")
TOLERANCE = 1e-4
"""Relative, float32, of losses and of each gradient (by norm), against one-process eager."""


def llama(layers: int, hidden: int, heads: int = 0, kv_heads: int = 0, **size: int) -> Any:
    """An unmodified HuggingFace Llama with random weights, equal on all ranks.

    Heads of width 32 and an MLP of 8/3 of the hidden width, unless said otherwise; ``size`` has
    other fields of a ``LlamaSize``.
    """
    heads = heads or hidden // 32
    size = {"intermediate": -(-hidden * 8 // 3 // 8) * 8, "max_tokens": 65536} | size
    return make_llama(LlamaSize(layers, hidden, heads, kv_heads or heads // 2, **size))


def other_family(family: str, layers: int, hidden: int, heads: int) -> Any:
    """An unmodified HuggingFace ``gpt2`` or ``bert``, the latter to fill in masked words, with
    random weights, equal on all ranks; without dropout, so that it can be compared."""
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    sizes |= {"vocab_size": 256, "max_position_embeddings": 4096}
    if family == "gpt2":
        none = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        own = none | {"bos_token_id": None, "eos_token_id": None}
    else:
        none = dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.0)
        own = none | {"intermediate_size": 4 * hidden, "architectures": ["BertForMaskedLM"]}
    return make_model({"model_type": family, "use_cache": False} | sizes | own)


def model_of(args: Namespace) -> Any:
    """The model of ``--model``, a config.json, or else a Llama, of ``--layers``."""
    if args.model:
        return make_model(read_config(args.model), args.layers)
    return llama(args.layers, args.hidden)


def at_rest(model: Any, sharded: bool) -> Any:
    """``model``, its weights sharded over all ranks if they are to be."""
    if sharded:
        paradyse.shard(model)
    return model


def make_profile(
    rank: Rank, model: Any, args: Namespace, lengths: list[int], **options: Any
) -> None:
    """Writes ``args.profile_path``; ``options`` are those of ``paradyse.profile``."""
    options |= {"options": {"inner": args.inner}}
    options["progress"] = lambda p: rank.report(f"profile: {p.done} of {p.total}  {p.text}")
    paradyse.profile(model, args.profile_path, lengths, **options)


class Contender:
    """A model, and what runs it: the model itself, or the model compiled."""

    def __init__(self, model: Any, run: Any = None) -> None:
        self.model, self.run = model, model if run is None else run
        self._timed: dict[int, float] = {}

    def tokens(self, seq_len: int) -> Tensor:
        """[1, seq_len] int64, equal on all ranks."""
        generator = torch.Generator().manual_seed(seq_len)
        ids = torch.randint(vocabulary_of(self.model), (1, seq_len), generator=generator)
        return ids.to(self.model.device)

    def step(self, ids: Tensor) -> Tensor:
        """The loss of a step."""
        self.model.zero_grad()
        loss = self.run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def loss(self, seq_len: int) -> float:
        """The loss of a step, whole on every rank."""
        return float(self.step(self.tokens(seq_len)))

    def time_s(self, seq_len: int, count: int = 1) -> float:
        """Seconds of a step, on the slowest rank: the mean of ``count`` in a row. Exits where the
        last of them has another loss than the first that was timed had."""
        ids, losses = self.tokens(seq_len), list[float]()
        # The loss on the host is the end of the step's work on a device.
        taken = seconds_of(lambda: losses.extend(float(self.step(ids)) for _ in range(count)))
        loss = losses[-1]
        first = self._timed.setdefault(seq_len, loss)
        check_equal({"its first step": first, f"a later one of {seq_len} tokens": loss}, TOLERANCE)
        return taken / count

    def gradients(self) -> dict[str, Tensor]:
        """Of each parameter, whole; of sharded ones on all ranks together."""
        grads = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        return {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in grads.items()}

    def check(self, name: str, reference: Contender, *lengths: int) -> None:
        """Exits where the loss or a gradient at one of the lengths is not the reference's."""
        for n in lengths:
            at = f"{name} at {n} tokens"
            loss, gradients = reference.loss(n), reference.gradients()
            check_equal({"the reference": loss, at: self.loss(n)}, TOLERANCE)
            weight, error = worst_gradient(gradients, self.gradients())
            if not error <= TOLERANCE:
                sys.exit(f"not timed: {at} has the gradient of {weight} off by {error:.1e}")


def ours(
    model: Any, plan: Any, inner: str, dynamic: bool | None = None, **options: Any
) -> Contender:
    """The model compiled by us, under a plan."""
    options |= {"plan": plan, "inner": inner}
    run = torch.compile(model, backend="paradyse", options=options, dynamic=dynamic)
    return Contender(model, run)


class Switched(Contender):
    """One model compiled once for all plans; its plan is set before a step."""

    def __init__(self, model: Any, inner: str) -> None:
        self.plan = AUTO
        super().__init__(model, ours(model, lambda workload: self.plan, inner).run)

    def under(self, plan: str) -> Switched:
        self.plan = plan
        return self

    def check_plans(self, rank: Rank, plans: Iterable[str], *lengths: int) -> None:
        """Exits where a plan's loss or a gradient is not that of the model as it is."""
        for plan in plans:
            self.under(plan).check(plan, Contender(self.model), *lengths)
            rank.report(f"{plan} agrees with eager")

    def peak_bytes(self, seq_len: int) -> int:
        """The most that a step without gradients at its start holds beyond what was held before,
        on the rank that held more."""
        self.model.zero_grad()
        ids = self.tokens(seq_len)
        peak = torch.tensor(peak_beyond(ids.device, lambda: self.step(ids)))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        return int(peak)


def compiled(model: Any, backend: str) -> Contender:
    """The model compiled by a backend as it comes."""
    return Contender(model, torch.compile(model, backend=backend))


def plans_of(run: Any) -> dict[int, str]:
    """Length -> the plan that a compiled model ran last, for people."""
    return {n: short_key(k) for n, k in paradyse.stats(run).plan_per_length.items()}
