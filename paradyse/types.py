"""Frozen values that the parts of ParaDySe hand each other; nothing here needs a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

ATTENTION_STRATEGIES = ("megatron_ts", "megatron_cz", "ulysses_z", "colossal_z", "metp")
"""Names a plan may use. For an MLP block the three ``*_z`` names mean the same variant."""

REPLICATED = "replicated"
"""How blocks run on one rank, or where a capture has nothing to split; a plan cannot choose it."""


@dataclass(frozen=True)
class MaskSpec:
    """Which keys a query may see, by position, without a dense mask.

    The query at position i sees the key at position j when all of these hold: ``j >= i - left``,
    ``j <= i + right``, ``i // chunk == j // chunk``, ``key_padding[b, j]``,
    ``document_ids[b, i] == document_ids[b, j]``; a condition whose field is unset is dropped.
    A query that sees no key gives output 0 and gradient 0.
    """

    left: int | None = None
    """Keys behind the query that are visible; a sliding window of w tokens has left = w - 1."""
    right: int | None = None
    """Keys ahead of the query that are visible; causal is right = 0."""
    chunk: int | None = None
    """Attention stays within chunks of this many positions."""
    key_padding: bool = False
    """A bool tensor [B, S] travels with the block: True where a key may be seen."""
    documents: bool = False
    """An int tensor [B, S] travels with the block: tokens see only their own document."""

    @property
    def causal(self) -> bool:
        return self.right == 0

    def __str__(self) -> str:
        parts = [
            "causal" if self.causal else "full" if self.right is None else f"right {self.right}",
            f"left {self.left}" if self.left is not None else "",
            f"chunk {self.chunk}" if self.chunk is not None else "",
            "key padding" if self.key_padding else "",
            "documents" if self.documents else "",
        ]
        return ", ".join(p for p in parts if p)


@dataclass(frozen=True)
class BlockSpec:
    """One switchable block of a captured model, as the planner and the reports see it."""

    name: str
    """A label for people: ``layers.3.attention``."""
    kind: str
    """``attention`` or ``mlp``."""
    layer: int
    """Index among the blocks of its kind, in the order of computation."""
    structure: str
    """Blocks of equal structure share their compiled variants."""
    infeasible: Mapping[str, str] = field(default_factory=dict)
    """Strategy name -> why it cannot compute this block."""
    hidden: int = 0
    """Width h of the residual stream."""
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    intermediate: int = 0
    """MLP width I; 0 for attention."""
    num_weight_elements: int = 0
    """Elements of all weights of the block."""
    num_split_weight_elements: int = 0
    """Of these, elements a head- or column-parallel strategy splits over the ranks."""
    mask: MaskSpec | None = None
    """None for an MLP, and for attention under a dense mask that was not recovered."""

    def feasible(self) -> tuple[str, ...]:
        return tuple(s for s in ATTENTION_STRATEGIES if s not in self.infeasible)


@dataclass(frozen=True)
class Workload:
    """What a plan is chosen for: equal on all ranks by construction."""

    batch: int
    seq_len: int
    dtype: torch.dtype
    training: bool
    num_ranks: int
    mask: str = ""
    """The kinds of masks in the graph, as text."""


@dataclass(frozen=True)
class Plan:
    """A strategy for every block, in the order of computation."""

    strategies: tuple[str, ...]

    @property
    def key(self) -> str:
        return ",".join(self.strategies)
