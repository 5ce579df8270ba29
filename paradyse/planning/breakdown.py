"""What a rank holds at the moment of a step when it holds most, part by part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from paradyse.planning.costs import BlockCost
from paradyse.planning.solver import Choices
from paradyse.types import Point

OUTSIDE = "what is in no block"


class Part(NamedTuple):
    """So much of what is held."""

    what: str
    num_bytes: int


def break_down(choices: Choices, points: Sequence[str], kinds: Sequence[str]) -> tuple[Part, ...]:
    """The parts of ``choices.peak(points)``; they add up to it, and none is empty.

    Args:
        choices: of one workload.
        points: one per block.
        kinds: of the blocks; the head's is ``HEAD``.
    """
    costs = choices.chosen(points)
    found = [
        Part("weights, gradients, optimizer", choices.static_bytes),
        Part("communicators", choices.communicator_bytes),
    ]
    at, left, workspace = _fullest(costs, choices.rest)
    rest, saved = choices.rest.saved_bytes, sum(c.saved_bytes for c in costs[: at + 1])
    held = choices.communicator_bytes + rest + saved + left + workspace
    margin = math.ceil(held * (1 + choices.margin)) - held
    if choices.floor_bytes + choices.communicator_bytes > held + margin:
        found.append(
            Part("before the first block saves, or when all are done", choices.floor_bytes)
        )
        return tuple(found)
    names = list(map(_words, kinds, points))
    for name in dict.fromkeys(names[: at + 1]):
        of = [c.saved_bytes for c, n in zip(costs[: at + 1], names) if n == name]
        found.append(Part(f"saved by {len(of)} x {name}", sum(of)))
    found += [
        Part(f"kept for all blocks, of {OUTSIDE}", rest),
        Part("gradients of whole weights, until they are summed", left),
        Part(f"workspace of {names[at] if at < len(names) else OUTSIDE}", workspace),
        Part("margin of the prediction", margin),
    ]
    return tuple(part for part in found if part.num_bytes)


def _words(kind: str, point: str) -> str:
    """``mlp, megatron_cz with tiled``; of the head its levers alone."""
    of = Point.parse(point)
    if of.levers:
        return f"{kind}, {of.strategy} with {'+'.join(of.levers)}"
    return f"{kind}, {point}" if point else kind


def _fullest(costs: Sequence[BlockCost], rest: BlockCost) -> tuple[int, int, int]:
    """The moment of ``peak_bytes``: index of the block that runs, or how many there are where none
    does; bytes that later blocks left; workspace."""
    saved, left = 0, sum(c.left_bytes for c in costs)
    moments = []
    for i, c in enumerate(costs):
        saved, left = saved + c.saved_bytes, left - c.left_bytes
        moments.append((saved + left + c.workspace_bytes, i, left, c.workspace_bytes))
    moments.append((saved + rest.workspace_bytes, len(costs), 0, rest.workspace_bytes))
    _, at, left, workspace = max(moments, key=lambda moment: moment[0])
    return at, left, workspace
