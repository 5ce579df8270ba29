"""What few measurements, or none, say of the memory of a block and of the rest of a step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace

from paradyse.planning.corrections import along
from paradyse.planning.costs import BlockCost
from paradyse.planning.curves import At
from paradyse.types import Workload

QUANTITIES = ("time_s", "saved_bytes", "workspace_bytes")
"""What is measured of a block and read off curves, as fields of ``BlockCost``."""

Samples = Mapping[At, tuple[float, float, float]]
"""Seconds, bytes saved, bytes of workspace at every measured point."""


def with_levers(measured: BlockCost, plain: BlockCost, levered: BlockCost) -> BlockCost:
    """The cost of a point with levers that was not measured itself.

    Time is in proportion. What is kept with the levers is known from shapes; saved and workspace
    together are in proportion, as what is not kept is needed again.

    Args:
        measured: its strategy without levers.
        plain, levered: what the prior says of both.
    """

    def share(of: Callable[[BlockCost], float]) -> float:
        return of(levered) / of(plain) if of(plain) > 0 else 1.0

    def held(cost: BlockCost) -> int:
        return cost.saved_bytes + cost.workspace_bytes

    workspace = math.ceil(held(measured) * share(held)) - levered.saved_bytes
    return replace(
        measured,
        time_s=measured.time_s * share(lambda cost: cost.time_s),
        saved_bytes=levered.saved_bytes,
        workspace_bytes=max(0, workspace),
        comm_bytes=levered.comm_bytes,
        host_bytes=levered.host_bytes,
        ahead_bytes=measured.ahead_bytes if levered.ahead_bytes else 0,
    )


def in_proportion(cost: BlockCost, said: BlockCost, there: BlockCost) -> BlockCost:
    """The cost of a point for a workload like none that was measured.

    Args:
        cost: as measured of another workload, of which the prior says ``said``.
        there: what the prior says of this one.
    """

    def scaled(quantity: str) -> float:
        value, before, after = (float(getattr(c, quantity)) for c in (cost, said, there))
        return value * after / before if before > 0 else after

    time_s, saved, workspace = map(scaled, QUANTITIES)
    return replace(
        there,
        time_s=time_s,
        saved_bytes=math.ceil(saved),
        workspace_bytes=math.ceil(workspace),
        source=cost.source,
        ahead_bytes=cost.ahead_bytes,
    )


def scaled_bytes(
    prior: BlockCost, samples: Samples, measurable: Callable[[At], BlockCost]
) -> BlockCost:
    """The ``prior``, its bytes times what was measured over what the prior says there.

    Args:
        samples: what was measured, at any number of points.
        measurable: what the prior says would be measured at a point.
    """
    said = {at: measurable(at) for at in samples}

    def ratio(i: int, quantity: str) -> float:
        pairs = ((row[i], getattr(said[at], quantity)) for at, row in samples.items())
        ratios = [y / x for y, x in pairs if x > 0 and y > 0]
        return statistics.geometric_mean(ratios) if ratios else 1.0

    _, saved, workspace = (ratio(i, q) for i, q in enumerate(QUANTITIES))
    return replace(
        prior,
        saved_bytes=int(prior.saved_bytes * saved),
        workspace_bytes=int(prior.workspace_bytes * workspace),
    )


def on_a_line(samples: Samples, workload: Workload) -> BlockCost:
    """What of ``workload`` is in no block, by ``samples``, one or two (``corrections.along``)."""
    tokens = workload.batch * workload.seq_len
    rows = zip(*samples.values(), strict=True)
    found = [along({b * s: v for (b, s), v in zip(samples, row)}, tokens) for row in rows]
    time_s, saved, workspace = found
    return BlockCost(time_s, math.ceil(saved), math.ceil(workspace), 0)
