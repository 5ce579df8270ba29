"""Process groups of an axis by purpose, so that messages of one need not wait for another's.

Messages of one process group are carried one after the other. A block's own messages would wait
for the next block's weights, which are fetched ahead, and for the former block's gradients. So each
of these has a group of its own of the same ranks, as in PyTorch's fully_shard: a *lane* of the
axis. All lanes of an axis share its session. Ranks start messages in one order over all lanes,
which is what they tell each other where one fails (``distributed/failures.py``).
An axis on gloo, and each of its lanes, has a second group for large messages to lower ranks
(``distributed/crossing.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from paradyse.distributed.axis import Axis, is_alive

GATHERS = "weights"
"""The lane of sharded weights on their way to the ranks that compute with them."""

GRADIENTS = "gradients"
"""The lane of gradients of weights on their way to the ranks that keep them."""

PURPOSES = (GATHERS, GRADIENTS)
"""Of all lanes; one word each."""


@dataclass
class Overlap:
    """Of one axis: whether messages of its lanes are under way while blocks compute."""

    on: bool = True
    """The next block's weights are fetched while the present block runs, and gradients are sent
    while backward goes on; False: each is waited for as it is asked for."""
    hidden: float = 1.0
    """Share of a message's time that is gone where something is computed meanwhile, as measured on
    all ranks of the axis (``Machine.overlap``); 1 where nothing was."""


class _Lanes(dict[str, Axis]):
    """Those of one axis, by purpose."""


def lane_of(axis: Axis, purpose: str) -> Axis:
    """What carries messages of ``purpose`` (``GATHERS``, ``GRADIENTS``) between the ranks of
    ``axis``: the lane, or ``axis`` where none were opened and for "", which is all other ones."""
    return axis.session.of(_Lanes).get(purpose, axis)


class _Downward(dict[str, Any]):
    """Of one axis, by lane, the process group of large messages to lower ranks."""


def downward_group(axis: Axis) -> Any:
    """The process group of large messages over ``axis``, or a lane, to lower ranks; None: the one
    that carries those to higher ranks."""
    return axis.session.of(_Downward).get(axis.lane)


def open_lanes(axis: Axis, make_group: Callable[[], Any]) -> None:
    """Give ``axis`` its lanes, for as long as its own process group lives. All ranks of it call
    this at the same time.

    Args:
        make_group: makes a process group of the same ranks and kind.
    """
    lanes = axis.session.of(_Lanes)
    if lanes or axis.size == 1:
        return
    downward = axis.session.of(_Downward)
    for purpose in PURPOSES:
        lanes[purpose] = replace(axis, group=make_group(), lane=purpose)
    if axis.backend == "gloo":
        downward.update({lane: make_group() for lane in ("", *PURPOSES)})
    axis.session.at_end.append(partial(_close, lanes, downward))


def _close(lanes: _Lanes, downward: _Downward) -> None:
    for group in [*(lane.group for lane in lanes.values()), *downward.values()]:
        if is_alive(group):
            dist.destroy_process_group(group)
    lanes.clear()
    downward.clear()


def num_groups(training: bool, sharded: bool) -> int:
    """Process groups of an axis that send anything in a step.

    Args:
        training: there are gradients.
        sharded: weights are gathered.
    """
    return 1 + training + sharded
