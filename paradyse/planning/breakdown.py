"""What a rank holds at the moment of a step when it holds most, part by part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from paradyse.planning.costs import moments
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
    most = max(moments(costs, choices.rest), key=lambda moment: moment.held_bytes)
    held, at, left, ahead, workspace = most
    rest = choices.rest.saved_bytes
    held += choices.communicator_bytes + rest
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
        Part("left to the end: gradients of whole weights, tokens of late logits", left),
        Part(f"workspace of {names[at] if at < len(names) else OUTSIDE}", workspace),
        Part("weights fetched ahead for the block before or behind", ahead),
        Part("margin of the prediction", margin),
    ]
    return tuple(part for part in found if part.num_bytes)


def _words(kind: str, point: str) -> str:
    """``mlp, megatron_cz with tiled``; of the head its levers alone."""
    of = Point.parse(point)
    if of.levers:
        return f"{kind}, {of.strategy} with {'+'.join(of.levers)}"
    return f"{kind}, {point}" if point else kind
