"""One file for each strategy: how one block is computed in parallel."""

from __future__ import annotations

from typing import Any

from torch import fx

import paradyse.strategies.attention.operators  # noqa: F401  registers the attention operators
from paradyse.graph.subgraph import Piece
from paradyse.strategies.base import Scope
from paradyse.strategies.groups.analyse import analyse
from paradyse.strategies.groups.model import Unsplittable
from paradyse.strategies.local import ZeroVariant
from paradyse.strategies.metp import MetpVariant, masks_inside
from paradyse.strategies.tensor_parallel import TensorParallelVariant
from paradyse.types import REPLICATED

Z_STRATEGIES = ("megatron_cz", "ulysses_z", "colossal_z")


def canonical_variant(kind: str, strategy: str) -> str:
    """The variant that computes ``strategy``: for an MLP the three Z strategies are one."""
    return "megatron_cz" if kind == "mlp" and strategy in Z_STRATEGIES else strategy


def build_variant(scope: Scope, block: Any, piece: Piece, strategy: str) -> Any:
    """The callable that computes ``block`` by ``strategy`` (it compiles on first use)."""
    attention: fx.Node | None = block.attention
    strategy = canonical_variant(block.kind, strategy)
    if strategy == REPLICATED or strategy in Z_STRATEGIES:
        return ZeroVariant(scope, piece, attention, strategy)
    if strategy == "megatron_ts":
        return TensorParallelVariant(scope, block, piece)
    if strategy == "metp":
        return MetpVariant(scope, block, piece)
    raise NotImplementedError(f"strategy {strategy}")


def infeasible_reasons(scope: Scope, block: Any) -> dict[str, str]:
    """Strategy -> why it cannot compute ``block``."""
    try:
        analyse(scope, block)
    except Unsplittable as e:
        return {"megatron_ts": str(e), "metp": str(e)}
    reason = masks_inside(block)
    return {"metp": reason} if reason else {}
