"""Blocks of an axis by name: for messages over it of programs that are not compiled for it."""

from __future__ import annotations

from paradyse.distributed import collectives
from paradyse.distributed.axis import Axis


class NamedBlocks(dict[str, int]):
    """Of one axis: block ids, by name."""

    def id(self, axis: Axis, name: str) -> int:
        """The id of the block ``name`` on ``axis``, whose blocks these are."""
        if name not in self:
            self[name] = collectives.register_block(axis, name)
        return self[name]
