"""Process groups of the ranks that compute together: made once, and kept as long as the world."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paradyse.distributed.axis import device_of, resolve_axis
from paradyse.distributed.control import make_control


class GroupMeshes:
    """Meshes of groups, by their ranks; of the world, in ``Session`` of its axis.

    A plan has groups of most ranks first, from rank 0 on, so where degrees are powers of two a rank
    is in one group for each of them at most.
    """

    def __init__(self) -> None:
        self._meshes: dict[range, DeviceMesh | None] = {}

    def make(self, groups: Iterable[range]) -> None:
        """Make the meshes of ``groups`` that there are not yet: on every rank of the world, which
        all have the same ones in the same order."""
        device = device_of(resolve_axis().group).type
        for ranks in groups:
            if ranks in self._meshes:
                continue
            group = dist.new_group(list(ranks))
            if len(ranks) > 1:
                make_control(tuple(ranks))
            mine = dist.get_rank() in ranks
            self._meshes[ranks] = DeviceMesh.from_group(group, device) if mine else None

    def of(self, ranks: range) -> DeviceMesh:
        """The mesh of ``ranks``, of which this one is part."""
        mesh = self._meshes[ranks]
        assert mesh is not None, f"rank {dist.get_rank()} is not in {ranks}"
        return mesh
