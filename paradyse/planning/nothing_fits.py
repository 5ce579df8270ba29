"""What is said where no plan fits, and what is tried."""

from __future__ import annotations

from dataclasses import replace

from paradyse.config import Options
from paradyse.planning.solver import Choices, Points
from paradyse.planning.units import describe_workload, format_bytes
from paradyse.types import Workload


class NothingFitsError(ValueError):
    """No plan is within the memory that the user allows, or that the host has."""


def why_nothing_fits(
    choices: Choices, limit: float, workload: Workload, longest: int | None, options: Options
) -> str:
    """In words, that none of ``choices`` for ``workload`` fits, where the capacity of the device
    says so, which may be tried.

    Args:
        limit: bytes of a rank.
        longest: tokens of the longest sequences that would fit; None: not known.
        options: of the backend.
    Raises:
        NothingFitsError: the same, and what to do, where the user said so, or the host is too
            small.
    """
    need, points = choices.smallest()
    text = (
        f"no plan fits for {describe_workload(workload)}: the smallest needs "
        f"{format_bytes(need)} a rank, {format_bytes(choices.static_bytes)} of "
        "them weights, gradients and optimizer state"
    )
    if longest is not None:
        text += f"; the longest sequences that would fit have {longest} tokens"
    if need <= limit:
        raise NothingFitsError(
            f"{text}. With that, blocks keep {format_bytes(choices.host_bytes(points))} on the "
            f"host, of which a rank may use {format_bytes(choices.host_limit)}; raise option "
            "'host_memory', use more ranks, or shorter or fewer sequences"
        )
    if options.memory_limit is not None:
        allowed = ", ".join((*options.splitting, *options.levers))
        raise NothingFitsError(
            f"{text}, but option 'memory_limit' is {format_bytes(limit)}; raise it, use more "
            "ranks or shorter or fewer sequences, or allow more strategies or levers (now: "
            f"{allowed})"
        )
    return text


def smallest_within_host(choices: Choices) -> Points:
    """The plan of ``choices`` that needs least of the device; where that keeps more on the host
    than blocks may, the one that does so among those that keep nothing there, but for what was
    asked for by name."""
    points = choices.smallest()[1]
    if choices.host_bytes(points) <= choices.host_limit:
        return points
    names = [
        tuple(s for s in of if not cost[s].host_bytes) or of
        for of, cost in zip(choices.names, choices.costs)
    ]
    return replace(choices, names=names).smallest()[1]
