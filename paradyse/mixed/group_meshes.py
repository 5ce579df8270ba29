"""Process groups of the ranks that compute together: made once, and kept as long as the world."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paradyse.distributed.agreement import agreement_of
from paradyse.distributed.axis import Axis, device_of, resolve_axis
from paradyse.distributed.together import Together
from paradyse.torch_private import num_process_groups


class GroupMeshes:
    """Meshes of groups, by their ranks; of the world, in ``Session`` of its axis.

    A plan has groups of most ranks first, from rank 0 on, so where degrees are powers of two a rank
    is in one group for each of them at most.
    """

    def __init__(self) -> None:
        self._meshes: dict[range, DeviceMesh | None] = {}

    def make(self, groups: Iterable[range], world: Axis) -> None:
        """Make the meshes of ``groups`` that there are not yet.

        Args:
            groups: the same ones in the same order on every rank.
            world: the axis of all ranks, each of which calls this at the same time.
        """
        device = device_of(world.group).type
        for ranks in groups:
            if ranks in self._meshes:
                continue
            group = dist.new_group(list(ranks))
            mine = world.rank in ranks
            mesh = self._meshes[ranks] = DeviceMesh.from_group(group, device) if mine else None
            _even_out(world)
            if mesh is not None:  # its ranks make further groups among themselves, now
                agreement_of(resolve_axis(mesh), mesh)

    def of(self, ranks: range) -> DeviceMesh:
        """The mesh of ``ranks``, of which this one is part."""
        mesh = self._meshes[ranks]
        assert mesh is not None, f"rank {dist.get_rank()} is not in {ranks}"
        return mesh


def _even_out(world: Axis) -> None:
    """Have all ranks of ``world`` in equally many process groups, which their names depend on."""
    together = Together(world, "making the groups of MixedBatches")
    most = max(together.each(num_process_groups))
    while num_process_groups() < most:
        dist.new_group([world.rank], use_local_synchronization=True)
