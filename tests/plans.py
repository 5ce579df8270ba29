"""Plans by name for the blocks that a compiled model has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from paradyse.runtime import offload
from paradyse.strategies import head, host_memory, tiles
from paradyse.types import ATTENTION_STRATEGIES, BlockSpec, HeadSpec, Plan

Blocks = list[tuple[str, dict[str, str]]]
"""Per block its kind, and strategy -> why it cannot compute the block."""


@contextmanager
def small_pieces() -> Iterator[None]:
    """Inside, a few tokens are several tiles and chunks, and the smallest tensors may be moved."""
    few = {"TILE_TOKENS": 8, "CHUNK_TOKENS": 8, "MIN_TILE_TOKENS": 4}
    with (
        patch.multiple(tiles, **few),
        patch.object(head, "TILE_TOKENS", 8),
        patch.object(offload, "MIN_BYTES", 1),
        patch.object(host_memory, "PAGE_BYTES", 1 << 12),
    ):
        yield


PLANS = (*ATTENTION_STRATEGIES, "mixed 0", "mixed 1")


def choose(name: str, blocks: tuple[BlockSpec, ...]) -> Plan:
    """The plan of this name: a strategy wherever it is feasible, or every block another one."""
    if name.startswith("mixed"):
        start = int(name.split()[1])
        feasible = [b.feasible() for b in blocks]
        return Plan(tuple(f[(i * 2 + start) % len(f)] for i, f in enumerate(feasible)))
    return Plan(tuple(name if name not in b.infeasible else b.feasible()[0] for b in blocks))


def blocks_of(compiled: Any) -> tuple[BlockSpec, ...]:
    from paradyse.runtime.registry import captures_of

    return [g.blocks for c in captures_of(compiled) for g in c.graphs.values()][-1]


def head_of(compiled: Any) -> HeadSpec:
    from paradyse.runtime.registry import captures_of

    return [g.choice.planner.head for c in captures_of(compiled) for g in c.graphs.values()][-1]
