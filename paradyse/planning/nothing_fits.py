"""What is said where no plan fits."""

from __future__ import annotations

from paradyse.config import Options
from paradyse.planning.solver import Choices
from paradyse.planning.units import describe_workload, format_bytes
from paradyse.types import Workload


def why_nothing_fits(
    choices: Choices, limit: float, workload: Workload, longest: int, options: Options
) -> str:
    """In words, that none of ``choices`` for ``workload`` fits, where the capacity of the device
    says so, which may be tried.

    Args:
        limit: bytes of a rank.
        longest: tokens of the longest sequences that would fit.
        options: of the backend.
    Raises:
        ValueError: the same, and what to do, where the user said so, or the host is too small.
    """
    need, points = choices.smallest()
    text = (
        f"no plan fits for {describe_workload(workload)}: the smallest needs "
        f"{format_bytes(need)} a rank, {format_bytes(choices.static_bytes)} of "
        "them weights, gradients and optimizer state; the longest sequences that would fit "
        f"have {longest} tokens"
    )
    if need <= limit:
        raise ValueError(
            f"{text}. With that, blocks keep {format_bytes(choices.host_bytes(points))} on the "
            f"host, of which a rank may use {format_bytes(choices.host_limit)}; raise option "
            "'host_memory', use more ranks, or shorter or fewer sequences"
        )
    if options.memory_limit is not None:
        allowed = ", ".join((*options.splitting, *options.levers))
        raise ValueError(
            f"{text}, but option 'memory_limit' is {format_bytes(limit)}; raise it, use more "
            "ranks or shorter or fewer sequences, or allow more strategies or levers (now: "
            f"{allowed})"
        )
    return text
