"""What ranks tell each other beside their messages: small facts between hosts, and alarms."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch.distributed as dist

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis, resolve_axis
from paradyse.torch_private import default_store

T = TypeVar("T")


def tell_all(mine: T, control: Axis) -> list[T]:
    """What every rank of ``control`` gives as ``mine``, small objects, in the order of ranks."""
    return collectives.gather_objects(mine, control, collectives.AGREEMENT)


class Alarm:
    """Whether a rank has failed, asked in passing: a key in the store of the world."""

    def __init__(self, name: str) -> None:
        self._name, self._num_settled = name, 0

    def ring(self) -> None:
        """This rank has failed."""
        default_store().set(self._key(), "")

    def rings(self) -> bool:
        """Whether any has."""
        return bool(default_store().check([self._key()]))

    def reset(self) -> None:
        """All ranks know."""
        self._num_settled += 1

    def _key(self) -> str:
        return f"paradyse/{self._name}/{self._num_settled}"


class Control(NamedTuple):
    """What carries small messages between hosts, apart from all others."""

    axis: Axis
    alarm: Alarm


class _Controls(dict[tuple[int, ...], Control]):
    """By their ranks; for the life of the world."""


def control_of(ranks: tuple[int, ...]) -> Control:
    """The one of ``ranks`` of the world; all of them ask for it at the same time.

    Raises:
        CollectiveError: not all of them came.
    """
    controls = resolve_axis().session.of(_Controls)
    if ranks not in controls:
        try:
            group = dist.new_group(
                list(ranks),
                timeout=collectives.timeout(),
                backend="gloo",
                # Names of such groups differ, and they hang, on ranks that are in more groups than
                # others: https://github.com/pytorch/pytorch/issues/173608
                use_local_synchronization=len(ranks) < dist.get_world_size(),
            )
        except RuntimeError as e:
            world = resolve_axis(), collectives.AGREEMENT
            raise collectives.failure("making the group", *world, e) from e
        name = f"control:{'-'.join(map(str, ranks))}"
        axis = Axis(name, len(ranks), ranks.index(dist.get_rank()), group)
        controls[ranks] = Control(axis, Alarm(name))
    return controls[ranks]
