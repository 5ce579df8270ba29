"""What is said where no plan fits."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from paradyse.config import Options
from paradyse.planning.solver import Choices
from paradyse.planning.units import describe_workload, format_bytes
from paradyse.types import Workload

log = logging.getLogger(__name__)


def warn_of_limits(
    choices: Choices, points: Sequence[str], limit: float, workload: Workload
) -> None:
    """Log it where a plan that the user has named is predicted to pass a limit: it runs as named.

    Args:
        choices: for ``workload``.
        points: of the plan.
        limit: bytes of a rank.
    """
    if not choices.fits(points, limit):
        log.warning(
            "the plan that option 'plan' names is predicted to need %s a rank for %s, and %s on "
            'the host, of limits of %s and %s; limits bind what "auto" chooses, so it runs',
            format_bytes(choices.peak(points)),
            describe_workload(workload),
            format_bytes(choices.host_bytes(points)),
            format_bytes(limit),
            format_bytes(choices.host_limit),
        )


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
