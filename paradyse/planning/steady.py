"""Which of the plans that are predicted to be about as fast is taken.

A prediction adds up what blocks take, each as if its neighbours were like it: gathered weights hide
behind as much as the block itself computes. So a plan of several strategies has to be faster by
more than that may be wrong, and another plan than the previous one by more than noise. What blocks
take in plans of several strategies is learned apart (``time_ratios.MIXED``), as neighbours get into
each other's way: gradients on their way from one hold up what the other waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from paradyse.planning.solver import Choices, Points
from paradyse.strategies import variant_of
from paradyse.types import BlockSpec, Point


def is_mixed(blocks: Sequence[BlockSpec], strategies: Points) -> bool:
    """Whether ``blocks`` under ``strategies`` do what none of these would have them all do, but
    those that cannot have it."""
    plain = [Point.parse(s).strategy for s in strategies]
    variants = [variant_of(b, s) for b, s in zip(blocks, plain, strict=True)]
    return not any(
        all(s in b.infeasible or variant_of(b, s) == v for b, v in zip(blocks, variants))
        for s in dict.fromkeys(plain)
    )


def of_one_strategy(
    fastest: Points, names: Sequence[Points], blocks: Sequence[BlockSpec], strategies: Sequence[str]
) -> list[Points]:
    """The plans of one strategy for all blocks that can have it, the others as in ``fastest``; none
    where that has levers, which are for what does not fit without.

    Args:
        fastest: the points of all blocks, and of the head, which stays as it is.
        names: per block the points to choose from.
        blocks: in the order of ``fastest``.
        strategies: to be tried.
    """
    if any(Point.parse(p).levers for p in fastest[: len(blocks)]):
        return []
    offered = [
        {variant_of(b, p): p for p in points if not Point.parse(p).levers}
        for b, points in zip(blocks, names)
    ]
    head = fastest[len(blocks) :]
    plans = (
        (*(of.get(variant_of(b, s), p) for b, of, p in zip(blocks, offered, fastest)), *head)
        for s in strategies
    )
    return list(dict.fromkeys(plans))


def with_levers_of_one_strategy(
    choices: Choices, blocks: Sequence[BlockSpec], strategies: Sequence[str], limit: float
) -> list[Points]:
    """For each of ``strategies`` the fastest of ``choices`` that fits ``limit`` bytes and has it
    for all ``blocks`` that can, with levers."""

    def of(strategy: str, block: BlockSpec, points: Points) -> Points:
        variant = variant_of(block, strategy)
        plain = {p: variant_of(block, Point.parse(p).strategy) for p in points}
        return tuple(p for p in points if plain[p] == variant) or points

    head = choices.names[len(blocks) :]
    found = [
        replace(choices, names=[*(of(s, b, n) for b, n in zip(blocks, choices.names)), *head])
        for s in strategies
    ]
    return [p for p in (some.fastest(limit) for some in found) if p is not None]


def steady(
    fastest: Points,
    previous: Points | None,
    alike: Sequence[Points],
    choices: Choices,
    limit: float,
    share: float,
    step_s: Callable[[Points], float],
) -> Points:
    """``fastest``, or where its time and ``share`` more allow it one of ``alike`` that fits, or the
    previous plan: this first if it is alike too.

    Args:
        fastest: the plan that is predicted to be.
        previous: None: there is none that is legal here.
        alike: ``of_one_strategy``.
        choices: that were chosen from.
        limit: bytes of the device.
        share: of the blocks' time.
        step_s: seconds of a step, the rest included.
    """

    def time_s(points: Points) -> float:
        return step_s(points) - choices.rest.time_s

    most_s = time_s(fastest) * (1 + share)
    near = [p for p in alike if time_s(p) <= most_s and choices.fits(p, limit)]
    if previous is not None and (previous in near or not near):
        if time_s(previous) <= most_s and choices.fits(previous, limit):
            return previous
    return min(near, key=time_s, default=fastest)
