"""One file for each strategy: how one block is computed in parallel, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import paradyse.strategies.attention.operators  # noqa: F401  registers the attention operators
from paradyse.graph.subgraph import Piece
from paradyse.strategies.base import Scope, Strategy
from paradyse.strategies.dsp import DSP
from paradyse.strategies.experts.model import split_experts
from paradyse.strategies.groups.analyse import analyse
from paradyse.strategies.groups.model import Unsplittable
from paradyse.strategies.head import TiledHead
from paradyse.strategies.lever_work import LEVER_WORK
from paradyse.strategies.levers import lever_reasons, with_levers
from paradyse.strategies.local import COLOSSAL_Z, MEGATRON_CZ, ULYSSES_Z, zero_variant
from paradyse.strategies.metp import METP
from paradyse.strategies.tensor_parallel import MEGATRON_TS
from paradyse.strategies.vocabulary import VocabularyHead, vocabulary_of
from paradyse.strategies.work import Work
from paradyse.types import (
    ATTENTION_STRATEGIES,
    EXPERTS,
    HEAD,
    LEVER_SETS,
    REPLICATED,
    VOCABULARY,
    WHOLE_WEIGHTS,
    BlockSpec,
    Point,
    Workload,
)

STRATEGIES = (MEGATRON_TS, MEGATRON_CZ, ULYSSES_Z, COLOSSAL_Z, METP, DSP)
"""In the order of ``ATTENTION_STRATEGIES``, the names that a plan may use."""


def by_name(strategies: Sequence[Strategy], names: Sequence[str]) -> Mapping[str, Strategy]:
    """The registry.

    Args:
        strategies: all there are.
        names: what plans may say, in the same order.
    Raises:
        ValueError: a name occurs twice, or the strategies are not those that ``names`` lists.
    """
    found = [s.name for s in strategies]
    if twice := {n for n in found if found.count(n) > 1}:
        raise ValueError(f"two strategies are called {', '.join(sorted(twice))}")
    if found != list(names):
        raise ValueError(
            f"STRATEGIES are {', '.join(found)}, but ATTENTION_STRATEGIES of paradyse/types.py "
            f"lists {', '.join(names)}"
        )
    return dict(zip(found, strategies, strict=True))


def _alone(scope: Scope, block: Any, piece: Piece) -> Any:
    return zero_variant(scope, piece, block.attention, REPLICATED)


_BY_NAME = {
    **by_name(STRATEGIES, ATTENTION_STRATEGIES),
    REPLICATED: replace(MEGATRON_CZ, name=REPLICATED, build=_alone, same_as={}),
}


def strategy_named(name: str) -> Strategy:
    """The entry of ``STRATEGIES`` that is called ``name``.

    Raises:
        ValueError: there is none.
    """
    if name not in _BY_NAME:
        raise ValueError(f"unknown strategy {name!r}; legal: {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


@cache
def canonical_strategy(kind: str, point: str) -> str:
    """The point whose variant computes a block of ``kind`` under ``point``: strategies that differ
    in attention alone share those of other blocks.
    """
    at = Point.parse(point)
    known = _BY_NAME.get(at.strategy)
    shared = known.same_as.get(kind, "") if known is not None else ""
    return str(replace(at, strategy=shared)) if shared else point


def variant_of(block: BlockSpec, point: str) -> str:
    """``canonical_strategy`` of ``block`` under ``point``; where its attention is over a dim that
    is not split, strategies that compute with whole weights differ in nothing."""
    shared = canonical_strategy(block.kind, point)
    at = Point.parse(shared)
    if block.over is None or at.strategy not in (*WHOLE_WEIGHTS, DSP.name):
        return shared
    return str(replace(at, strategy=WHOLE_WEIGHTS[0]))


def build_variant(scope: Scope, block: Any, piece: Piece, name: str) -> Any:
    """The callable that computes ``block`` by the point ``name``; it compiles on first use.

    Args:
        scope: what all variants of the capture share.
        piece: the block's nodes, inputs and outputs.
    Raises:
        Unsplittable: the strategy cannot compute the block.
        ValueError: the strategy is unknown.
    """
    point = Point.parse(canonical_strategy(block.kind, name))
    variant = strategy_named(point.strategy).build(scope, block, piece)
    return with_levers(variant, point.levers)


def build_head(scope: Scope, head: Any, piece: Piece, levers: str) -> TiledHead:
    """What computes a head without whole logits.

    Args:
        scope: what all variants of the capture share.
        head: of the capture.
        piece: its nodes; logits are not among the outputs.
        levers: joined by "+".
    Raises:
        Unsplittable: the head cannot have the levers.
        ValueError: no head has such levers.
    """
    names = tuple(levers.split("+"))
    if names not in LEVER_SETS[HEAD]:
        legal = ", ".join(repr("+".join(v)) for v in LEVER_SETS[HEAD] if v)
        raise ValueError(f"the head has no levers {levers!r}; give one of {legal}")
    if VOCABULARY in names:
        return VocabularyHead(scope, head, piece, tiled="tiled" in names)
    return TiledHead(scope, head, piece)


def refused_by_head(scope: Scope, head: Any, piece: Piece) -> dict[str, str]:
    """Lever -> why ``head`` cannot have it.

    Args:
        scope, head, piece: as of ``build_head``.
    """
    try:
        vocabulary_of(scope, head, piece)
    except Unsplittable as e:
        return {VOCABULARY: str(e)}
    return {}


def infeasible_reasons(scope: Scope, block: Any) -> dict[str, str]:
    """Strategy -> why it cannot compute ``block``, a block of the capture of ``scope``."""
    mixed = ""
    try:
        if block.kind == EXPERTS:
            split_experts(scope, block)
        else:
            analyse(scope, block)
    except Unsplittable as e:
        mixed = str(e)
    reasons = {s.name: s.refuses(block) for s in STRATEGIES}
    variants = {s.name: strategy_named(canonical_strategy(block.kind, s.name)) for s in STRATEGIES}
    # with whole weights, heads or columns need not be computed apart
    reasons |= {name: mixed for name, v in variants.items() if mixed and v.weights != "whole"}
    return {name: reason for name, reason in reasons.items() if reason}


def refused_levers(scope: Scope, block: Any) -> dict[str, str]:
    """Lever, or point -> why ``block``, a block of the capture of ``scope``, cannot have it."""
    variants = {s.name: strategy_named(canonical_strategy(block.kind, s.name)) for s in STRATEGIES}
    legal = {lever for levers in LEVER_SETS[block.kind] for lever in levers}
    found = lever_reasons(scope, block, variants).items()
    return {at: why for at, why in found if at.rpartition("+")[2] in legal}


def count_work(
    block: BlockSpec, point: str, workload: Workload, sharded: bool, repeatable: bool = False
) -> Work:
    """What ``block`` does on one rank under ``point``; where every rank computes the whole, its
    gradients cross ranks all the same, unless they are the same bits.

    Args:
        workload: batch, length, dtype, number of ranks, training or not.
        sharded: 1/p of the weights on each rank at rest; False: whole on every rank.
        repeatable: as ``Machine.repeatable``.
    Raises:
        ValueError: the strategy is unknown.
    """
    at = Point.parse(canonical_strategy(block.kind, point))
    strategy = strategy_named(at.strategy)

    def counted(workload: Workload) -> Work:
        work = Work(block, workload)
        work.surround()
        strategy.count(work)
        return work

    alone = at.strategy == REPLICATED
    work = counted(replace(workload, num_ranks=1) if alone else workload)
    for lever in at.levers:
        LEVER_WORK[lever](work, counted)
    work.p = workload.num_ranks
    work.take_rows(strategy.weights, sharded, kept=not at.recomputes)
    work.fetch_weights(strategy.weights, sharded, repeatable and alone)
    return work
