"""What is computed on gathered tokens, beside the blocks that plans are made for: in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paradyse.planning.units import format_bytes, format_seconds

LARGE_SHARE = 0.1
"""Of a step: what takes more is warned of."""


@dataclass(frozen=True)
class GatheredWork:
    """What the operators of some notes cost a rank in a step."""

    notes: tuple[str, ...]
    """Which operators, in which module, and why."""
    time_s: float | None
    """Seconds; None: they cannot be run at such a length, as each length has its own program."""
    sent_bytes: int
    """Bytes that the rank sends for them."""

    def line(self, share: float) -> str:
        """The notes, and what they cost; ``share`` of a step."""
        return f"{'; '.join(self.notes)}: {self.cost(share)}"

    def cost(self, share: float) -> str:
        """Time, bytes and the ``share`` of a step, in words."""
        sent = f"{format_bytes(self.sent_bytes)} sent by a rank"
        if self.time_s is None:
            return f"{sent}; its time is not known at this length"
        return f"{format_seconds(self.time_s)} and {sent}, {share:.0%} of a step"


def with_shares(
    found: Sequence[GatheredWork], step_s: float, measured: bool
) -> Iterator[tuple[GatheredWork, float]]:
    """Each of ``found`` with its share of a step.

    Args:
        step_s: predicted of the blocks and the head.
        measured: it has what was measured of all else, so these too.
    """
    all_s = step_s + (0.0 if measured else sum(w.time_s or 0.0 for w in found))
    for work in found:
        yield work, min(1.0, (work.time_s or 0.0) / all_s) if all_s else 0.0
